"""Columns and words that tables share."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from experiments.reporting.table import NOTHING, Cell, Col, Emphasis, words
from experiments.results.lossless import NOT_LOSSLESS, Verdict, promises_exact
from experiments.results.records import PLAIN
from experiments.results.rows import Row
from experiments.results.runs import Run

FAMILY = ": "
"""Stands in a label between its family (one line in plots) and the member."""
BOLD = "bold: the largest figure of the exact methods at a temperature, where chance does not explain its lead"
CLOSED = "all requests of a batch arrive together, and the next batch when they have ended (closed loop)"
"""How the load of a run comes about, which decides what latencies mean."""
FEW_PROMPTS = 5
"""Prompts from which on a bootstrap interval is nearly as wide as it says (a test draws some)."""


def unless_plain(column: Col) -> Col:
    """The column; plain decoding's figure is 1 by definition, and needs no interval."""
    return replace(column, field=lambda row: column.cell(row).text if row["method"] == PLAIN else column.cell(row))


def method_cell(row: Row, name: str = "", *more: str, joint: str = " ") -> Cell:
    """A method's label, or another name of it; a rule that is not exact stands out."""
    return Cell(name or row["label"], more, joint, lossiness(row["exactness"]))


def lossiness(exactness: str | None) -> Emphasis:
    """How a rule's name stands out: a rule that is not exact does."""
    return Emphasis.NONE if exactness is None or promises_exact(exactness) else Emphasis.LOSSY


def equality(row: Row) -> Cell:
    """How many greedy outputs equal plain decoding's, and the verdict on the others."""
    if row["compared_with_plain"] is None:
        return Cell(NOTHING)
    text = f"{row['equal_to_plain']} of {row['compared_with_plain']}"
    if row["not_lossless"]:
        return Cell(text, (NOT_LOSSLESS,), joint=", ", emphasis=Emphasis.MISSED)
    return Cell(text, ("else ties",) if row["lossless"] == Verdict.TIES else (), joint=", ")


T = Col("T", "temperature", "g")
METHOD = words("method", method_cell)
LENGTH = Col("mean acceptance\nlength", "mean_acceptance_length")
SPEEDUP = Col("speedup", "speedup", ".2fx")
TOKENS = Col("tokens/s", "tokens_per_second", ".1f")
ACCEPTED = Col("draft\naccepted", "draft_acceptance_rate", ".0%")
NODES = Col("nodes/\nround", "proposed_nodes_per_round", ".1f")
DISTINCT = Col("distinct\n4-grams", "distinct_4_gram_rate", ".0%")
EQUAL = Col("equal\nto plain", equality)
TTFT = Col("TTFT, ms\np50; p99", "ttft.p50", "3", 1e3, also="ttft.p99", bounds=False)
TPOT = Col("TPOT, ms\np50; p99", "tpot.p50", "3", 1e3, also="tpot.p99", bounds=False)
USER = Col("tokens/s,\none user", "user_tokens_per_second", ".1f")
ALL_USERS = Col("tokens/s,\nall users", "output_tokens_per_second", ".1f")
IN_FLIGHT = Col("in flight,\nmean", "concurrency", ".1f")


def percent(value: float | None) -> str:
    """A share, or a dash."""
    return NOTHING if value is None else f"{value:.0%}"


def of_few(prompts: Iterable[int]) -> list[str]:
    """The note on intervals over few prompts, if there are any."""
    said = f"intervals over fewer than {FEW_PROMPTS} prompts are too narrow: of 3, they miss the truth in 1 of 4 cases"
    return [said] if any(count < FEW_PROMPTS for count in prompts) else []


def rules_of(rows: Iterable[Row]) -> str:
    """The promises of some methods' rules, in words; empty for plain decoding alone."""
    rules = sorted({row["exactness"] for row in rows if row["exactness"] is not None})
    return f"acceptance rule: {', '.join(rules)}" if rules else ""


def labels_of(rows: Sequence[Row]) -> list[str]:
    """The methods' labels, with their temperatures where there are several."""
    several = len({row["temperature"] for row in rows}) > 1
    return [row["label"] + (f", T={row['temperature']:g}" if several else "") for row in rows]


def conditions_of(runs: Sequence[Run], *facts: Callable[[Run], str]) -> list[str]:
    """Target, dtype, device and further facts of a sweep's runs, each run's own where they differ, and warnings."""
    shared = (lambda run: run.manifest["target"]["name"], lambda run: run.manifest["dtype"])
    values = [{fact(run) for run in runs} for fact in (*shared, lambda run: run.manifest["device"], *facts)]
    counts = {"INCOMPLETE": sum(not run.complete for run in runs), "NOISY TIMINGS": sum(run.noisy for run in runs)}
    return [
        *(" or ".join(sorted(texts)) for texts in values),
        *(f"{warning} in {count} of {len(runs)} runs" for warning, count in counts.items() if count),
    ]
