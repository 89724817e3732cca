"""The race: methods side by side as live text, tokens colored by source, or marked where there are no colors."""

import time
from collections.abc import Callable, Mapping, Sequence

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from experiments.measuring.race import Lane
from experiments.reporting.table import three_digits
from experiments.results.metrics import distinct_n_gram_rate
from experiments.results.records import Source
from experiments.results.texts import in_context

STYLES = {Source.ACCEPTED: "#ffffff on #005a8e", Source.EITHER: "#000000 on #e8d96a", Source.TARGET: ""}
"""Colors that people with a color vision deficiency can tell apart; letters have a contrast of at least 7 to 1.

They are given as numbers: a terminal's theme changes what a color's name means.
"""
MARKS = {Source.ACCEPTED: ("«", "»"), Source.EITHER: ("±", ""), Source.TARGET: ("", "")}
"""The signs before and after a token that stand for its color."""
_WORDS = {Source.ACCEPTED: "drafted and accepted", Source.EITHER: "drawn by the target"}
FRAMES_PER_SECOND = 20
LINES = 14
"""Lines of a race's output that are shown: the last ones, as on a terminal that scrolls."""
_LOOPS = 0.3
"""Share of repeated 4-grams of an output from which on it is called repetitive."""


def show_race(
    console: Console,
    lanes: Sequence[Lane],
    texts: Mapping[int, bytes],
    title: str,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the lanes, each at its own speed; a file or a pipe, or a terminal without colors, gets the end at once."""
    colors = console.is_terminal and not console.no_color and console.color_system is not None
    end, width = max(lane.seconds for lane in lanes), max(24, console.width // len(lanes) - 1)

    def view(now: float) -> Group:
        legend = Text()
        for source, meaning in _WORDS.items():
            _append(legend, "token", source, colors=colors)
            legend.append(f" {meaning}   ")
        legend.append("each ran alone, and is shown at its own speed")
        panels = [_panel(lane, texts, now, colors=colors, width=width) for lane in lanes]
        notes = _notes(lanes) if now >= end else []
        return Group(Text(title, style="bold"), Columns(panels, padding=(0, 1)), legend, *map(Text, notes))

    if not colors:
        console.print(view(end))
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        begin = clock()
        while (now := clock() - begin) < end:
            live.update(view(now), refresh=True)
            sleep(1 / FRAMES_PER_SECOND)
        live.update(view(end), refresh=True)


def _notes(lanes: Sequence[Lane]) -> list[str]:
    first, *others = lanes
    tokens = [token.token for token in first.tokens]
    notes = [
        f"{lane.method}: {first.seconds / lane.seconds:.2f}x as fast, the same output"
        if [token.token for token in lane.tokens] == tokens
        else f"{lane.method}: {lane.tokens_per_second / first.tokens_per_second:.2f}x the tokens per second"
        for lane in others
    ]
    repeated = 1 - (distinct_n_gram_rate(tokens) or 1.0)
    if repeated >= _LOOPS:
        notes.append(f"{repeated:.0%} of the output repeats itself, which flatters every drafter")
    return notes


def _panel(lane: Lane, texts: Mapping[int, bytes], now: float, *, colors: bool, width: int) -> Panel:
    shown = [token for token in lane.tokens if token.seconds <= now]
    body = Text(overflow="fold")
    for token, word in zip(shown, in_context([token.token for token in shown], texts), strict=True):
        _append(body, word, token.source, colors=colors)
    lines = body.wrap(Console(width=width), width - 4)[-LINES:]
    body = Text("\n").join([*lines, *[Text()] * (LINES - len(lines))])
    seconds = min(now, lane.seconds)
    count = f"{len(shown)} tokens, {three_digits(len(shown) / seconds if seconds else 0.0)} tokens/s"
    if now >= lane.seconds:
        count += f", {lane.rounds} target forwards"
    return Panel(body, title=lane.method, subtitle=count, width=width)


def _append(text: Text, word: str, source: Source, *, colors: bool) -> None:
    """Add a token in its source's color, or between its marks."""
    before, after = ("", "") if colors else MARKS[source]
    text.append(f"{before}{word}{after}", STYLES[source] if colors else "")
