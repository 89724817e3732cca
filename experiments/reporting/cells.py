"""Figures as the cells of a table: how many digits, and a dash where there is nothing to say."""

from collections.abc import Iterable, Sequence

from experiments.reporting.table import NOTHING, Cell, Emphasis
from experiments.results.lossless import NOT_LOSSLESS, Verdict, promises_exact
from experiments.results.records import PLAIN
from experiments.results.statistics import Interval
from experiments.results.summary import MethodSummary

EMPTY = Cell(NOTHING)


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    """A ratio, or a dash."""
    return NOTHING if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """A share, or a dash."""
    return NOTHING if value is None else f"{value:.0%}"


def signed_percent(value: float | None) -> str:
    """A relative change with its sign, or a dash."""
    return NOTHING if value is None else f"{value:+.1%}"


def three_digits(value: float | None) -> str:
    """A figure with as many digits as count, or a dash."""
    if value is None:
        return NOTHING
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def between(bounds: Interval | None, form: str = ".2f") -> tuple[str, ...]:
    """An interval in brackets, if there is one: a cell's second part."""
    return () if bounds is None else (f"[{bounds[0]:{form}}, {bounds[1]:{form}}]",)


def interval(values: Interval | None) -> str:
    """Both ends in words, or a dash where one prompt gives none."""
    return NOTHING if values is None else f"{values[0]:.2f} to {values[1]:.2f}"


def with_interval(value: str, bounds: Interval | None, *, best: bool = False) -> Cell:
    """A value and its interval, if there is one; the best one stands out."""
    return Cell(value, between(bounds), emphasis=Emphasis.BEST if best else Emphasis.NONE)


def signed(value: float | None, bounds: Interval | None, digits: int = 3) -> Cell:
    """A difference with its sign, and its interval if there is one; or a dash."""
    form = f"+.{digits}f"
    return EMPTY if value is None else Cell(f"{value:{form}}", between(bounds, form))


BOLD = "bold: the largest figure of the exact methods at a temperature, where chance does not explain its lead"


def length(method: MethodSummary, *, best: bool | None = None) -> Cell:
    """A method's mean acceptance length; plain decoding's needs no interval. The run's best one stands out."""
    bounds = None if method.method == PLAIN else method.mean_acceptance_length_interval
    best = "mean_acceptance_length" in method.best_in if best is None else best
    return with_interval(number(method.mean_acceptance_length), bounds, best=best)


def speedup(method: MethodSummary, *, best: bool | None = None) -> Cell:
    """A method's speed over plain decoding's. The run's best one stands out."""
    best = "speedup" in method.best_in if best is None else best
    return with_interval(times(method.speedup), method.speedup_interval, best=best)


FEW_PROMPTS = 5
"""Prompts from which on a bootstrap interval is nearly as wide as it says (a test draws some)."""


def of_few(prompts: Iterable[int]) -> list[str]:
    """The note on intervals over few prompts, if there are any."""
    said = f"intervals over fewer than {FEW_PROMPTS} prompts are too narrow: of 3, they miss the truth in 1 of 4 cases"
    return [said] if any(count < FEW_PROMPTS for count in prompts) else []


def equality(method: MethodSummary) -> Cell:
    """How many greedy outputs equal plain decoding's, and the verdict on the others."""
    if method.compared_with_plain is None:
        return EMPTY
    text = f"{method.equal_to_plain} of {method.compared_with_plain}"
    if method.not_lossless:
        return Cell(text, (NOT_LOSSLESS,), joint=", ", emphasis=Emphasis.MISSED)
    ties = method.lossless is not None and method.lossless.verdict is Verdict.TIES
    return Cell(text, ("else ties",) if ties else (), joint=", ")


def method_name(method: MethodSummary) -> Cell:
    """A method's name with the warnings that belong to it."""
    if method.not_lossless:
        return Cell(method.label, (NOT_LOSSLESS,), joint=", ", emphasis=Emphasis.MISSED)
    return label_cell(method)


def rules_of(methods: Iterable[MethodSummary]) -> str:
    """The promises of some methods' rules, in words; empty for plain decoding alone."""
    rules = sorted({method.exactness for method in methods if method.exactness is not None})
    return f"acceptance rule: {', '.join(rules)}" if rules else ""


def label_cell(method: MethodSummary, name: str = "", *more: str, joint: str = " ") -> Cell:
    """A method's label, or another name of it; a rule that is not exact stands out."""
    return Cell(name or method.label, more, joint, lossiness(method.exactness))


def names_of(methods: Sequence[MethodSummary]) -> list[str]:
    """The methods' names, with their temperatures where there are several."""
    several = len({method.temperature for method in methods}) > 1
    return [method.label + (f", T={method.temperature:g}" if several else "") for method in methods]


def lossiness(exactness: str | None) -> Emphasis:
    """How a rule's name stands out: a rule that is not exact does."""
    return Emphasis.NONE if exactness is None or promises_exact(exactness) else Emphasis.LOSSY
