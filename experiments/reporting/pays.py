"""Whether speculation pays, as tables, sentences and a picture: break-even acceptance, lengths, published heads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.inspecting.mistakes import USUAL
from experiments.reporting import style
from experiments.reporting.columns import percent
from experiments.reporting.style import Panel
from experiments.reporting.table import Col, Table, words
from experiments.results.rows import Row
from specdec.physics.rounds import TimedRounds, round_seconds
from specdec.physics.speculation import best_length, rate_for

AT_ONCE = ("block", "Medusa")
"""How names of heads begin that draft all their tokens in one forward."""
_SHOWN = (1, 2, 3, 4, 5, 7, 11, 15, 31, 63)
"""Lengths of drafts that the tables show."""


def break_even(rounds: TimedRounds, batch: int, drafted: int, share: float) -> float | None:
    """The acceptance of every token from which chains of so many pay; None where none does."""
    seconds = round_seconds(replace(rounds, share=share), batch=batch, drafted=drafted, context=0)
    return rate_for(seconds / rounds.verify(batch=batch, drafted=0, context=0), drafted)


def heads(rounds: TimedRounds, batch: int, share: float) -> list[Row]:
    """Published heads here, at the least and the most of what their length is elsewhere.

    Returns:
        By head: ``name``, ``source``, its published ``lengths`` of chains of ``depth``; and the ``rates`` of
        acceptance, the best ``drafted`` tokens here and the ``speedups``, each at both ends.
    """
    rows = []
    for name, usual in USUAL.items():
        cost = replace(rounds, share=share, at_once=name.startswith(AT_ONCE))
        rates = [rate_for(length, usual.depth) for length in usual.lengths]
        longest = min(usual.depth, rounds.nodes[-1] - 1)
        best = [best_length(cost, rate or 0.0, batch=batch, context=0, longest=longest) for rate in rates]
        row = {"name": name, "source": usual.source, "lengths": usual.lengths, "depth": usual.depth, "rates": rates}
        drafted, speedups = zip(*((found.drafted, found.speedup) for found in best), strict=True)
        rows.append(row | {"drafted": drafted, "speedups": speedups})
    return rows


def lengths_table(rounds: TimedRounds, batch: int, costs: Sequence[float], about: str) -> Table:
    """A row per length of drafts: the time of verification, and the acceptance from which it pays."""
    plain = rounds.verify(batch=batch, drafted=0, context=0)
    shares = [
        Col(
            f"break-even,\ndrafter {_share(share)}",
            lambda row, share=share: percent(break_even(rounds, batch, row[0], share)),
        )
        for share in costs
    ]
    return Table.of(
        [(k, rounds.verify(batch=batch, drafted=k, context=0)) for k in _SHOWN if k < rounds.nodes[-1]],
        [
            Col("drafted", lambda row: str(row[0])),
            Col("verify\nms", lambda row: f"{1e3 * row[1]:.2f}"),
            Col("plain\nsteps", lambda row: f"{row[1] / plain:.2f}"),
            *shares,
        ],
        title=f"Acceptance per token from which chains pay, {_rows(batch)}; a plain step {1e3 * plain:.2f} ms: {about}",
        notes=["a drafter's cost: its time per token over that of a plain step; -: not even perfect drafts pay"],
    )


def heads_table(rounds: TimedRounds, costs: Sequence[float], about: str) -> Table:
    """A row per published head and batch: its speedup here at the best length, by the drafter's cost."""
    rows = [(batch, by_cost) for batch in rounds.seconds for by_cost in _by_head(rounds, batch, costs)]

    def both(head: Row) -> str:
        ends = [f"{speed:.2f}x ({drafted})" for speed, drafted in zip(head["speedups"], head["drafted"], strict=True)]
        return " to ".join(dict.fromkeys(ends))

    return Table.of(
        rows,
        [
            Col("rows", lambda row: str(row[0])),
            words("published head", lambda row: row[1][0]["name"]),
            Col(
                "tokens per round\n(drafted)",
                lambda row: "{}-{} ({})".format(*row[1][0]["lengths"], row[1][0]["depth"]),
            ),
            *(
                Col(f"speedup (drafted),\ndrafter {_share(share)}", lambda row, at=at: both(row[1][at]))
                for at, share in enumerate(costs)
            ),
        ],
        title=f"What published heads would bring here, at the best length: {about}",
        notes=[
            "lengths of up to the published depth, as if every token were accepted alike",
            "blocks and Medusa draft all tokens in one forward, others one each",
            *(f"{name}: {usual.source}" for name, usual in USUAL.items()),
        ],
        section=lambda row: row[0],
    )


def _by_head(rounds: TimedRounds, batch: int, costs: Sequence[float]) -> list[tuple[Row, ...]]:
    return list(zip(*(heads(rounds, batch, share) for share in costs), strict=True))


def verdict(rounds: TimedRounds, costs: Sequence[float], *, passes: int) -> list[str]:
    """Sentences that a reader of the tables needs."""
    said = []
    for batch in rounds.seconds:
        for share in costs:
            lengths = [k for k in _SHOWN if k < rounds.nodes[-1]]
            needed = [(rate, k) for k in lengths if (rate := break_even(rounds, batch, k, share)) is not None]
            words = "nothing pays, whatever is drafted"
            if needed:
                words = "pays from an acceptance of {:.0%} on, with {} drafted".format(*min(needed))
            said.append(f"{_rows(batch)}, drafter {_share(share)}: {words}.")
    note = "over random tokens in trees; acceptance and commit are not in these times"
    return [*said, f"Every forward was timed {passes} times, {note}."]


def figures_of(rounds: TimedRounds, costs: Sequence[float]) -> dict[str, Any]:
    """All figures, for JSON."""

    def of_cost(batch: int, share: float) -> dict[str, Any]:
        rates = {k: break_even(rounds, batch, k, share) for k in range(1, rounds.nodes[-1])}
        return {"share": share, "break_even": rates, "heads": heads(rounds, batch, share)}

    rows = [
        {"batch": batch, "seconds": seconds, "costs": [of_cost(batch, share) for share in costs]}
        for batch, seconds in rounds.seconds.items()
    ]
    return {"nodes": rounds.nodes, "rows": rows}


def pays_plot(rounds: TimedRounds, costs: Sequence[float], path: Path, about: str) -> Path:
    """Draw the speedup at the best length by acceptance, for the smallest and the largest batch."""
    shown = sorted({min(rounds.seconds), max(rounds.seconds)})
    rates = [place / 20 for place in range(6, 20)]

    def speedup(share: float, batch: int, rate: float) -> float:
        cost = replace(rounds, share=share)
        return best_length(cost, rate, batch=batch, context=0, longest=rounds.nodes[-1] - 1).speedup

    series = {
        f"a drafted token costs {_share(share, ' of a plain step')}": [
            {"rate": rate} | {_rows(batch): speedup(share, batch, rate) for batch in shown} for rate in rates
        ]
        for share in costs
    }
    labels = ("acceptance per token", "speedup at the best length")
    panels = [Panel(x="rate", y=_rows(batch), title=_rows(batch), labels=labels, at=1.0) for batch in shown]
    return style.lines(path, panels, series, about="Does speculation pay here?", subtitle=about)


def _share(share: float, of: str = "") -> str:
    return f"{share:.0%}{of}" if share else "nothing" if of else "free"


def _rows(batch: int) -> str:
    return f"{batch} row{'s' * (batch > 1)}"
