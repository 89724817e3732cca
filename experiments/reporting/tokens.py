"""Outputs on a terminal, token by token: colored by source, or with marks where there are no colors; and the race.

The race shows two methods side by side as live text: the story of speculative decoding in one look.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from rich.tree import Tree

from experiments.measuring.race import Lane
from experiments.results.lossless import explained
from experiments.results.sources import Source
from experiments.results.texts import in_context, text_of
from experiments.tracing.outputs import Output
from experiments.tracing.rounds import DraftedRound, Odds

STYLES = {
    Source.ACCEPTED: "#ffffff on #005a8e",
    Source.RECOVERED: "#000000 on #e69f00",
    Source.BONUS: "#000000 on #56d4a8",
    Source.EITHER: "#000000 on #e8d96a",
    Source.TARGET: "",
}
"""Colors that people with a color vision deficiency can tell apart; letters have a contrast of at least 7 to 1.

They are given as numbers: a terminal's theme changes what a color's name means.
"""
_DEEP = ("#005a8e", "#004f7c", "#00436b", "#003454", "#002a44")
"""Backgrounds of accepted tokens by depth: the deeper in the draft, the darker."""

MARKS = {
    Source.ACCEPTED: ("«", "»"),
    Source.RECOVERED: ("~", ""),
    Source.BONUS: ("+", ""),
    Source.EITHER: ("±", ""),
    Source.TARGET: ("", ""),
}
"""The signs before and after a token that stand for its color."""

_WORDS = {
    Source.ACCEPTED: "accepted draft token (darker: deeper in the draft)",
    Source.RECOVERED: "recovered after a rejection",
    Source.BONUS: "bonus after a whole branch",
    Source.EITHER: "recovered or bonus (a trace would tell)",
    Source.TARGET: "nothing was drafted",
}
_RACE_WORDS = {Source.ACCEPTED: "drafted and accepted", Source.EITHER: "drawn by the target"}
FRAMES_PER_SECOND = 20
LINES = 14
"""Lines of a race's output that are shown: the last ones, as on a terminal that scrolls."""


def colored(console: Console) -> bool:
    """Whether sources can be told by color; on a pipe, or with NO_COLOR, marks stand instead."""
    return console.is_terminal and not console.no_color and console.color_system is not None


def output_view(output: Output, texts: Mapping[int, bytes], *, colors: bool) -> RenderableType:
    """One output with its title, and a legend of what occurs in it."""
    record = output.record
    turn = f", turn {record.turn}" if record.turn else ""
    sample = f", sample {record.sample}" if record.sample else ""
    title = f"{record.method} on {record.prompt}{turn}{sample}, temperature {record.temperature:g}"
    if record.failed:
        return Text(f"{title}\nfailed: {record.error}")
    words = in_context([token.token for token in output.tokens], texts)
    body = Text()
    for index, (token, word) in enumerate(zip(output.tokens, words, strict=True)):
        if index == record.divergence:
            body.append("⟦differs from plain decoding from here⟧", "bold red" if colors else "")
        _append(body, word.replace("\n", "⏎\n") if colors else word, token.source, colors=colors, depth=token.depth)
    rounds = len(record.accepted)
    length = (sum(record.accepted) + rounds) / rounds if rounds else 0.0
    figures = f"{len(record.token_ids)} tokens in {rounds} rounds: {length:.2f} tokens per target forward; "
    lines: list[RenderableType] = [Text(title, "bold"), Text(f"{figures}ended by {record.finish_reason}")]
    if record.divergence is not None:
        verdict = "a tie of the dtype" if explained(record) else "NOT explained by the dtype"
        margin = "unknown" if record.margin is None else f"{record.margin:.4f} nats"
        lines.append(Text(f"leaves plain decoding at output token {record.divergence}: margin {margin}, {verdict}"))
    found = {token.source for token in output.tokens}
    shown = {source: f"{_WORDS[source]}\n" for source in Source if source in found}
    legend = _legend(shown, colors=colors, named=True)
    legend.rstrip()
    return Group(*lines, Panel(body, expand=False), legend)


def round_view(round_: DraftedRound, texts: Mapping[int, bytes], *, colors: bool) -> RenderableType:
    """The draft tree of one round, with p and q of its nodes, and its verdict."""

    def name(odds: Odds) -> str:
        return repr(text_of(odds.token, texts))

    # Parents stand before their children.
    made = Tree(Text(f"root {name(round_.nodes[0].odds)}", "bold"))
    places, path = {0: made}, set(round_.path)
    for index, node in enumerate(round_.nodes[1:], start=1):
        kept = index in path
        line = Text("✓ " if kept else "✗ ")
        line.append(name(node.odds), (STYLES[Source.ACCEPTED] if kept else "dim") if colors else "")
        places[index] = places[node.parent].add(line.append(_odds(node.odds)))
    source = Source.TARGET if len(round_.nodes) == 1 else Source.BONUS if round_.at_leaf else Source.RECOVERED
    line = Text("→ ").append(name(round_.next), STYLES[source] if colors else "")
    places[round_.stop].add(line.append(f"  {source}").append(_odds(round_.next)))
    accepted = f"{len(round_.path)} accepted (expected {round_.expected_accepted:.2f})"
    lines: list[RenderableType] = [Text(f"round {round_.round}: {accepted} of {len(round_.nodes) - 1} drafted nodes")]
    lines.append(made)
    for index, likely in zip((0, *round_.path), round_.likely, strict=True):
        after = ", ".join(f"{name(odds)} {_share(odds.p)}" for odds in likely)
        lines.append(Text(f"most likely after {name(round_.nodes[index].odds)}: {after}"))
    lines.append(Text("✓ accepted   ✗ not accepted   → the token that followed   p: target   q: drafter", "dim"))
    return Group(*lines)


def show_race(
    console: Console,
    lanes: Sequence[Lane],
    texts: Mapping[int, bytes],
    title: str,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the lanes, each at its own speed; a file or a pipe gets the end at once."""
    colors = colored(console)
    end = max(lane.seconds for lane in lanes)

    def view(now: float) -> RenderableType:
        return _race(lanes, texts, title, now, colors=colors, width=console.width)

    if not colors:
        console.print(view(end))
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        begin = clock()
        while (now := clock() - begin) < end:
            live.update(view(now), refresh=True)
            sleep(1 / FRAMES_PER_SECOND)
        live.update(view(end), refresh=True)


def _race(
    lanes: Sequence[Lane], texts: Mapping[int, bytes], title: str, now: float, *, colors: bool, width: int
) -> RenderableType:
    each = max(24, width // len(lanes) - 1)
    panels = [_panel(lane, texts, now, colors=colors, width=each) for lane in lanes]
    first, *others = lanes
    notes = [
        f"{lane.method}: {first.seconds / lane.seconds:.2f}x as fast, the same output"
        if [t.token for t in lane.tokens] == [t.token for t in first.tokens]
        else f"{lane.method}: {lane.tokens_per_second / first.tokens_per_second:.2f}x the tokens per second"
        for lane in others
        if now >= first.seconds
    ]
    if notes and (repeated := _repeated(first)):
        notes.append(f"{repeated:.0%} of the output repeats itself, which flatters every drafter")
    legend = _legend(_RACE_WORDS, colors=colors).append("each ran alone, and is shown at its own speed")
    return Group(Text(title, style="bold"), Columns(panels, padding=(0, 1)), legend, *map(Text, notes))


_LOOPS = 0.3
"""Share of repeated 4-grams of an output from which on it is called repetitive."""


def _repeated(lane: Lane) -> float:
    """The share of an output's 4-grams that stand in it before, or 0 where that is ordinary."""
    tokens = [token.token for token in lane.tokens]
    grams = [tuple(tokens[place : place + 4]) for place in range(len(tokens) - 3)]
    share = 1 - len(set(grams)) / len(grams) if grams else 0.0
    return share if share >= _LOOPS else 0.0


def _panel(lane: Lane, texts: Mapping[int, bytes], now: float, *, colors: bool, width: int) -> Panel:
    shown = [token for token in lane.tokens if token.seconds <= now]
    body = Text(overflow="fold")
    for token, word in zip(shown, in_context([token.token for token in shown], texts), strict=True):
        _append(body, word, token.source, colors=colors)
    lines = body.wrap(Console(width=width), width - 4)[-LINES:]
    body = Text("\n").join([*lines, *[Text()] * (LINES - len(lines))])
    seconds = min(now, lane.seconds)
    count = f"{len(shown)} tokens, {len(shown) / seconds if seconds else 0.0:.0f} tokens/s"
    if now >= lane.seconds:
        count += f", {lane.rounds} target forwards"
    return Panel(body, title=lane.method, subtitle=count, width=width)


def _append(text: Text, word: str, source: Source, *, colors: bool, depth: int = 1) -> None:
    """Add a token in its source's color, or between its marks."""
    if not colors:
        before, after = MARKS[source]
        text.append(f"{before}{word}{after}")
    elif source is Source.ACCEPTED:
        text.append(word, f"#ffffff on {_DEEP[min(max(depth, 1), len(_DEEP)) - 1]}")
    else:
        text.append(word, STYLES[source])


def _legend(words: Mapping[Source, str], *, colors: bool, named: bool = False) -> Text:
    """The meaning of every color or mark."""
    legend = Text()
    for source, meaning in words.items():
        before, after = MARKS[source]
        sample = f" {source if named else 'token'} " if colors else f"{before}token{after}"
        legend.append(sample, STYLES[source] if colors else "").append(f" {meaning}{'' if named else '   '}")
    return legend


def _odds(odds: Odds) -> str:
    return f"  p {_share(odds.p)}  q {_share(odds.q)}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
