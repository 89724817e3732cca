"""Tables of one run, and what went wrong in it."""

from collections.abc import Sequence

from rich.console import Console

from experiments.reporting import terminal
from experiments.reporting.cells import (
    NOTHING,
    equality,
    interval,
    lossiness,
    number,
    percent,
    times,
    with_interval,
)
from experiments.reporting.table import Cell, Column, Emphasis, Table
from experiments.reporting.verdicts import place
from experiments.results.records import PLAIN
from experiments.results.summary import MethodSummary, Summary


def run_table(summary: Summary, title: str) -> Table:
    """One run: a row per figure, a column per method."""
    table = Table([Column("", "left"), *(Column(method.label) for method in summary.methods)], title, _notes(summary))
    level = f"[{summary.confidence:.0%}]"
    rows = [
        ("mean acceptance length", [number(m.mean_acceptance_length) for m in summary.methods]),
        (
            f"  interval {level}",
            [NOTHING if m.method == PLAIN else interval(m.mean_acceptance_length_interval) for m in summary.methods],
        ),
        ("  expected, given the drafts", [number(m.expected_mean_acceptance_length) for m in summary.methods]),
        *_distance(summary.methods),
        ("speedup", [times(m.speedup) for m in summary.methods]),
        (f"  interval {level}", [interval(m.speedup_interval) for m in summary.methods]),
        ("tokens/s", [number(m.tokens_per_second, 1) for m in summary.methods]),
        ("draft acceptance rate", [percent(m.draft_acceptance_rate) for m in summary.methods]),
        ("drafted depth; nodes per round", [_pair(m) for m in summary.methods]),
        *_positions(summary.methods),
        *_stages(summary.methods),
        ("distinct 4-grams", [percent(m.distinct_4_gram_rate) for m in summary.methods]),
        ("equal to plain decoding", [equality(m) for m in summary.methods]),
        ("prompts finished; failed", [f"{m.finished} of {summary.planned}; {m.failed}" for m in summary.methods]),
        ("tokens; rounds", [f"{m.tokens}; {m.rounds}" for m in summary.methods]),
    ]
    for name, cells in rows:
        table.add(name, *cells)
    return table


COMPARISON_COLUMNS = (
    Column("T"),
    Column("method", "left"),
    Column("mean acceptance\nlength"),
    Column("speedup"),
    Column("tokens/s"),
    Column("draft\naccepted"),
    Column("distinct\n4-grams"),
    Column("equal\nto plain"),
)


BOLD = "bold: the largest figure of the exact methods at a temperature, where chance does not explain its lead"


def comparison_table(summary: Summary, title: str) -> Table:
    """Several methods, perhaps at several temperatures: a row each."""
    best = any("speedup" in method.best_in for method in summary.methods)
    table = Table(COMPARISON_COLUMNS, title, [*_notes(summary), *([BOLD] if best else [])])
    for index, method in enumerate(summary.methods):
        last = index + 1 == len(summary.methods) or summary.methods[index + 1].temperature != method.temperature
        table.add(
            f"{method.temperature:g}",
            Cell(
                method.label,
                (f"{method.failed} failed",) if method.failed else (),
                joint="\n",
                emphasis=lossiness(method.exactness),
            ),
            with_interval(
                number(method.mean_acceptance_length),
                method.mean_acceptance_length_interval if method.method != PLAIN else None,
            ),
            with_interval(
                times(method.speedup),
                method.speedup_interval,
                emphasis=Emphasis.BEST if "speedup" in method.best_in else Emphasis.NONE,
            ),
            number(method.tokens_per_second, 1),
            percent(method.draft_acceptance_rate),
            percent(method.distinct_4_gram_rate),
            equality(method),
            end_section=last,
        )
    return table


def print_divergences(console: Console, summary: Summary, limit: int = 5) -> None:
    """Say where greedy outputs first differ from plain decoding's, with what tells a tie from a bug."""
    for method in summary.methods:
        for found in method.divergences[:limit]:
            terminal.say(console, f"{method.method} leaves plain decoding {place(found)}")
        if len(method.divergences) > limit:
            console.print(f"… and on {len(method.divergences) - limit} more prompts, listed in summary.json")


def print_failures(console: Console, summary: Summary, limit: int = 5) -> None:
    """Say what went wrong, and how often."""
    for method in summary.methods:
        for error, count in list(method.errors.items())[:limit]:
            terminal.say(console, f"{method.method} failed on {count} of {summary.planned} prompts: {error}")
        if len(method.errors) > limit:
            console.print(f"… and for {len(method.errors) - limit} more reasons, listed in summary.json")


def print_noise(console: Console, summary: Summary) -> None:
    """Warn where the timings are worth nothing."""
    if summary.noise is not None and summary.noise.warning is not None:
        console.print(summary.noise.warning, style="yellow", highlight=False, markup=False)


def _notes(summary: Summary) -> list[str]:
    verifiers = {method.exactness for method in summary.methods if method.exactness is not None}
    parts = [f"acceptance rule: {', '.join(sorted(verifiers))}"] if verifiers else []
    if not summary.complete:
        done = min((m.finished + m.failed for m in summary.methods), default=0)
        parts.insert(0, f"INCOMPLETE: {done} of {summary.planned} prompts")
    return [*parts, *(summary.noise.notes if summary.noise is not None else [])]


def _positions(methods: Sequence[MethodSummary]) -> list[tuple[str, list[str]]]:
    rows = []
    for position in range(max((len(m.acceptance_by_position.rounds) for m in methods), default=0)):
        cells = []
        for method in methods:
            by = method.acceptance_by_position
            known = position < len(by.rounds)
            both = (by.unconditional[position], by.conditional[position]) if known else (None, None)
            cells.append(f"{percent(both[0])}; {percent(both[1])}" if known else NOTHING)
        rows.append((f"accepted at {position + 1}: of all; if all before", cells))
    return rows


def _distance(methods: Sequence[MethodSummary]) -> list[tuple[str, list[str]]]:
    """How far a lossy rule is from the target, step by step; no rows where all rules are exact."""
    if all(method.distance_tv is None for method in methods):
        return []
    tv = [NOTHING if m.distance_tv is None else f"{m.distance_tv:.4f}" for m in methods]
    kl = [NOTHING if m.distance_kl is None else f"{m.distance_kl:.4f}" for m in methods]
    return [("first token's distance from p: total variation", tv), ("  Kullback-Leibler, nats", kl)]


def _stages(methods: Sequence[MethodSummary]) -> list[tuple[str, list[str]]]:
    stages = dict.fromkeys(stage for method in methods for stage in method.stage_seconds)
    return [(f"{stage}, ms per token", [_per_token(method, stage) for method in methods]) for stage in stages]


def _per_token(method: MethodSummary, stage: str) -> str:
    if stage not in method.stage_seconds or not method.tokens_per_second:
        return NOTHING
    return f"{1000 * method.stage_seconds[stage] / (method.tokens_per_second * method.seconds):.3f}"


def _pair(method: MethodSummary) -> str:
    if method.method == PLAIN:
        return NOTHING
    return f"{number(method.proposed_depth_per_round)}; {number(method.proposed_nodes_per_round)}"
