"""Calibrated costs as tables: the constants, and how well they predict."""

from collections.abc import Sequence

from experiments.reporting.table import Col, Table, words
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.costs import TokenRange

GOAL_MEDIAN, GOAL_P95 = 0.08, 0.20
"""Errors at held-out sizes up to which predictions are worth planning with."""


def constants_table(found: CalibratedRounds) -> Table:
    """The constants of every part, in microseconds."""
    rows: list[tuple[str, str, float]] = []
    for part, cost in {"target's forward": found.target, "prefill, no logits": found.prefill}.items():
        if cost is not None:
            rows += _ranges(part, cost.ranges, "\u03b4, any forward", "\u03b3, per token")
            rows += [(part, "\u03b1, per position read", cost.per_position)]
            rows += [(part, "\u03b2, per query and position", cost.per_pair)]
    for part, cost in {"drafting": found.drafting, "acceptance and commit": found.judging}.items():
        if cost is not None:
            rows += [(part, "any such round", cost.fixed)]
            rows += _ranges(part, cost.levels, "per level", "per drafted token")
            rows += [(part, "per level and position", cost.per_position)]
    rows.append(("host", "per round, what no stage has", found.host))
    columns = [words("", lambda row: row[0]), words("constant", lambda row: row[1])]
    columns.append(Col("µs", lambda row: f"{1e6 * row[2]:.3g}"))
    where, box, peaks = found.conditions, found.box, found.peaks
    sizes = {"rows": box.batch, "positions": box.context, "drafted nodes": box.drafted}
    holds = ", ".join(f"{ends[0]} to {ends[1]} {name}" for name, ends in sizes.items())
    drafter = "" if where.drafter is None else f" {where.drafter};"
    notes = [f"holds for {holds};{drafter} {where.attention} attention, {where.threads} threads"]
    if peaks:
        bandwidth = max(peaks["copy"], peaks["read"])
        notes.append(f"measured peaks: {bandwidth / 1e9:.3g} GB/s, {peaks['flops'] / 1e12:.3g} TFLOP/s")
    title = f"Step costs of {where.model} in {where.dtype} on {where.device}"
    known = [row for row in rows if row[2] or row[1].startswith("any")]
    return Table.of(known, columns, title=title, notes=notes, section=lambda row: row[0])


def errors_table(found: CalibratedRounds) -> Table:
    """The distance of predicted times from measured ones, at the fitted sizes and at others."""
    rows = [(part, kind, errors) for part, kinds in found.errors.items() for kind, errors in kinds.items()]
    columns = [
        *(words("", lambda row: row[0]), words("sizes", lambda row: "held out" if row[1] == "held_out" else "fitted")),
        Col("points", lambda row: str(row[2].points)),
        *(Col("median error", lambda row: f"{row[2].median:.1%}"), Col("95 %", lambda row: f"{row[2].p95:.1%}")),
        Col("worst", lambda row: f"{row[2].worst:.1%}"),
    ]
    return Table.of(rows, columns, title="Predicted against measured times")


def remarks(found: CalibratedRounds) -> list[str]:
    """Sentences that a reader of the tables needs."""
    held = found.errors.get("target", {}).get("held_out")
    if held is None or (held.median <= GOAL_MEDIAN and held.p95 <= GOAL_P95):
        return [found.note] if found.note else []
    far = f"the median error is {held.median:.0%} and the 95th percentile {held.p95:.0%}"
    goal = f"(good: {GOAL_MEDIAN:.0%} and {GOAL_P95:.0%}): calibrate on an idle machine, or give more seconds."
    return [*([found.note] if found.note else []), f"At sizes that were held out, {far} {goal}"]


def _ranges(part: str, ranges: Sequence[TokenRange], fixed: str, per_token: str) -> list[tuple[str, str, float]]:
    """Two rows per range, with its numbers of tokens where there are several."""
    rows = []
    for tokens in ranges:
        upto = "more" if tokens.upto is None else f"up to {tokens.upto}"
        at = f", {upto} tokens" if len(ranges) > 1 else ""
        rows += [(part, f"{fixed}{at}", tokens.fixed), (part, f"{per_token}{at}", tokens.per_token)]
    return rows
