"""Columns that tables share: a field of a row of the frame, its heading and its form; a dash where nothing is known."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.reporting.table import NOTHING, Cell, Column, Emphasis
from experiments.results.lossless import NOT_LOSSLESS, Verdict, promises_exact
from experiments.results.records import PLAIN
from experiments.results.rows import Row, interval
from experiments.results.statistics import Interval

EMPTY = Cell(NOTHING)
FAMILY = ": "
"""Stands in a label between its family (one line in plots) and the member."""
BOLD = "bold: the largest figure of the exact methods at a temperature, where chance does not explain its lead"
CLOSED = "all requests of a batch arrive together, and the next batch when they have ended (closed loop)"
"""How the load of a run comes about, which decides what latencies mean."""
FEW_PROMPTS = 5
"""Prompts from which on a bootstrap interval is nearly as wide as it says (a test draws some)."""


@dataclass(frozen=True)
class Col:
    """A column: ``field`` of a row times ``scale`` in ``form``, with its interval in brackets where there is one.

    Attributes:
        form: A format of Python, with a unit behind it: ``".2fx"``. ``"3"``: as many digits as count.
        also: Another field, behind a semicolon.
        best: Where the row is the best in this field (``best.speedup``), the cell stands out.
        bounds: Whether the interval is shown.
    """

    heading: str
    field: str
    form: str = ".2f"
    scale: float = 1.0
    align: Literal["left", "right"] = "right"
    also: str | None = None
    best: bool = False
    bounds: bool = True

    @property
    def column(self) -> Column:
        return Column(self.heading, self.align, fold=self.align == "left")

    def cell(self, item: Mapping[str, Any], /) -> Cell:
        """What the column says of a row."""
        value = item.get(self.field)
        if value is None or value != value:
            return EMPTY
        text = self._text(value)
        if self.also is not None:
            text += f"; {self._text(item.get(self.also))}"
        found = interval(item, self.field) if self.bounds else None
        more = () if found is None else (f"[{', '.join(self._text(end, unit=False) for end in found)}]",)
        leads = self.best and bool(item.get(f"best.{self.field}"))
        return Cell(text, more, emphasis=Emphasis.BEST if leads else Emphasis.NONE)

    def _text(self, value: Any, *, unit: bool = True) -> str:
        if value is None or value != value:
            return NOTHING
        if isinstance(value, str):
            return value
        scaled = value if self.scale == 1.0 else self.scale * value
        if self.form == "3":
            return three_digits(scaled)
        return f"{scaled:{self.form.removesuffix('x')}}" + ("x" if unit and self.form.endswith("x") else "")


def unless_plain(column: Col) -> "tuple[Column, Callable[[Row], Cell]]":
    """The column; plain decoding's figure is 1 by definition, and needs no interval."""
    return column.column, lambda row: Cell(column.cell(row).text) if row["method"] == PLAIN else column.cell(row)


def method_cell(row: Row, name: str = "", *more: str, joint: str = " ") -> Cell:
    """A method's label, or another name of it; a rule that is not exact stands out."""
    return Cell(name or row["label"], more, joint, lossiness(row["exactness"]))


def equality(row: Row) -> Cell:
    """How many greedy outputs equal plain decoding's, and the verdict on the others."""
    if row["compared_with_plain"] is None:
        return EMPTY
    text = f"{row['equal_to_plain']} of {row['compared_with_plain']}"
    if row["not_lossless"]:
        return Cell(text, (NOT_LOSSLESS,), joint=", ", emphasis=Emphasis.MISSED)
    return Cell(text, ("else ties",) if row["lossless"] == Verdict.TIES else (), joint=", ")


T = Col("T", "temperature", "g")
METHOD = (Column("method", "left", fold=True), method_cell)
LENGTH = Col("mean acceptance\nlength", "mean_acceptance_length")
SPEEDUP = Col("speedup", "speedup", ".2fx")
TOKENS = Col("tokens/s", "tokens_per_second", ".1f")
ACCEPTED = Col("draft\naccepted", "draft_acceptance_rate", ".0%")
NODES = Col("nodes/\nround", "proposed_nodes_per_round", ".1f")
DISTINCT = Col("distinct\n4-grams", "distinct_4_gram_rate", ".0%")
EQUAL = (Column("equal\nto plain"), equality)
TTFT = Col("TTFT, ms\np50; p99", "ttft.p50", "3", 1e3, also="ttft.p99", bounds=False)
TPOT = Col("TPOT, ms\np50; p99", "tpot.p50", "3", 1e3, also="tpot.p99", bounds=False)
USER = Col("tokens/s,\none user", "user_tokens_per_second", ".1f")
ALL_USERS = Col("tokens/s,\nall users", "output_tokens_per_second", ".1f")
IN_FLIGHT = Col("in flight,\nmean", "concurrency", ".1f")


# ---------------------------------------------------------------- forms of single values


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


def milliseconds(spread: Mapping[str, float] | None) -> str:
    """Median and 99th percentile of a latency in seconds."""
    return NOTHING if spread is None else f"{three_digits(1000 * spread['p50'])}; {three_digits(1000 * spread['p99'])}"


def between(bounds: Interval | None, form: str = ".2f") -> tuple[str, ...]:
    """An interval in brackets, if there is one: a cell's second part."""
    return () if bounds is None else (f"[{bounds[0]:{form}}, {bounds[1]:{form}}]",)


def signed(value: float | None, bounds: Interval | None, digits: int = 3) -> Cell:
    """A difference with its sign, and its interval if there is one; or a dash."""
    form = f"+.{digits}f"
    return EMPTY if value is None else Cell(f"{value:{form}}", between(bounds, form))


# ---------------------------------------------------------------- words


def of_few(prompts: Iterable[int]) -> list[str]:
    """The note on intervals over few prompts, if there are any."""
    said = f"intervals over fewer than {FEW_PROMPTS} prompts are too narrow: of 3, they miss the truth in 1 of 4 cases"
    return [said] if any(count < FEW_PROMPTS for count in prompts) else []


def rules_of(rows: Iterable[Row]) -> str:
    """The promises of some methods' rules, in words; empty for plain decoding alone."""
    rules = sorted({row["exactness"] for row in rows if row["exactness"] is not None})
    return f"acceptance rule: {', '.join(rules)}" if rules else ""


def label_of(row: Row, labels: Mapping[str, str]) -> str:
    """What a method is called."""
    name = "plain decoding" if row["method"] == PLAIN else labels.get(row["method"], row["method"])
    return row["label"].replace(row["method"], name, 1)


def labels_of(rows: Sequence[Row]) -> list[str]:
    """The methods' labels, with their temperatures where there are several."""
    several = len({row["temperature"] for row in rows}) > 1
    return [row["label"] + (f", T={row['temperature']:g}" if several else "") for row in rows]


def lossiness(exactness: str | None) -> Emphasis:
    """How a rule's name stands out: a rule that is not exact does."""
    return Emphasis.NONE if exactness is None or promises_exact(exactness) else Emphasis.LOSSY
