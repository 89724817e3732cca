"""What a suffix tree costs as its text grows: ``out=FOLDER`` measures and draws.

The text is Python's own library in tokens of the bundled models. Its second half repeats the first, which costs most
time: every suffix up to the depth has occurred before, and is followed. The tree with compressed edges
(``drafters.suffix_tree``) is compared with the obvious other way: a trie of all strings up to the depth, one entry of a
dictionary per string, and a cursor for every suffix.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drafters.suffix_tree import SuffixTree, Text
from experiments.bench.options import option, read_options
from experiments.bench.timing import NOTHING, show, timed
from experiments.datasets.sources import read_source, training_files
from experiments.reporting import style
from specdec.target.loading import load_tokenizer

PIECE = 4
"""Tokens that are added at once: about as many as a round emits."""


class Tree:
    """The suffix tree of the drafter."""

    def __init__(self, depth: int):
        self.tree, self.text = SuffixTree(depth), Text()

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens."""
        self.tree.extend(self.text, tokens)

    def look_up(self) -> None:
        """Do what a round does: follow matches, the longest first, for as long as a better draft is possible."""
        best = 0.0
        for cursor in self.text.cursors:
            most = min(16, 4 * (len(self.text.tokens) - cursor.start))
            if most > best:
                draft = self.tree.follow((cursor.node, cursor.node.length - cursor.left), most, 0.1)
                best = max(best, draft.score)


class Trie:
    """One entry per string, without compression."""

    def __init__(self, depth: int):
        self.depth = depth
        self.nodes: dict[tuple[int, int], int] = {}
        self.counts = [0]
        self.cursors: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens."""
        nodes, counts = self.nodes, self.counts
        for token in tokens:
            moved = []
            for cursor in (*self.cursors, 0):
                key = cursor, token
                node = nodes.get(key)
                if node is None:
                    node = nodes[key] = len(counts)
                    counts.append(0)
                counts[node] += 1
                moved.append(node)
            self.cursors = moved[1 - self.depth :]


@dataclass(frozen=True)
class Curve:
    """The figures of one structure, point by point.

    Attributes:
        name: For the legend.
        tokens: How many tokens it holds at each point.
        microseconds: Per token, over the stretch before that point: of this process alone, without garbage collection.
        megabytes: Memory that it takes at that point.
        look_up: Microseconds of a look-up there; empty where none is measured.
    """

    name: str
    tokens: list[int] = field(default_factory=list)
    microseconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    look_up: list[float] = field(default_factory=list)


def text_of(count: int, tokenizer: Callable[[str], Sequence[int]]) -> list[int]:
    """Return tokens, whose second half repeats the first."""
    tokens: list[int] = []
    for path in training_files():
        tokens += tokenizer(read_source(path))
        if 2 * len(tokens) >= count:
            break
    half = tokens[: count // 2]
    return half + half


def measured(name: str, make: Callable[[], Tree | Trie], tokens: Sequence[int], points: int) -> Curve:
    """Measure time in one pass and memory, which makes everything slow, in another."""
    curve, stretch = Curve(name), len(tokens) // points
    gc.collect()
    gc.disable()  # else it goes through all objects of all imported modules in the middle of a stretch
    made = make()
    for point in range(points):
        begin = time.process_time()
        for start in range(point * stretch, (point + 1) * stretch, PIECE):
            made.extend(tokens[start : start + PIECE])
        curve.tokens.append((point + 1) * stretch)
        curve.microseconds.append(1e6 * (time.process_time() - begin) / stretch)
        if isinstance(made, Tree):
            curve.look_up.append(1e6 * timed(made.look_up, repeats=9, warm_up=0).seconds)
    gc.enable()
    del made
    gc.collect()
    tracemalloc.start()
    made = make()
    for point in range(points):
        made.extend(tokens[point * stretch : (point + 1) * stretch])
        curve.megabytes.append(tracemalloc.get_traced_memory()[0] / 1e6)
    tracemalloc.stop()
    return curve


def draw(curves: Sequence[Curve], depth: int, path: Path) -> Path:
    """Draw time and memory by tokens."""
    with style.styled():
        figure = style.new_figure(style.PAGE, 2.6)
        time_panel, memory_panel = figure.subplots(1, 2)
        for index, curve in enumerate(curves):
            kept = {"color": style.color(index), "marker": style.marker(index), "markersize": 3, "label": curve.name}
            tokens = [count / 1000 for count in curve.tokens]
            time_panel.plot(tokens, curve.microseconds, **kept)
            memory_panel.plot(tokens, curve.megabytes, **kept)
        for panel, label in ((time_panel, "time per token (µs)"), (memory_panel, "memory (MB)")):
            panel.set_xlabel("tokens in the tree (thousands)")
            panel.set_ylabel(label)
            panel.set_ylim(bottom=0)
        style.legend(figure, *time_panel.get_legend_handles_labels())
        style.title(
            figure,
            "What a token costs a suffix tree as it grows",
            f"strings of up to {depth} tokens; the second half of the text repeats the first",
        )
        return style.save(figure, path)


@dataclass(frozen=True)
class Options:
    """The command line."""

    out: Path = option(Path("outputs/suffix"), "folder for suffix.png")
    tokens: int = option(100_000, "tokens of the text", least=1000)
    depth: int = option(24, "tokens of the longest string that is counted", least=2)
    points: int = option(20, "points of a curve", least=2)


def main() -> None:
    """Measure, print a table, and write ``suffix.png``."""
    options = read_options(Options, __doc__)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer("bundled/target")
    tokens = text_of(options.tokens, lambda text: tokenizer(text, verbose=False)["input_ids"])
    makers = {"compressed edges": Tree, "one entry per string": Trie}
    curves = [
        measured(name, lambda make=make: make(options.depth), tokens, options.points) for name, make in makers.items()
    ]
    rows = [
        {
            "structure": curve.name, "tokens": f"{curve.tokens[point]:,}",
            "µs per token": f"{curve.microseconds[point]:.1f}", "memory (MB)": f"{curve.megabytes[point]:.1f}",
            "look-up (µs)": f"{curve.look_up[point]:.0f}" if curve.look_up else NOTHING,
        }
        for curve in curves
        for point in sorted({0, options.points // 2 - 1, options.points - 1})
    ]  # fmt: skip
    show(f"Strings of up to {options.depth} tokens", rows)
    print(f"wrote {draw(curves, options.depth, options.out / 'suffix.png')}")


if __name__ == "__main__":
    main()
