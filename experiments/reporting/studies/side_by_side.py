"""One prompt's output by plain decoding and by a method, each token in the color of its source."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from experiments.reporting import terminal
from experiments.results.metrics import distinct_n_gram_rate
from experiments.results.records import Record, Source, sourced
from experiments.results.texts import in_context
from specdec.target.spelling import token_bytes

_ACCEPTED, _DRAWN = ("#ffffff on #005a8e", "«", "»"), ("#000000 on #e8d96a", "±", "")
"""A style, for every eye a contrast of at least 7 to 1, and what stands around a token where there are no colors."""
STYLES = {Source.ACCEPTED: _ACCEPTED, Source.TARGET: ("", "", "")}


def side_by_side(ended: Any, *, method: str, lines: int = 14, more: str = "") -> tuple[list[Any], list[Any]]:
    """Print the last lines of both greedy outputs for the prompt whose output repeats itself least, and ``more``."""
    done = {(r.method, r.prompt): r for r in ended.records if r.temperature == 0 and not r.failed and r.seconds}
    rates = {prompt: distinct_n_gram_rate(r.token_ids) or 0 for (name, prompt), r in done.items() if name == method}
    tokenizer = ended.contenders[0].engine.target.tokenizer
    if not rates or tokenizer is None:
        return [], []
    pair = [done[name, max(rates, key=rates.__getitem__)] for name in ("plain", method)]
    texts = token_bytes({token for record in pair for token in record.token_ids}, tokenizer)
    show(terminal.console(), pair, texts, lines=lines)
    terminal.say(terminal.console(), *([more] if more else []))
    return [], []


def show(console: Console, records: Sequence[Record], texts: Mapping[int, bytes], *, lines: int) -> None:
    """Print outputs in columns, with what their colors mean."""
    colors = console.is_terminal and not console.no_color and console.color_system is not None

    def colored(word: str, source: Source) -> Text:
        style, before, after = STYLES.get(source, _DRAWN)
        return Text(word, style) if colors else Text(f"{before}{word}{after}")

    width = max(24, console.width // len(records) - 1)
    panels = []
    for record in records:
        words = zip(in_context(record.token_ids, texts), sourced(record), strict=True)
        body = Text(overflow="fold").join([colored(word, token.source) for word, token in words])
        shown = Text("\n").join(body.wrap(console, width - 4)[-lines:])
        count = len(record.token_ids)
        about = f"{count} tokens, {count / (record.seconds or 1):.0f} tokens/s, {len(record.accepted)} target forwards"
        panels.append(Panel(shown, title=record.method, subtitle=about, width=width))
    console.print(Columns(panels, padding=(0, 1)))
    legend = (colored("token", Source.ACCEPTED), " drafted and accepted   ", colored("token", Source.EITHER))
    console.print(Text.assemble(*legend, f" drawn by the target   the last {lines} lines of one prompt's output"))
