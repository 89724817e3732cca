"""Tables for the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from experiments.measure import PLAIN
from experiments.summary import MethodSummary, Summary
from specdec.stats import Interval

NOTHING = "-"


def run_table(summary: Summary, title: str) -> Table:
    """One run: a row per figure, a column per method."""
    table = Table(title=title, caption=_caption(summary), title_justify="left", caption_justify="left")
    table.add_column("")
    for method in summary.methods:
        table.add_column(label(method), justify="right")
    level = f"[{summary.confidence:.0%}]"
    rows = [
        ("mean acceptance length", [number(m.mean_acceptance_length) for m in summary.methods]),
        (
            f"  interval {level}",
            [NOTHING if m.method == PLAIN else interval(m.mean_acceptance_length_interval) for m in summary.methods],
        ),
        ("  expected, given the drafts", [number(m.expected_mean_acceptance_length) for m in summary.methods]),
        *_divergence(summary.methods),
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
        table.add_row(name, *cells)
    return table


def comparison_table(summary: Summary, title: str) -> Table:
    """Several methods, perhaps at several temperatures: a row each."""
    table = Table(title=title, caption=_caption(summary), title_justify="left", caption_justify="left")
    table.add_column("T", justify="right")
    table.add_column("method")
    for name in (
        "mean acceptance\nlength",
        "speedup",
        "tokens/s",
        "draft\naccepted",
        "distinct\n4-grams",
        "equal\nto plain",
    ):
        table.add_column(name, justify="right")
    for index, method in enumerate(summary.methods):
        last = index + 1 == len(summary.methods) or summary.methods[index + 1].temperature != method.temperature
        table.add_row(
            f"{method.temperature:g}",
            label(method) + (f"\n{method.failed} failed" if method.failed else ""),
            with_interval(
                number(method.mean_acceptance_length),
                method.mean_acceptance_length_interval if method.method != PLAIN else None,
            ),
            with_interval(times(method.speedup), method.speedup_interval),
            number(method.tokens_per_second, 1),
            percent(method.draft_acceptance_rate),
            percent(method.distinct_4_gram_rate),
            equality(method),
            end_section=last,
        )
    return table


def print_divergences(console: Console, summary: Summary, limit: int = 5) -> None:
    """Where greedy outputs leave plain decoding's, with the margin that tells a tie from a bug."""
    for method in summary.methods:
        for found in method.divergences[:limit]:
            margin = "unknown" if found.margin is None else f"{found.margin:.4f} nats"
            turn = f", turn {found.turn + 1}," if found.turn else ""
            console.print(
                f"{method.method} leaves plain decoding on {found.prompt}{turn} at output token {found.index}: "
                f"margin of the two best tokens {margin}",
                highlight=False,
                markup=False,
            )
        if len(method.divergences) > limit:
            console.print(f"… and on {len(method.divergences) - limit} more prompts, listed in summary.json")


def print_failures(console: Console, summary: Summary, limit: int = 5) -> None:
    """What went wrong, and how often."""
    for method in summary.methods:
        for error, count in list(method.errors.items())[:limit]:
            text = f"{method.method} failed on {count} of {summary.planned} prompts: {error}"
            console.print(text, highlight=False, markup=False)
        if len(method.errors) > limit:
            console.print(f"… and for {len(method.errors) - limit} more reasons, listed in summary.json")


def label(method: MethodSummary) -> str:
    """The method's name, with a warning where its output is not the target's."""
    return method.method if method.exactness in (None, "exact") else f"{method.method} ({method.exactness})"


def equality(method: MethodSummary) -> str:
    """How many greedy outputs equal plain decoding's."""
    if method.compared_with_plain is None:
        return NOTHING
    return f"{method.equal_to_plain} of {method.compared_with_plain}"


def interval(values: Interval | None) -> str:
    """Both ends, or a dash where one prompt gives none."""
    return NOTHING if values is None else f"{values[0]:.2f} to {values[1]:.2f}"


def _caption(summary: Summary) -> str:
    verifiers = {method.exactness for method in summary.methods if method.exactness is not None}
    parts = [f"acceptance rule: {', '.join(sorted(verifiers))}"] if verifiers else []
    if not summary.complete:
        done = min((m.finished + m.failed for m in summary.methods), default=0)
        parts.insert(0, f"INCOMPLETE: {done} of {summary.planned} prompts")
    return "; ".join(parts)


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


def _divergence(methods: Sequence[MethodSummary]) -> list[tuple[str, list[str]]]:
    """How far a lossy rule is from the target, step by step."""
    if all(method.divergence_tv is None for method in methods):
        return []
    tv = [NOTHING if m.divergence_tv is None else f"{m.divergence_tv:.4f}" for m in methods]
    kl = [NOTHING if m.divergence_kl is None else f"{m.divergence_kl:.4f}" for m in methods]
    return [("first token's law from p: total variation", tv), ("  Kullback-Leibler, nats", kl)]


def _stages(methods: Sequence[MethodSummary]) -> list[tuple[str, list[str]]]:
    stages = dict.fromkeys(stage for method in methods for stage in method.stage_seconds)
    return [
        (f"{stage}, ms per token", [_per_token(method, stage) for method in methods])
        for stage in stages
    ]  # fmt: skip


def _per_token(method: MethodSummary, stage: str) -> str:
    if stage not in method.stage_seconds or not method.tokens_per_second:
        return NOTHING
    return f"{1000 * method.stage_seconds[stage] / (method.tokens_per_second * method.seconds):.3f}"


def _pair(method: MethodSummary) -> str:
    if method.method == PLAIN:
        return NOTHING
    return f"{number(method.proposed_depth_per_round)}; {number(method.proposed_nodes_per_round)}"


def with_interval(value: str, bounds: Interval | None) -> str:
    """A value with its interval behind it, if there is one."""
    return value if bounds is None else f"{value} [{bounds[0]:.2f}, {bounds[1]:.2f}]"


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    """A ratio, or a dash."""
    return NOTHING if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """A share, or a dash."""
    return NOTHING if value is None else f"{value:.0%}"
