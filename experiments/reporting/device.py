"""What methods made of the device: utilization and memory as tables, and warnings of what cannot be true."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.reporting.cells import NOTHING, names_of, percent, signed_percent
from experiments.reporting.table import Column, Table
from experiments.results.frame import Figures
from experiments.results.summary import Summary
from experiments.results.utilization import IMPOSSIBLE, STAGES

TITLE = "Use of the device"
Line = tuple[str, Callable[[Figures], str]]


def utilization_table(summary: Summary, title: str = TITLE) -> Table | None:
    """A row per figure, a column per method; None where no work was counted, or with nothing to compare it with."""
    methods = [m for m in summary.methods if m.utilization is not None]
    known = [(m, u) for m in methods if (u := m.utilization) is not None and (u.stages or u.prediction)]
    if not known:
        return None
    uses = [use for _, use in known]
    lines: list[Line] = []
    for stage in STAGES:
        lines += [
            (f"{stage}: MBU; MFU, of the measured peaks", _of_stage(stage, _measured)),
            (
                "  of the printed peaks",
                _of_stage(stage, lambda u: f"{percent(u.mbu_printed)}; {percent(u.mfu_printed)}"),
            ),
            ("  time over the least possible", _of_stage(stage, lambda use: f"{use.of_least:.3g}")),
        ]
    lines.append(("verify: MFU of committed tokens alone", lambda use: percent(use.useful_mfu)))
    lines.append(("wasted nodes", lambda use: percent(use.wasted)))
    lines += _prediction_lines()
    return Table.upright(uses, names_of([method for method, _ in known]), lines, title=title, notes=_notes(uses))


def above_roof(summary: Summary) -> list[str]:
    """Sentences on times that are shorter than the device allows."""
    return [
        f"{method.method}'s {stage} would be faster than physics: it took {use.of_least:.0%} of the least time that "
        f"the measured peaks allow, so that the time, the peaks, or the count of the work is wrong"
        for method in summary.methods
        if method.utilization is not None
        for stage, use in method.utilization.stages.items()
        if use.note.startswith(IMPOSSIBLE)
    ]


def not_recorded(recordings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences on stages of rounds that failed to be recorded, which makes a GPU several times slower."""
    failed: dict[str, list[str]] = {}  # methods that share an engine fail together
    for method, counts in recordings.items():
        for stage, reasons in counts["refused"].items():
            failed.setdefault(f"{stage} ({'; '.join(reasons)})", []).append(method)
    return [f"{', '.join(methods)}: not recorded, so that it ran slower: {what}" for what, methods in failed.items()]


def _of_stage(stage: str, cell: Callable[[Figures], str]) -> Callable[[Figures], str]:
    return lambda use: NOTHING if stage not in use.stages else cell(use.stages[stage])


def _measured(use: Figures) -> str:
    return f"{percent(use.mbu)}; {percent(use.mfu)}{' (caches)' if _cached(use) else ''}"


def _cached(use: Figures) -> bool:
    return bool(use.note) and not use.note.startswith(IMPOSSIBLE)


def _prediction_lines() -> list[Line]:
    def line(name: str, cell: Callable[[Figures], str]) -> Line:
        return name, lambda use: NOTHING if use.prediction is None else cell(use.prediction)

    def residual(part: str) -> Callable[[Figures], str]:
        return lambda p: f"{1000 * (p.measured[part] - p.predicted[part]) / p.rounds:+.3f}" if p.rounds else NOTHING

    parts = {"draft": "draft", "verify": "verify", "judge": "accept and commit"}
    return [
        line("predicted rounds; outside of the costs", lambda p: f"{p.rounds}; {p.outside}"),
        line("  predicted time of all of them, off by", lambda p: signed_percent(p.total_error)),
        line("  error of a round: median; 95 %", lambda p: f"{percent(p.median_error)}; {percent(p.p95_error)}"),
        *(line(f"  measured less predicted, {said}, ms per round", residual(part)) for part, said in parts.items()),
        line("  prefill, off by", _prefill_error),
    ]


def _prefill_error(found: Figures) -> str:
    known = found.prefill_predicted is not None and found.prefill_measured
    return signed_percent(found.prefill_predicted / found.prefill_measured - 1 if known else None)


def _notes(uses: Sequence[Figures]) -> list[str]:
    if not any(use.stages for use in uses):
        return ["what the device does at best was not measured (peaks=none)"]
    notes = ["MBU: bytes of weights, keys and values that had to move, over what the memory could have moved meanwhile"]
    notes.append("MFU: operations of all verified nodes, over what the device could have computed meanwhile")
    if any(_cached(use) for each in uses for use in each.stages.values()):
        notes.append("(caches): so little data that the caches may hold it, for which the memory is no bound")
    return notes


def memory_table(held: Figures, peak: Figures) -> Table:
    """The bytes that engines hold, and what the peak of the memory has beyond them."""
    headings = ("weights", "drafter", "KV\ncache", "drafter's\nKV", "draft\nnodes", "copies", "rest of\nthe peak")
    if peak.fragmentation is None:
        note = f"the peak is that of the process, without the {_mb(peak.before)} MB that it had before"
    else:
        note = f"the allocator had {_mb(peak.reserved)} MB at most, of which {_mb(peak.fragmentation)} MB in no tensor"
    table = Table([Column(heading) for heading in headings], "Memory held, in MB", [note])
    parts = (held.weights, held.drafter, held.kv, held.drafter_kv, held.scratch, held.copies)
    table.add(*map(_mb, parts), _mb(max(0, peak.used - held.total)))
    return table


def _mb(size: float) -> str:
    size /= 1e6
    return "0" if not size else f"{size:,.0f}" if size >= 100 else f"{size:.3g}" if size >= 0.01 else "<0.01"
