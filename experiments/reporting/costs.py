"""Costs of steps on this machine: fitted constants, how well they predict, and from which acceptance drafts pay."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.reporting.columns import percent
from experiments.reporting.table import Col, Table, words
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.costs import TokenRange
from specdec.physics.rounds import TimedRounds, round_seconds
from specdec.physics.speculation import rate_for

GOAL_MEDIAN, GOAL_P95 = 0.08, 0.20
"""Errors at held-out sizes up to which predictions are worth planning with."""
_LENGTHS = (1, 2, 3, 4, 5, 7, 11, 15, 31, 63)
"""Lengths of drafts that are shown."""


def constants_table(fitted: CalibratedRounds) -> Table:
    """The constants of every part, in microseconds; those that are 0 are left out."""
    parts = {"target's forward": fitted.target, "prefill, no logits": fitted.prefill}
    parts |= {"drafting": fitted.drafting, "acceptance and commit": fitted.judging}
    rows = [(part, *named) for part, cost in parts.items() if cost is not None for named in _constants(cost)]
    rows.append(("host", "per round, what no stage has", fitted.host))
    known = [row for row in rows if row[2] or row[1].startswith("any")]
    where, box, peaks = fitted.conditions, fitted.box, fitted.peaks
    sizes = {"rows": box.batch, "positions": box.context, "drafted nodes": box.drafted}
    holds = ", ".join(f"{least} to {most} {name}" for name, (least, most) in sizes.items())
    drafter = "" if where.drafter is None else f" {where.drafter};"
    notes = [f"holds for {holds};{drafter} {where.attention} attention, {where.threads} threads"]
    if peaks:
        bandwidth = max(peaks["copy"], peaks["read"])
        notes.append(f"measured peaks: {bandwidth / 1e9:.3g} GB/s, {peaks['flops'] / 1e12:.3g} TFLOP/s")
    columns = [words("", lambda row: row[0]), words("constant", lambda row: row[1])]
    columns.append(Col("µs", lambda row: f"{1e6 * row[2]:.3g}"))
    title = f"Step costs of {where.model} in {where.dtype} on {where.device}"
    return Table.of(known, columns, title=title, notes=notes, section=lambda row: row[0])


def _constants(cost: Any) -> list[tuple[str, float]]:
    """The constants of a part by their names, those of ranges with the numbers of tokens where there are several."""
    named = {"fixed": "any such round", "per_position": "\u03b1, per position"}
    named |= {"per_pair": "\u03b2, per query and position"}
    per = "level" if hasattr(cost, "levels") else "forward"
    ranges: Sequence[TokenRange] = cost.levels if per == "level" else cost.ranges
    rows = [(named[name], value) for name, value in vars(cost).items() if name in named]
    for tokens in ranges:
        at = f", {'more' if tokens.upto is None else f'up to {tokens.upto}'} tokens" if len(ranges) > 1 else ""
        rows += [(f"\u03b4, per {per}{at}", tokens.fixed), (f"\u03b3, per token{at}", tokens.per_token)]
    return rows


def errors_table(fitted: CalibratedRounds) -> Table:
    """The distance of predicted times from measured ones, at the fitted sizes and at others."""
    kinds = {"fit": "fitted", "held_out": "held out"}
    rows = [
        {"part": part, "sizes": kinds[kind], **vars(errors)}
        for part, by_kind in fitted.errors.items()
        for kind, errors in by_kind.items()
    ]
    columns = [words("", "part"), words("sizes", "sizes"), Col("points", "points", "d")]
    columns += [Col("median error", "median", ".1%"), Col("95 %", "p95", ".1%"), Col("worst", "worst", ".1%")]
    return Table.of(rows, columns, title="Predicted against measured times")


def doubts(fitted: CalibratedRounds) -> list[str]:
    """Sentences that a reader of fitted costs needs."""
    said, held = [fitted.note] if fitted.note else [], fitted.errors.get("target", {}).get("held_out")
    if held is not None and (held.median > GOAL_MEDIAN or held.p95 > GOAL_P95):
        far = f"the median error is {held.median:.0%} and the 95th percentile {held.p95:.0%}"
        goal = f"(good: {GOAL_MEDIAN:.0%} and {GOAL_P95:.0%}): calibrate on an idle machine, or give more seconds."
        said.append(f"At sizes that were held out, {far} {goal}")
    return said


def break_even(rounds: TimedRounds, batch: int, drafted: int, share: float) -> float | None:
    """The acceptance of every token from which chains of so many pay; None where none does."""
    seconds = round_seconds(replace(rounds, share=share), batch=batch, drafted=drafted, context=0)
    return rate_for(seconds / rounds.verify(batch=batch, drafted=0, context=0), drafted)


def lengths_table(rounds: TimedRounds, batch: int, costs: Sequence[float], about: str) -> Table:
    """A row per length of drafts: the time of verification, and the acceptance from which it pays."""
    plain = rounds.verify(batch=batch, drafted=0, context=0)
    times = {k: rounds.verify(batch=batch, drafted=k, context=0) for k in _lengths(rounds)}
    rows = [{"drafted": k, "seconds": seconds, "steps": seconds / plain} for k, seconds in times.items()]
    columns = [Col("drafted", "drafted", "d"), Col("verify\nms", "seconds", ".2f", 1e3), Col("plain\nsteps", "steps")]
    columns += [
        Col(f"break-even,\n{_drafter(at)}", lambda row, at=at: percent(break_even(rounds, batch, row["drafted"], at)))
        for at in costs
    ]
    title = f"Acceptance per token from which chains pay, {_rows(batch)}; a plain step {1e3 * plain:.2f} ms: {about}"
    note = "a drafter's cost: its time per token over that of a plain step; -: not even perfect drafts pay"
    return Table.of(rows, columns, title=title, notes=[note])


def verdict(rounds: TimedRounds, costs: Sequence[float], *, passes: int) -> list[str]:
    """For every batch and drafter's cost, the smallest acceptance from which drafts pay, in words."""
    said = []
    for batch, share in ((batch, share) for batch in rounds.seconds for share in costs):
        rates = ((break_even(rounds, batch, k, share), k) for k in _lengths(rounds))
        least = min(((rate, k) for rate, k in rates if rate is not None), default=None)
        pays = "nothing pays, whatever is drafted"
        if least is not None:
            pays = "pays from an acceptance of {:.0%} on, with {} drafted".format(*least)
        said.append(f"{_rows(batch)}, {_drafter(share)}: {pays}.")
    note = "over random tokens in trees; acceptance and commit are not in these times"
    return [*said, f"Every forward was timed {passes} times, {note}."]


def timed_figures(rounds: TimedRounds, costs: Sequence[float]) -> dict[str, Any]:
    """All figures of timed forwards, for JSON."""
    rows = []
    for batch, seconds in rounds.seconds.items():
        pays = {s: {k: break_even(rounds, batch, k, s) for k in range(1, rounds.nodes[-1])} for s in costs}
        shares = [{"share": share, "break_even": rates} for share, rates in pays.items()]
        rows.append({"batch": batch, "seconds": seconds, "costs": shares})
    return {"nodes": rounds.nodes, "rows": rows}


def _lengths(rounds: TimedRounds) -> list[int]:
    return [length for length in _LENGTHS if length < rounds.nodes[-1]]


def _drafter(share: float) -> str:
    return f"drafter {share:.0%}" if share else "drafter free"


def _rows(batch: int) -> str:
    return f"{batch} row{'s' * (batch > 1)}"
