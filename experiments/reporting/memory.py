"""The memory of a run as a table: what was planned before anything was loaded, and beside it what it took."""

from dataclasses import asdict
from typing import Any

from experiments.measuring.held import Held, Peak
from experiments.planning.memory import RunMemory
from experiments.reporting.table import NOTHING, Column, Table
from specdec.physics.capacity import Memory
from specdec.slot_memory import written_bytes


def memory_table(planned: RunMemory, held: Held | None = None, peak: Peak | None = None) -> Table:
    """Returns the table, with a row for what is planned, and another one for what is held.

    Args:
        planned: The plan.
        held: What was allocated; None before anything is loaded.
        peak: The most memory that there was at once.
    """
    columns = [Column("MB", "left"), Column("weights"), Column("drafter"), Column("KV\ncache"), Column("drafter's\nKV")]
    columns += [Column("draft\nnodes"), Column("activations"), Column("copies"), Column("total")]
    memory = planned.planned
    table = Table(columns, _title(planned), _notes(planned, held, peak))
    table.add("planned", *_planned_cells(memory, planned.copies))
    if held is not None:
        table.add("held", *_held_cells(held, peak))
    return table


def memory_facts(planned: RunMemory | str, held: Held | None = None, peak: Peak | None = None) -> dict[str, Any]:
    """Returns the figures in bytes, for a run's manifest."""
    facts: dict[str, Any] = {"planned": None, "why_not_planned": planned if isinstance(planned, str) else None}
    if isinstance(planned, RunMemory):
        memory = planned.planned
        facts["planned"] = {
            **asdict(memory),
            "total": memory.total,
            "copies": planned.copies,
            "free": planned.free,
            "place": planned.place,
            "rows": planned.rows,
            "length": planned.length,
            "not_counted": list(planned.unknown),
        }
    if held is not None:
        facts["held"] = {**asdict(held), "total": held.total}
    if peak is not None:
        facts["peak"] = {**asdict(peak), "fragmentation": peak.fragmentation}
    return facts


def _title(planned: RunMemory) -> str:
    rows = f"{planned.rows} rows" if planned.rows > 1 else "one row"
    engines = len(planned.methods)
    several = f", {engines} engines" if engines > 1 else ""
    return (
        f"Memory in MB: {rows} of {planned.length:,} positions{several}; {planned.place} has "
        f"{written_bytes(planned.free)} free"
    )


def _notes(planned: RunMemory, held: Held | None, peak: Peak | None) -> list[str]:
    notes = []
    if planned.copies or (held is not None and held.copies):
        notes.append("copies of weights in the layout that the processor multiplies faster are made if there is room")
    if planned.unknown:
        notes.append(f"not counted is the drafter of {', '.join(planned.unknown)}")
    if not planned.is_sure:
        notes.append("nobody has compared the sizes of this type of model, so this is no more than a guess")
    if held is not None and peak is not None:
        notes.append("held activations are what is left of the peak: prompts, kernels, and all else that was loaded")
        if peak.fragmentation is not None:
            notes.append(
                f"the allocator had {_mb(peak.reserved or 0)} MB at most, of which {_mb(peak.fragmentation)} MB in no "
                f"tensor"
            )
        else:
            notes.append(f"without the {_mb(peak.before)} MB that the process had before")
    return notes


def _planned_cells(memory: Memory, copies: float) -> list[str]:
    parts = (memory.weights, memory.drafter, memory.kv, memory.drafter_kv, memory.scratch, memory.activations, copies)
    return [*(_mb(part) for part in parts), _mb(memory.total + copies)]


def _held_cells(held: Held, peak: Peak | None) -> list[str]:
    parts = (held.weights, held.drafter, held.kv, held.drafter_kv, held.scratch)
    # On a CPU, pages of weights that nobody has read yet are not resident.
    rest = NOTHING if peak is None else _mb(max(0, peak.used - held.total))
    total = held.total if peak is None else max(held.total, peak.used)
    return [*(_mb(part) for part in parts), rest, _mb(held.copies), _mb(total)]


def _mb(size: float) -> str:
    size /= 1e6
    return "0" if not size else f"{size:,.0f}" if size >= 100 else f"{size:.3g}" if size >= 0.01 else "<0.01"
