"""What methods made of the device: utilization and memory as tables, and warnings of what cannot be true."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from experiments.planning.memory import RunMemory
from experiments.reporting.cells import NOTHING, names_of, percent, signed_percent
from experiments.reporting.table import Column, Table
from experiments.results.frame import Figures
from experiments.results.summary import Summary
from experiments.results.utilization import IMPOSSIBLE, STAGES
from specdec.physics.capacity import state_bytes_per_row
from specdec.slot_memory import written_bytes

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


def memory_table(planned: RunMemory, held: Figures | None = None, peak: Figures | None = None) -> Table:
    """A row for the memory that was planned before anything was loaded, and one for what is held."""
    rows = f"{planned.rows} rows" if planned.rows > 1 else "one row"
    engines = f", {len(planned.methods)} engines" if len(planned.methods) > 1 else ""
    headings = ("weights", "drafter", "KV\ncache", "drafter's\nKV", "draft\nnodes", "activations", "copies", "total")
    table = Table(
        [Column("MB", "left"), *map(Column, headings)],
        f"Memory in MB: {rows} of {planned.length:,} positions{engines}; {planned.place} has "
        f"{written_bytes(planned.free)} free",
        _memory_notes(planned, held, peak),
    )
    memory, copies = planned.planned, planned.copies
    parts = (memory.weights, memory.drafter, memory.kv, memory.drafter_kv, memory.scratch, memory.activations, copies)
    table.add("planned", *map(_mb, parts), _mb(memory.total + copies))
    if held is not None:
        # On a CPU, pages of weights that nobody has read yet are not resident.
        rest = NOTHING if peak is None else _mb(max(0, peak.used - held.total))
        total = held.total if peak is None else max(held.total, peak.used)
        own = (held.weights, held.drafter, held.kv, held.drafter_kv, held.scratch)
        table.add("held", *map(_mb, own), rest, _mb(held.copies), _mb(total))
    return table


def memory_facts(planned: RunMemory | str, held: Figures | None = None, peak: Figures | None = None) -> dict[str, Any]:
    """The figures in bytes, for a run's manifest."""
    facts: dict[str, Any] = {"planned": None, "why_not_planned": planned if isinstance(planned, str) else None}
    if isinstance(planned, RunMemory):
        own = {name: getattr(planned, name) for name in ("copies", "free", "place", "rows", "length")}
        memory = {**asdict(planned.planned), "total": planned.planned.total}
        facts["planned"] = {**memory, **own, "not_counted": planned.unknown}
    return facts | {name: found for name, found in {"held": held, "peak": peak}.items() if found is not None}


def _memory_notes(planned: RunMemory, held: Figures | None, peak: Figures | None) -> list[str]:
    notes = []
    if planned.copies or (held is not None and held.copies):
        notes.append("copies of weights in the layout that the processor multiplies faster are made if there is room")
    served = max(planned.methods.values(), key=lambda each: each.drafted)
    if state := state_bytes_per_row(served.shape, served.precision):
        slot = served.slots.per_row + served.drafted * served.slots.per_node
        nodes = f"{served.drafted} nodes" + (" in the layer that runs" if served.again else "")
        notes.append(
            f"states of recurrent layers count as KV cache, or as draft nodes: {_mb(state)} MB for a row, for its root "
            f"and for each of {nodes}, {_mb(slot)} MB per slot"
            + (f"; {served.states} more are kept for shared beginnings" if served.states else "")
        )
    if planned.unknown:
        notes.append(f"not counted is the drafter of {', '.join(planned.unknown)}")
    if not planned.is_sure:
        notes.append("nobody has compared the sizes of this type of model, so this is no more than a guess")
    if held is not None and peak is not None:
        notes.append("held activations are what is left of the peak: prompts, kernels, and all else that was loaded")
        if peak.fragmentation is not None:
            reserved, free = _mb(peak.reserved or 0), _mb(peak.fragmentation)
            notes.append(f"the allocator had {reserved} MB at most, of which {free} MB in no tensor")
        else:
            notes.append(f"without the {_mb(peak.before)} MB that the process had before")
    return notes


def _mb(size: float) -> str:
    size /= 1e6
    return "0" if not size else f"{size:,.0f}" if size >= 100 else f"{size:.3g}" if size >= 0.01 else "<0.01"
