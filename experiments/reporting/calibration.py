"""Calibrated costs as tables and a picture: the constants with what they mean, and how well they predict."""

from collections.abc import Sequence
from pathlib import Path

from experiments.reporting import style
from experiments.reporting.table import Col, Table, words
from experiments.results.rows import Row
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.costs import PartCost, StepCost, TokenRange

DELTA, GAMMA, ALPHA, BETA = "\u03b4", "\u03b3", "\u03b1", "\u03b2"
"""The constants' letters."""
GOAL_MEDIAN, GOAL_P95 = 0.08, 0.20
"""Errors at held-out sizes up to which predictions are worth planning with."""
_PARTS = {
    "target": "target's forward", "prefill": "prefill", "drafting": "drafting", "judging": "acceptance and commit",
    "target in rounds": "target's forward in rounds",
}  # fmt: skip


def constants_table(found: CalibratedRounds) -> Table:
    """The constants of every part, with their meaning."""
    rows = _step("target's forward", found.target)
    if found.prefill is not None:
        rows += _step("prefill, no logits", found.prefill)
    if found.drafting is not None:
        rows += _part("drafting", found.drafting, "per call of the drafter")
    rows += _part("acceptance and commit", found.judging, "per level of the draft")
    rows.append(_row("host", "fixed", found.host, "what no stage has, per round"))
    columns = [words("", "part"), words("constant", "constant"), Col("time", "time"), words("meaning", "meaning")]
    where = found.conditions
    title = f"Step costs of {where.model} in {where.dtype} on {where.device}"
    return Table.of(rows, columns, title=title, notes=_notes(found), section=lambda row: row["part"])


def errors_table(found: CalibratedRounds) -> Table:
    """The distance of predicted times from measured ones, at the fitted sizes and at others."""
    rows = [
        {
            "part": _PARTS.get(part, part),
            "sizes": "held out" if kind == "held_out" else "fitted",
            "points": errors.points,
        }
        | {"median": errors.median, "p95": errors.p95, "worst": errors.worst}
        for part, kinds in found.errors.items()
        for kind, errors in kinds.items()
    ]
    texts = [words("", "part"), words("sizes", "sizes")]
    shares = [Col(*names, ".1%") for names in (("median error", "median"), ("95 %", "p95"), ("worst", "worst"))]
    return Table.of(rows, [*texts, Col("points", "points", "d"), *shares], title="Predicted against measured times")


def remarks(found: CalibratedRounds) -> list[str]:
    """Sentences that a reader of the tables needs."""
    said = [found.note] if found.note else []
    held = found.errors.get("target", {}).get("held_out")
    if held is not None and (held.median > GOAL_MEDIAN or held.p95 > GOAL_P95):
        said.append(
            f"At sizes that were held out, the median error is {held.median:.0%} and the 95th percentile {held.p95:.0%}"
            f" (good: {GOAL_MEDIAN:.0%} and {GOAL_P95:.0%}): calibrate on an idle machine, or give more seconds."
        )
    return said


def _row(part: str, constant: str, seconds: float, meaning: str) -> Row:
    return {"part": part, "constant": constant, "time": _amount(seconds), "meaning": meaning}


def _step(part: str, cost: StepCost) -> list[Row]:
    rows = []
    for tokens, costs in _with_tokens(cost.ranges):
        rows.append(_row(part, f"{DELTA}{tokens}", costs.fixed, "any forward: weights, calls of kernels"))
        if costs.per_token:
            rows.append(_row(part, f"{GAMMA}{tokens}", costs.per_token, "per token: products with the weights"))
    rows.append(_row(part, ALPHA, cost.per_position, "per position read"))
    return [*rows, _row(part, BETA, cost.per_pair, "per query and position")]


def _part(part: str, cost: PartCost, level: str) -> list[Row]:
    rows = [("fixed", cost.fixed, "any such round")]
    for tokens, costs in _with_tokens(cost.levels):
        rows.append((f"per level{tokens}", costs.fixed, level))
        rows.append((f"per token{tokens}", costs.per_token, "per drafted token"))
    rows.append(("per position", cost.per_position, "per level and position"))
    return [_row(part, *row) for row in [row for row in rows if row[1]] or rows[:1]]


def _with_tokens(ranges: Sequence[TokenRange]) -> list[tuple[str, TokenRange]]:
    """Every range with its numbers of tokens in words, which are empty for one range."""
    begins = [1, *((tokens.upto or 0) + 1 for tokens in ranges)]
    words = []
    for begin, tokens in zip(begins, ranges, strict=False):
        end = " or more" if tokens.upto is None else "" if tokens.upto == begin else f" to {tokens.upto}"
        words.append(f", {begin}{end} tokens" if len(ranges) > 1 else "")
    return list(zip(words, ranges, strict=True))


def _amount(seconds: float) -> str:
    """A time in a unit that suits it."""
    for unit, factor in (("ms", 1e3), ("µs", 1e6), ("ns", 1e9)):
        if seconds * factor >= 0.1:
            return f"{seconds * factor:.3g} {unit}"
    return "0" if not seconds else f"{seconds * 1e12:.3g} ps"


def _notes(found: CalibratedRounds) -> list[str]:
    where, box, peaks = found.conditions, found.box, found.peaks
    sizes = {"rows": box.batch, "positions": box.context, "drafted nodes": box.drafted}
    holds = ", ".join(f"{ends[0]} to {ends[1]} {name}" for name, ends in sizes.items())
    drafter = "" if where.drafter is None else f" {where.drafter};"
    notes = [f"holds for {holds};{drafter} {where.attention} attention, {where.threads} threads"]
    if peaks:
        measured = f"{max(peaks['copy'], peaks['read']) / 1e9:.3g} GB/s, {peaks['flops'] / 1e12:.3g} TFLOP/s"
        notes.append(f"measured peaks: {measured}")
    return notes


def predicted_plot(found: CalibratedRounds, path: Path) -> Path:
    """Draw every measured forward: its predicted time over the measured one, by its measured time."""
    series: dict[str, list[Row]] = {}
    for *_, measured, predicted, held_out, prompt in found.measured:
        label = f"{'prefill' if prompt else 'rounds'}, {'held out' if held_out else 'fitted'}"
        series.setdefault(label, []).append({"measured": 1e3 * measured, "ratio": predicted / measured})
    labels = ("measured time (ms)", "predicted / measured")
    panel = style.Panel(x="measured", y="ratio", labels=labels, points=True, at=1.0)
    where = found.conditions
    held = found.errors.get("target", {}).get("held_out")
    errors = "" if held is None else f"; held out: median error {held.median:.1%}, 95 % within {held.p95:.1%}"
    about = f"{where.model} in {where.dtype} on {where.device}{errors}"
    return style.lines(path, [panel], series, about="Predicted and measured forwards", subtitle=about)
