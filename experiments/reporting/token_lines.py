"""An output on a terminal, token by token: colored by source, or with marks where there are no colors."""

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text
from rich.tree import Tree

from experiments.results.lossless import explained
from experiments.results.records import Record
from experiments.results.sources import Source
from experiments.results.token_texts import in_context, text_of
from experiments.tracing.outputs import Output
from experiments.tracing.rounds import DraftedRound, Odds

STYLES = {
    Source.ACCEPTED: "bright_white on #0072b2",
    Source.RECOVERED: "black on #e69f00",
    Source.BONUS: "black on #56d4a8",
    Source.EITHER: "black on #e8d96a",
    Source.TARGET: "",
}
"""Colors that people with a color vision deficiency can tell apart; those of the HTML report."""
_DEEP = ("#0072b2", "#00629a", "#005282", "#00436b", "#003454")
"""Backgrounds of accepted tokens by depth: the deeper in the draft, the darker."""

MARKS = {
    Source.ACCEPTED: ("«", "»"),
    Source.RECOVERED: ("~", ""),
    Source.BONUS: ("+", ""),
    Source.EITHER: ("±", ""),
    Source.TARGET: ("", ""),
}
"""What stands before and after a token instead of its color."""

_WORDS = {
    Source.ACCEPTED: "accepted draft token (darker: deeper in the draft)",
    Source.RECOVERED: "recovered after a rejection",
    Source.BONUS: "bonus after a whole branch",
    Source.EITHER: "recovered or bonus (a trace would tell)",
    Source.TARGET: "nothing was drafted",
}


def colored(console: Console) -> bool:
    """Whether sources can be told by color; on a pipe, or with NO_COLOR, marks stand instead."""
    return console.is_terminal and not console.no_color and console.color_system is not None


def output_view(output: Output, texts: Mapping[int, bytes], *, colors: bool) -> RenderableType:
    """One output with its title, and a legend of what occurs in it.

    Args:
        output: The output.
        texts: What its tokens say.
        colors: Color the tokens; else mark them.
    """
    record = output.record
    if record.failed:
        return Text(f"{_title(record)}\nfailed: {record.error}")
    words = in_context([token.token for token in output.tokens], texts)
    body = Text()
    for index, (token, word) in enumerate(zip(output.tokens, words, strict=True)):
        if index == record.divergence:
            body.append("⟦differs from plain decoding from here⟧", "bold red" if colors else "")
        if colors:
            body.append(_with_breaks(word), _style(token.source, token.depth))
        else:
            before, after = MARKS[token.source]
            body.append(f"{before}{word}{after}")
    lines: list[RenderableType] = [Text(_title(record), "bold"), Text(_figures(record))]
    if record.divergence is not None:
        verdict = "a tie of the dtype" if explained(record) else "NOT explained by the dtype"
        margin = "unknown" if record.margin is None else f"{record.margin:.4f} nats"
        lines.append(Text(f"leaves plain decoding at output token {record.divergence}: margin {margin}, {verdict}"))
    return Group(*lines, Panel(body, expand=False), _legend({token.source for token in output.tokens}, colors))


def round_view(round_: DraftedRound, texts: Mapping[int, bytes], *, colors: bool) -> RenderableType:
    """The draft tree of one round, with p and q of its nodes, and what became of it."""
    children: dict[int, list[int]] = {}
    for index, node in enumerate(round_.nodes[1:], start=1):
        children.setdefault(node.parent, []).append(index)
    made: Tree | None = None
    places: dict[int, Tree] = {}
    path = {0, *round_.path}
    for index, node in enumerate(round_.nodes):
        if index == 0:
            places[0] = made = Tree(Text(f"root {text_of(node.odds.token, texts)!r}", "bold"))
            continue
        kept = index in path
        style = STYLES[Source.ACCEPTED] if kept else "dim"
        line = Text("✓ " if kept else "✗ ")
        line.append(repr(text_of(node.odds.token, texts)), style if colors else "")
        places[index] = places[node.parent].add(line.append(_odds(node.odds)))
    assert made is not None, "a round has a root"
    source = Source.TARGET if len(round_.nodes) == 1 else Source.BONUS if round_.at_leaf else Source.RECOVERED
    line = Text("→ ").append(repr(text_of(round_.next.token, texts)), STYLES[source] if colors else "")
    places[round_.stop].add(line.append(f"  {source}").append(_odds(round_.next)))
    drafted = len(round_.nodes) - 1
    head = Text(
        f"round {round_.round}: {len(round_.path)} accepted (expected {round_.expected_accepted:.2f}) "
        f"of {drafted} drafted nodes"
    )
    lines: list[RenderableType] = [head, made]
    for index, likely in zip((0, *round_.path), round_.likely, strict=True):
        name = text_of(round_.nodes[index].odds.token, texts)
        after = ", ".join(f"{text_of(odds.token, texts)!r} {_share(odds.p)}" for odds in likely)
        lines.append(Text(f"most likely after {name!r}: {after}"))
    lines.append(Text("✓ accepted   ✗ not accepted   → the token that followed   p: target   q: drafter", "dim"))
    return Group(*lines)


def _style(source: Source, depth: int) -> str:
    return f"bright_white on {_DEEP[min(depth, len(_DEEP)) - 1]}" if source is Source.ACCEPTED else STYLES[source]


def _with_breaks(word: str) -> str:
    return word.replace("\n", "⏎\n")


def _legend(sources: set[Source], colors: bool) -> Text:
    legend = Text()
    for source in Source:
        if source in sources:
            before, after = MARKS[source]
            legend.append(f" {source} " if colors else f"{before}token{after}", STYLES[source] if colors else "")
            legend.append(f" {_WORDS[source]}\n")
    legend.rstrip()
    return legend


def _title(record: Record) -> str:
    turn = f", turn {record.turn}" if record.turn else ""
    sample = f", sample {record.sample}" if record.sample else ""
    return f"{record.method} on {record.prompt}{turn}{sample}, temperature {record.temperature:g}"


def _figures(record: Record) -> str:
    rounds = len(record.accepted)
    length = (sum(record.accepted) + rounds) / rounds if rounds else 0.0
    return (
        f"{len(record.token_ids)} tokens in {rounds} rounds: {length:.2f} tokens per target forward; "
        f"ended by {record.finish_reason}"
    )


def _odds(odds: Odds) -> str:
    return f"  p {_share(odds.p)}  q {_share(odds.q)}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
