"""The pictures of an optimized tree: the tree with its rates, and what trees of every size bring."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from experiments.reporting import style
from specdec.shape import TreeShape

if TYPE_CHECKING:
    from experiments.reporting.best_tree import Optimized

_MOST_LABELS = 40
"""A tree with more nodes than this has no numbers beside its nodes."""


@style.styled()
def tree_plot(optimized: "Optimized", path: Path, subtitle: str) -> Path:
    """The chosen tree: how likely each node is to be accepted, by colour, and in numbers where there is room."""
    shape = optimized.best.shape
    reached = optimized.rates.reached(shape)
    x, y = _places(shape)
    figure = style.new_figure(style.PAGE, 1.2 + 0.62 * (shape.max_depth + 1))
    axes = figure.subplots()
    norm = Normalize(0, 1)
    colors = ScalarMappable(norm, "cividis")
    for node in range(1, shape.num_nodes + 1):
        parent = shape.parents[node]
        axes.plot(
            [x[parent], x[node]], [y[parent], y[node]], color=style.FAINT, linewidth=0.4 + 1.8 * reached[node], zorder=1
        )
    size = 46 if shape.num_nodes <= _MOST_LABELS else 18
    axes.scatter(x, y, c=reached, cmap="cividis", norm=norm, s=size, zorder=2, edgecolors="black", linewidths=0.4)
    if shape.num_nodes <= _MOST_LABELS:
        for node in range(1, shape.num_nodes + 1):
            text = f"{reached[node]:.2f}".removeprefix("0") if reached[node] < 0.995 else "1"
            axes.annotate(
                text,
                (x[node], y[node]),
                (0, -10),
                textcoords="offset points",
                ha="center",
                fontsize=style.SMALLEST,
                bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none"},
            )
    axes.margins(x=0.03)
    axes.set_ylim(shape.max_depth + 0.55, -0.4)
    axes.set_yticks(range(shape.max_depth + 1), ["root", *map(str, range(1, shape.max_depth + 1))])
    axes.set_ylabel("depth")
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    bar = figure.colorbar(colors, ax=axes, pad=0.01, aspect=30)
    bar.set_label("accepted with all above it")
    tokens = f"{shape.num_nodes} nodes, {optimized.best.tokens:.2f} tokens per round predicted"
    about = f"{tokens}; siblings by rank from the left"
    style.title(figure, f"The best tree at T = {optimized.temperature:g}", f"{about}; {subtitle}")
    return style.save(figure, path)


def _places(shape: TreeShape) -> tuple[list[float], list[float]]:
    """Where the nodes are drawn: every leaf beside the last one, every other node above its first child."""
    x = [0.0] * (shape.num_nodes + 1)
    free = 0.0

    def place(node: int) -> None:
        nonlocal free
        children = shape.children[node]
        if not children:
            x[node] = free
            free += 1
        for child in children:
            place(child)
        if children:
            x[node] = float(np.mean([x[child] for child in children]))

    place(0)
    return x, [float(depth) for depth in shape.depths]


@style.styled()
def sizes_plot(optimized: "Optimized", path: Path, subtitle: str) -> Path:
    """Tokens per round and tokens per second by the number of nodes, a line per depth; the chosen tree is marked."""
    panels = 1 if optimized.costs is None else 2
    figure = style.new_figure(style.PAGE if panels == 2 else style.COLUMN, 2.9)
    found = figure.subplots(1, panels, squeeze=False)[0]
    depths = sorted({each.depth for each in optimized.planned})
    for index, depth in enumerate(depths):
        same = [each for each in optimized.planned if each.depth == depth]
        nodes = [each.nodes for each in same]
        options = {"color": style.color(index), "marker": style.marker(index), "markevery": _marks(nodes)}
        found[0].plot(nodes, [each.tokens for each in same], label=f"depth {depth}", **options)
        if optimized.costs is not None:
            speeds = [optimized.costs.rows * each.tokens / optimized.costs.of(each.nodes, each.depth) for each in same]
            found[1].plot(nodes, speeds, **options)
    chosen = {
        "marker": "*",
        "markersize": 13,
        "color": "black",
        "markeredgecolor": "white",
        "linestyle": "none",
        "zorder": 5,
    }
    best = optimized.best
    found[0].plot([best.nodes], [best.tokens], label="chosen", **chosen)
    found[0].set_ylabel("predicted tokens per round")
    if optimized.costs is not None:
        rows = optimized.costs.rows
        found[1].plot([best.nodes], [rows * best.tokens / optimized.costs.of(best.nodes, best.depth)], **chosen)
        found[1].axhline(
            rows / optimized.costs.plain, color="black", linewidth=0.9, linestyle="--", label="plain decoding"
        )
        found[1].set_ylabel("predicted tokens per second")
    for axes in found:
        axes.set_xlabel("drafted nodes")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.grid()
    handles, labels = found[0].get_legend_handles_labels()
    more = found[-1].get_legend_handles_labels() if panels == 2 else ([], [])
    style.legend(figure, [*handles, *more[0]], [*labels, *more[1]])
    style.title(figure, f"The best tree of every size at T = {optimized.temperature:g}", subtitle)
    return style.save(figure, path)


def _marks(nodes: Sequence[int]) -> list[int]:
    """Which points get a marker: those of doubled sizes, and the last."""
    powers = {2**power for power in range(13)}
    return [index for index, size in enumerate(nodes) if size in powers or index == len(nodes) - 1]
