"""Figures as the cells of a table: how many digits, and a dash where there is nothing to say."""

from experiments.reporting.table import NOTHING, Cell, Emphasis
from experiments.results.lossless import NOT_LOSSLESS, Verdict, promises_exact
from experiments.results.statistics import Interval
from experiments.results.summary import MethodSummary


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    """A ratio, or a dash."""
    return NOTHING if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """A share, or a dash."""
    return NOTHING if value is None else f"{value:.0%}"


def interval(values: Interval | None) -> str:
    """Both ends in words, or a dash where one prompt gives none."""
    return NOTHING if values is None else f"{values[0]:.2f} to {values[1]:.2f}"


def with_interval(value: str, bounds: Interval | None, *, emphasis: Emphasis = Emphasis.NONE) -> Cell:
    """A value and its interval, if there is one."""
    return Cell(value, () if bounds is None else (f"[{bounds[0]:.2f}, {bounds[1]:.2f}]",), emphasis=emphasis)


def signed(value: float | None, bounds: Interval | None) -> Cell:
    """A difference with its sign, and its interval if there is one; or a dash."""
    if value is None:
        return Cell(NOTHING)
    return Cell(f"{value:+.3f}", () if bounds is None else (f"[{bounds[0]:+.3f}, {bounds[1]:+.3f}]",))


def equality(method: MethodSummary) -> Cell:
    """How many greedy outputs equal plain decoding's, and the verdict on the others."""
    if method.compared_with_plain is None:
        return Cell(NOTHING)
    text = f"{method.equal_to_plain} of {method.compared_with_plain}"
    if method.not_lossless:
        return Cell(text, (NOT_LOSSLESS,), joint=", ", emphasis=Emphasis.MISSED)
    ties = method.lossless is not None and method.lossless.verdict is Verdict.TIES
    return Cell(text, ("else ties",) if ties else (), joint=", ")


def method_name(method: MethodSummary) -> Cell:
    """A method's name with the warnings that belong to it."""
    if method.not_lossless:
        return Cell(method.label, (NOT_LOSSLESS,), joint=", ", emphasis=Emphasis.MISSED)
    return Cell(method.label, emphasis=lossiness(method.exactness))


def lossiness(exactness: str | None) -> Emphasis:
    """How a rule's name stands out: a rule that is not exact does."""
    return Emphasis.NONE if exactness is None or promises_exact(exactness) else Emphasis.LOSSY
