"""Calibrated costs as tables and a picture: the constants with what they mean, and how well they predict."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from experiments.reporting import style
from experiments.reporting.table import NOTHING, Cell, Column, Emphasis, Table, left
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.costs import LeastWork, Meaning, PartCost, StepCost, StepSize, TokenRange, meanings
from specdec.physics.work import Roof

DELTA, GAMMA, ALPHA, BETA = "\u03b4", "\u03b3", "\u03b1", "\u03b2"
"""The constants' letters."""
GOAL_MEDIAN, GOAL_P95 = 0.08, 0.20
"""Errors at held-out sizes up to which predictions are worth planning with."""

_PARTS = {
    "target": "target's forward",
    "prefill": "prefill",
    "drafting": "drafting",
    "judging": "acceptance and commit",
    "target in rounds": "target's forward in rounds",
}


def constants_table(found: CalibratedRounds) -> Table:
    """The constants of every part, and what a step would take if it reached the device's peaks."""
    columns = [left(""), left("constant"), Column("time"), Column("of the\npeak"), left("meaning")]
    table = Table(columns, _title(found), _notes(found))
    known = {each.symbol: each for each in meanings_of(found)}
    _step_rows(table, "target's forward", found.target, known)
    if found.prefill is not None:
        _step_rows(table, "prefill, no logits", found.prefill, {})
    if found.drafting is not None:
        _part_rows(table, "drafting", found.drafting, "per call of the drafter")
    _part_rows(table, "acceptance and commit", found.judging, "per level of the draft")
    table.add("host", "fixed", _amount(found.host), "", "what no stage has, per round")
    if found.scattered:
        meaning = "of another length than the others"
        table.add("scattered rows", "per row", _amount(found.scattered), "", meaning)
    if found.follows:
        table.add("prompts", "drafter", f"{found.follows:.1%}", "", "of the target's prefill, for the drafter's own")
    return table


def meanings_of(found: CalibratedRounds) -> list[Meaning]:
    """The constants of the target's forward beside the least that the device allows; empty where that is not known."""
    if not found.work or not found.peaks:
        return []
    peaks = found.peaks
    roof = Roof(max(peaks["copy"], peaks["read"]), peaks["flops"])
    sizes = [
        StepSize.of(rows=batch, queries=drafted + 1, context=context)
        for batch, context, drafted, *_, prompt in found.measured
        if not prompt
    ]
    return meanings(found.target, sizes, LeastWork(**found.work), roof, cache_bytes=peaks["cache_bytes"])


def errors_table(found: CalibratedRounds) -> Table:
    """The distance of predicted times from measured ones, at the fitted sizes and at others."""
    columns = [left(""), left("sizes"), *map(Column, ("points", "median error", "95 %", "worst"))]
    table = Table(columns, "Predicted against measured times")
    for part, kinds in found.errors.items():
        for kind, each in kinds.items():
            held = kind == "held_out" and part == "target"
            missed = held and (each.median > GOAL_MEDIAN or each.p95 > GOAL_P95)
            emphasis = Emphasis.BEST if held and not missed else Emphasis.NONE
            errors = [Cell(f"{value:.1%}", emphasis=emphasis) for value in (each.median, each.p95, each.worst)]
            sizes = "held out" if kind == "held_out" else "fitted"
            table.add(_PARTS.get(part, part), sizes, str(each.points), *errors)
    return table


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


def _step_rows(table: Table, name: str, cost: StepCost, known: dict[str, Meaning]) -> None:
    for number, (tokens, each) in enumerate(_with_tokens(cost.ranges)):
        first, last = number == 0, number == len(cost.ranges) - 1
        delta, gamma = known.get("delta") if first else None, known.get("gamma") if last else None
        table.add(name if first else "", f"{DELTA}{tokens}", _amount(each.fixed), *_meaning(delta, "any forward"))
        if each.per_token:
            table.add("", f"{GAMMA}{tokens}", _amount(each.per_token), *_meaning(gamma, "per token"))
    table.add("", ALPHA, _amount(cost.per_position), *_meaning(known.get("alpha"), "per position read"))
    table.add("", BETA, _amount(cost.per_pair), "", "per query and position", end_section=True)


def _part_rows(table: Table, name: str, cost: PartCost, level: str) -> None:
    rows = [("fixed", cost.fixed, "any such round")]
    for tokens, each in _with_tokens(cost.levels):
        rows += [(f"per level{tokens}", each.fixed, level), (f"per token{tokens}", each.per_token, "per drafted token")]
    rows.append(("per position", cost.per_position, "per level and position"))
    kept = [row for row in rows if row[1]] or rows[:1]
    for number, (constant, seconds, meaning) in enumerate(kept, 1):
        last = number == len(kept)
        table.add(name if number == 1 else "", constant, _amount(seconds), "", meaning, end_section=last)


def _with_tokens(ranges: Sequence[TokenRange]) -> list[tuple[str, TokenRange]]:
    """Every range with its numbers of tokens in words, which are empty for one range."""
    begins = [1, *((each.upto or 0) + 1 for each in ranges)]
    words = []
    for begin, each in zip(begins, ranges, strict=False):
        end = " or more" if each.upto is None else "" if each.upto == begin else f" to {each.upto}"
        words.append(f", {begin}{end}")
    return [(f"{word} tokens" if len(ranges) > 1 else "", each) for word, each in zip(words, ranges, strict=True)]


def _meaning(known: Meaning | None, otherwise: str) -> tuple[str, str]:
    if known is None:
        return "", otherwise
    share = NOTHING if known.utilization is None else f"{known.utilization:.0%}"
    words = {"caches": " (in the caches)", "hidden": " (hidden behind memory)"}
    return share, f"{known.what}{words.get(known.excuse, '')}"


def _amount(seconds: float) -> str:
    """A time in a unit that suits it."""
    for unit, factor in (("ms", 1e3), ("µs", 1e6), ("ns", 1e9)):
        if seconds * factor >= 0.1:
            return f"{seconds * factor:.3g} {unit}"
    return "0" if not seconds else f"{seconds * 1e12:.3g} ps"


def _title(found: CalibratedRounds) -> str:
    where = found.conditions
    return f"Step costs of {where.model} in {where.dtype} on {where.device}"


def _notes(found: CalibratedRounds) -> list[str]:
    where, box, peaks = found.conditions, found.box, found.peaks
    drafter = "" if where.drafter is None else f" {where.drafter};"
    notes = [
        f"holds for {box.batch[0]} to {box.batch[1]} rows, {box.context[0]} to {box.context[1]} positions, "
        f"{box.drafted[0]} to {box.drafted[1]} drafted nodes;{drafter} "
        f"{where.attention} attention, {where.threads} threads"
    ]
    if peaks:
        notes.append(
            f"measured peaks: {max(peaks['copy'], peaks['read']) / 1e9:.3g} GB/s, {peaks['flops'] / 1e12:.3g} TFLOP/s"
        )
        if "printed_bandwidth" in peaks:
            bandwidth, flops = peaks["printed_bandwidth"] / 1e9, peaks["printed_flops"] / 1e12
            notes[-1] += f"; printed: {bandwidth:.4g} GB/s, {flops:.4g} TFLOP/s"
    return notes


@style.styled()
def predicted_plot(found: CalibratedRounds, path: Path) -> Path:
    """Draw every measured forward: its time beside the predicted one, and their ratio; points held out are filled."""
    figure = style.new_figure(style.PAGE, 3.2)
    both, ratio = figure.subplots(1, 2)
    for index, (prompt, held_out) in enumerate(product((False, True), repeat=2)):
        # A row holds batch, context, drafted nodes, measured and predicted time, held out, and tokens of a prompt.
        rows = [row for row in found.measured if (bool(row[6]), bool(row[5])) == (prompt, held_out)]
        fill = {} if held_out else {"markerfacecolor": "none"}
        options: dict[str, Any] = {**style.looks(index // 2), "linestyle": "none", "markersize": 4, **fill}
        measured = [1e3 * row[3] for row in rows]
        label = f"{'prefill' if prompt else 'rounds'}, {'held out' if held_out else 'fitted'}"
        both.plot(measured, [1e3 * row[4] for row in rows], label=label, **options)
        ratio.plot(measured, [row[4] / row[3] for row in rows], **options)
    times = [1e3 * value for row in found.measured for value in row[3:5]]
    ends = (min(times) * 0.8, max(times) * 1.25)
    both.plot(ends, ends, color="black", linewidth=0.8)
    ratio.axhspan(0.92, 1.08, color=style.FAINT, alpha=0.25, linewidth=0)
    ratio.axhline(1, color="black", linewidth=0.8)
    for axis in (both.xaxis, both.yaxis, ratio.xaxis):
        style.plain_log(axis)
    both.set(xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="predicted, ms")
    ratio.set(xlim=ends, xlabel="measured, ms", ylabel="predicted / measured")
    style.legend_of(figure, both)
    where = found.conditions
    held = found.errors.get("target", {}).get("held_out")
    errors = "" if held is None else f"; held out: median error {held.median:.1%}, 95 % within {held.p95:.1%}"
    return style.finish(
        figure, path, "Predicted and measured forwards", f"{where.model} in {where.dtype} on {where.device}{errors}"
    )
