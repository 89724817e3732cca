"""The race: methods side by side as live text, tokens colored by source, or marked where there are no colors."""

import time
from collections.abc import Callable, Mapping, Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from experiments.measuring.race import Lane
from experiments.results.sources import Source
from experiments.results.texts import in_context

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

MARKS = {
    Source.ACCEPTED: ("«", "»"),
    Source.RECOVERED: ("~", ""),
    Source.BONUS: ("+", ""),
    Source.EITHER: ("±", ""),
    Source.TARGET: ("", ""),
}
"""The signs before and after a token that stand for its color."""

_RACE_WORDS = {Source.ACCEPTED: "drafted and accepted", Source.EITHER: "drawn by the target"}
FRAMES_PER_SECOND = 20
LINES = 14
"""Lines of a race's output that are shown: the last ones, as on a terminal that scrolls."""


def colored(console: Console) -> bool:
    """Whether sources can be told by color; on a pipe, or with NO_COLOR, marks stand instead."""
    return console.is_terminal and not console.no_color and console.color_system is not None


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


def _append(text: Text, word: str, source: Source, *, colors: bool) -> None:
    """Add a token in its source's color, or between its marks."""
    before, after = ("", "") if colors else MARKS[source]
    text.append(f"{before}{word}{after}", STYLES[source] if colors else "")


def _legend(words: Mapping[Source, str], *, colors: bool) -> Text:
    """The meaning of every color or mark."""
    legend = Text()
    for source, meaning in words.items():
        before, after = MARKS[source]
        sample = " token " if colors else f"{before}token{after}"
        legend.append(sample, STYLES[source] if colors else "").append(f" {meaning}   ")
    return legend
