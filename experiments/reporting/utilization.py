"""What methods made of the device, as a table, and warnings of what cannot be true."""

from collections.abc import Callable
from functools import partial

from experiments.reporting.cells import NOTHING, percent
from experiments.reporting.table import Column, Table
from experiments.results.summary import MethodSummary, Summary
from experiments.results.utilization import STAGES, Prediction, StageUse, Utilization

TITLE = "Use of the device"


def utilization_table(summary: Summary, title: str = TITLE) -> Table | None:
    """A row per figure, a column per method; None where no work was counted, or with nothing to compare it with."""
    known = [
        method
        for method in summary.methods
        if method.utilization is not None and (method.utilization.stages or method.utilization.prediction)
    ]
    if not known:
        return None
    several = len({method.temperature for method in known}) > 1
    columns = [Column("", "left")]
    columns += [Column(m.method + (f", T={m.temperature:g}" if several else "")) for m in known]
    table = Table(columns, title, _notes(known))
    for stage in STAGES:
        uses = [_use(method).stages.get(stage) for method in known]
        if any(uses):
            table.add(f"{stage}: MBU; MFU, of the measured peaks", *(_pair(use) for use in uses))
        if any(use is not None and use.mbu_printed is not None for use in uses):
            table.add("  of the printed peaks", *(_printed(use) for use in uses))
        if any(uses):
            table.add("  time over the least possible", *(NOTHING if u is None else f"{u.of_least:.3g}" for u in uses))
    if any(_use(method).stages for method in known):
        table.add("verify: MFU of committed tokens alone", *(percent(_use(method).useful_mfu) for method in known))
    table.add("wasted nodes", *(percent(_use(method).wasted) for method in known))
    predictions = [_use(method).prediction for method in known]
    if any(predictions):
        for name, cells in _prediction_rows(predictions):
            table.add(name, *cells)
    return table


def above_roof(summary: Summary) -> list[str]:
    """Sentences on times that are shorter than the device allows."""
    return [
        f"{method.method}'s {stage} would be faster than physics: it took {use.of_least:.0%} of the least time that "
        f"the measured peaks allow, so that the time, the peaks, or the count of the work is wrong"
        for method in summary.methods
        if method.utilization is not None
        for stage, use in method.utilization.stages.items()
        if use.impossible
    ]


def _use(method: MethodSummary) -> Utilization:
    assert method.utilization is not None, "others were left out"
    return method.utilization


def _pair(use: StageUse | None) -> str:
    if use is None:
        return NOTHING
    cached = " (caches)" if use.note and not use.impossible else ""
    return f"{percent(use.mbu)}; {percent(use.mfu)}{cached}"


def _printed(use: StageUse | None) -> str:
    return NOTHING if use is None else f"{percent(use.mbu_printed)}; {percent(use.mfu_printed)}"


def _prediction_rows(found: "list[Prediction | None]") -> list[tuple[str, list[str]]]:
    def cells(value: Callable[[Prediction], str]) -> list[str]:
        return [NOTHING if each is None else value(each) for each in found]

    rows = [
        ("predicted rounds; outside of the costs", cells(lambda p: f"{p.rounds}; {p.outside}")),
        ("  predicted time of all of them, off by", cells(lambda p: _signed(p.total_error))),
        (
            "  error of a round: median; 95 %",
            cells(lambda p: f"{percent(p.median_error)}; {percent(p.p95_error)}"),
        ),
    ]
    for name, said in (("draft", "draft"), ("verify", "verify"), ("judge", "accept and commit")):
        rows.append((f"  measured less predicted, {said}, ms per round", cells(partial(_residual, name=name))))
    if any(each is not None and each.prefill_predicted is not None for each in found):
        rows.append(("  prefill, off by", cells(lambda p: _signed(p.prefill_error))))
    return rows


def _signed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:+.1%}"


def _residual(found: Prediction, name: str) -> str:
    return f"{1000 * found.residual[name] / found.rounds:+.3f}" if found.rounds else NOTHING


def _notes(methods: list[MethodSummary]) -> list[str]:
    if not any(_use(method).stages for method in methods):
        return ["what the device does at best was not measured (peaks=none)"]
    notes = ["MBU: bytes of weights, keys and values that had to move, over what the memory could have moved meanwhile"]
    notes.append("MFU: operations of all verified nodes, over what the device could have computed meanwhile")
    uses = [use for method in methods for use in _use(method).stages.values()]
    if any(use.note and not use.impossible for use in uses):
        notes.append("(caches): so little data that the caches may hold it, for which the memory is no bound")
    return notes
