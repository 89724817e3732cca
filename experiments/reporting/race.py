"""Two methods side by side as live text: the story of speculative decoding in one look."""

import time
from collections.abc import Callable, Mapping, Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from experiments.measuring.race import Lane
from experiments.reporting.token_lines import MARKS, STYLES, colored
from experiments.results.sources import Source
from experiments.results.token_texts import in_context

FRAMES_PER_SECOND = 20
LINES = 14
"""Lines of an output that are shown: the last ones, as on a terminal that scrolls."""


def show_race(
    console: Console,
    lanes: Sequence[Lane],
    texts: Mapping[int, bytes],
    title: str,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show what the lanes did, each at its own speed; a file or a pipe gets the end at once.

    Args:
        console: Where to show it.
        lanes: Plain decoding first.
        texts: What tokens say.
        title: What runs, on what.
        clock: Tells the time in seconds.
        sleep: Waits for so many seconds.
    """
    colors = colored(console)
    end = max(lane.seconds for lane in lanes)
    if not colors:
        console.print(_view(lanes, texts, title, end, colors=False, width=console.width))
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        begin = clock()
        while (now := clock() - begin) < end:
            live.update(_view(lanes, texts, title, now, colors=True, width=console.width), refresh=True)
            sleep(1 / FRAMES_PER_SECOND)
        live.update(_view(lanes, texts, title, end, colors=True, width=console.width), refresh=True)


def _view(
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
    return Group(
        Text(title, style="bold"), Columns(panels, padding=(0, 1)), _legend(colors), *(Text(note) for note in notes)
    )


def _panel(lane: Lane, texts: Mapping[int, bytes], now: float, *, colors: bool, width: int) -> Panel:
    shown = [token for token in lane.tokens if token.seconds <= now]
    words = in_context([token.token for token in shown], texts)
    body = Text(overflow="fold")
    for token, word in zip(shown, words, strict=True):
        if colors:
            body.append(word, STYLES[token.source])
        else:
            before, after = MARKS[token.source]
            body.append(f"{before}{word}{after}")
    lines = body.wrap(Console(width=width), width - 4)[-LINES:]
    body = Text("\n").join([*lines, *[Text()] * (LINES - len(lines))])
    seconds = min(now, lane.seconds)
    speed = len(shown) / seconds if seconds else 0.0
    count = f"{len(shown)} tokens, {speed:.0f} tokens/s"
    if now >= lane.seconds:
        count += f", {lane.rounds} target forwards"
    return Panel(body, title=lane.method, subtitle=count, width=width)


def _legend(colors: bool) -> Text:
    legend = Text()
    for source, words in ((Source.ACCEPTED, "drafted and accepted"), (Source.EITHER, "drawn by the target")):
        before, after = MARKS[source]
        legend.append(" token " if colors else f"{before}token{after}", STYLES[source] if colors else "")
        legend.append(f" {words}   ")
    legend.append("each ran alone, and is shown at its own speed")
    return legend
