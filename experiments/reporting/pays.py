"""Whether speculation pays: the acceptance from which chains of every length do, as tables, sentences and figures."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.reporting.columns import percent
from experiments.reporting.table import Col, Table
from specdec.physics.rounds import TimedRounds, round_seconds
from specdec.physics.speculation import rate_for

_SHOWN = (1, 2, 3, 4, 5, 7, 11, 15, 31, 63)
"""Lengths of drafts that the tables show."""


def break_even(rounds: TimedRounds, batch: int, drafted: int, share: float) -> float | None:
    """The acceptance of every token from which chains of so many pay; None where none does."""
    seconds = round_seconds(replace(rounds, share=share), batch=batch, drafted=drafted, context=0)
    return rate_for(seconds / rounds.verify(batch=batch, drafted=0, context=0), drafted)


def lengths_table(rounds: TimedRounds, batch: int, costs: Sequence[float], about: str) -> Table:
    """A row per length of drafts: the time of verification, and the acceptance from which it pays."""
    plain = rounds.verify(batch=batch, drafted=0, context=0)
    times = {k: rounds.verify(batch=batch, drafted=k, context=0) for k in _SHOWN if k < rounds.nodes[-1]}
    rows = [
        {"drafted": k, "seconds": seconds, "steps": seconds / plain}
        | {share: percent(break_even(rounds, batch, k, share)) for share in costs}
        for k, seconds in times.items()
    ]
    columns = [Col("drafted", "drafted", "d"), Col("verify\nms", "seconds", ".2f", 1e3), Col("plain\nsteps", "steps")]
    columns += [Col(f"break-even,\ndrafter {_share(share)}", lambda row, at=share: row[at]) for share in costs]
    title = f"Acceptance per token from which chains pay, {_rows(batch)}; a plain step {1e3 * plain:.2f} ms: {about}"
    note = "a drafter's cost: its time per token over that of a plain step; -: not even perfect drafts pay"
    return Table.of(rows, columns, title=title, notes=[note])


def verdict(rounds: TimedRounds, costs: Sequence[float], *, passes: int) -> list[str]:
    """Sentences that a reader of the tables needs."""
    said = []
    for batch in rounds.seconds:
        for share in costs:
            rates = [(break_even(rounds, batch, k, share), k) for k in _SHOWN if k < rounds.nodes[-1]]
            needed = [(rate, k) for rate, k in rates if rate is not None]
            words = "nothing pays, whatever is drafted"
            if needed:
                words = "pays from an acceptance of {:.0%} on, with {} drafted".format(*min(needed))
            said.append(f"{_rows(batch)}, drafter {_share(share)}: {words}.")
    note = "over random tokens in trees; acceptance and commit are not in these times"
    return [*said, f"Every forward was timed {passes} times, {note}."]


def figures_of(rounds: TimedRounds, costs: Sequence[float]) -> dict[str, Any]:
    """All figures, for JSON."""
    lengths = range(1, rounds.nodes[-1])
    rows = [
        {"batch": batch, "seconds": seconds}
        | {"costs": [{"share": s, "break_even": {k: break_even(rounds, batch, k, s) for k in lengths}} for s in costs]}
        for batch, seconds in rounds.seconds.items()
    ]
    return {"nodes": rounds.nodes, "rows": rows}


def _share(share: float) -> str:
    return f"{share:.0%}" if share else "free"


def _rows(batch: int) -> str:
    return f"{batch} row{'s' * (batch > 1)}"
