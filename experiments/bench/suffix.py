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
from dataclasses import dataclass
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
                node = nodes.setdefault((cursor, token), len(counts))
                if node == len(counts):
                    counts.append(0)
                counts[node] += 1
                moved.append(node)
            self.cursors = moved[1 - self.depth :]


@dataclass(frozen=True)
class Options:
    """The command line."""

    out: Path = option(Path("outputs/suffix"), "folder for suffix.png")
    tokens: int = option(100_000, "tokens of the text", least=1000)
    depth: int = option(24, "tokens of the longest string that is counted", least=2)
    points: int = option(20, "points of a curve", least=2)


def text_of(count: int, tokenizer: Callable[[str], Sequence[int]]) -> list[int]:
    """Return tokens, whose second half repeats the first."""
    tokens: list[int] = []
    for path in training_files():
        tokens += tokenizer(read_source(path))
        if 2 * len(tokens) >= count:
            break
    return 2 * tokens[: count // 2]


def measured(make: Callable[[int], Tree | Trie], tokens: Sequence[int], options: Options) -> list[dict[str, float]]:
    """Measure time in one pass and memory, which makes everything slow, in another; return a row per point.

    ``time``: microseconds per token over the stretch before that point, of this process alone, without garbage
    collection. ``memory``: megabytes at that point. ``look_up``: microseconds of a look-up there, of the tree.
    """
    stretch = len(tokens) // options.points
    starts = range(0, options.points * stretch, stretch)
    found: list[dict[str, float]] = []
    gc.collect()
    gc.disable()  # else it goes through all objects of all imported modules in the middle of a stretch
    made = make(options.depth)
    for first in starts:
        begin = time.process_time()
        for start in range(first, first + stretch, PIECE):
            made.extend(tokens[start : start + PIECE])
        spent = time.process_time() - begin
        found.append({"tokens": first + stretch, "time": 1e6 * spent / stretch})
        if isinstance(made, Tree):
            found[-1]["look_up"] = 1e6 * timed(made.look_up, repeats=9, warm_up=0)["seconds"]
    gc.enable()
    del made
    gc.collect()
    tracemalloc.start()
    made = make(options.depth)
    for first, point in zip(starts, found, strict=True):
        made.extend(tokens[first : first + stretch])
        point["memory"] = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    return found


def draw(curves: dict[str, list[dict[str, float]]], depth: int, path: Path) -> Path:
    """Draw time and memory by tokens."""
    with style.styled():
        figure = style.new_figure(style.PAGE, 2.6)
        labels = {"time": "time per token (µs)", "memory": "memory (MB)"}
        for (name, label), panel in zip(labels.items(), figure.subplots(1, 2), strict=True):
            for index, (structure, points) in enumerate(curves.items()):
                xs, ys = [point["tokens"] / 1000 for point in points], [point[name] for point in points]
                panel.plot(xs, ys, markersize=3, label=structure, **style.looks(index))
            panel.set(xlabel="tokens in the tree (thousands)", ylabel=label)
            panel.set_ylim(bottom=0)
        style.legend(figure, *figure.axes[0].get_legend_handles_labels())
        about = f"strings of up to {depth} tokens; the second half of the text repeats the first"
        style.title(figure, "What a token costs a suffix tree as it grows", about)
        return style.save(figure, path)


def main() -> None:
    """Measure, print a table, and write ``suffix.png``."""
    options = read_options(Options, __doc__)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer("bundled/target")
    tokens = text_of(options.tokens, lambda text: tokenizer(text, verbose=False)["input_ids"])
    makers: dict[str, Callable[[int], Tree | Trie]] = {"compressed edges": Tree, "one entry per string": Trie}
    curves = {name: measured(make, tokens, options) for name, make in makers.items()}
    rows = [
        {
            "structure": name, "tokens": f"{curve[point]['tokens']:,}",
            "µs per token": f"{curve[point]['time']:.1f}", "memory (MB)": f"{curve[point]['memory']:.1f}",
            "look-up (µs)": f"{curve[point]['look_up']:.0f}" if "look_up" in curve[point] else NOTHING,
        }
        for name, curve in curves.items()
        for point in sorted({0, options.points // 2 - 1, options.points - 1})
    ]  # fmt: skip
    show(f"Strings of up to {options.depth} tokens", rows)
    print(f"wrote {draw(curves, options.depth, options.out / 'suffix.png')}")
