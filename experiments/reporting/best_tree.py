"""The report of an optimized tree: rates, the best tree of every size, the chosen one, predicted beside measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.reporting import style, terminal
from experiments.reporting.cells import NOTHING, number, signed_percent, times, with_interval
from experiments.reporting.table import Cell, Column, Emphasis, Table, left
from experiments.results.plain_json import json_text
from experiments.results.statistics import Bootstrap, Interval
from experiments.tracing.rates import Recorded
from specdec.drafting.acceptance_rates import AcceptanceRates
from specdec.drafting.best_shapes import PlannedShape
from specdec.drafting.tree_costs import TreeCosts
from specdec.shape import TreeShape

TREES = "tree"
"""The folder of the written shapes; its name is that of the configuration group."""
_SIZES = frozenset(2**power for power in range(13))
_MOST_LABELS = 40
"""A tree with more nodes than this has no numbers beside its nodes."""
_STAR: dict[str, Any] = {
    "marker": "*",
    "markersize": 13,
    "color": "black",
    "markeredgecolor": "white",
    "linestyle": "none",
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The figures of a tree that was run.

    Attributes:
        tokens: Expected tokens per round given the drafts, in rounds that the end of the output did not cut.
        tokens_interval: Its interval over prompts.
        prompts: How many prompts were decoded.
        speedup: Over plain decoding.
        speedup_interval: Its interval.
    """

    tokens: float
    tokens_interval: Interval | None
    prompts: int
    speedup: float | None
    speedup_interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """The best tree at a temperature, and the trees it was chosen among.

    Attributes:
        temperature: The requests'.
        recorded: The rounds of the trace.
        rates: The acceptance rates.
        planned: The best tree of every size.
        costs: How long rounds take; None where the tree was chosen by its tokens alone.
        best: The chosen tree.
        old: The tree it is compared with, as ``drafter.shape`` takes it.
        measured: Figures of the old and the new tree, by ``"old"`` and ``"new"``; empty where nothing was run.
    """

    temperature: float
    recorded: Recorded
    rates: AcceptanceRates
    planned: Sequence[PlannedShape]
    costs: TreeCosts | None
    best: PlannedShape
    old: Any
    measured: Mapping[str, Measured] = field(default_factory=dict)

    @property
    def old_tree(self) -> TreeShape | None:
        """The old shape, if it is a static one."""
        try:
            return TreeShape.of(self.old)
        except ValueError:
            return None

    @property
    def same(self) -> bool:
        """The new shape is the old one."""
        return self.old_tree == self.best.shape

    @property
    def trees(self) -> dict[str, TreeShape | None]:
        """The old and the new tree, by name."""
        return {"old": self.old_tree, "new": self.best.shape}

    def predicted(self, shape: TreeShape | None) -> tuple[float | None, float | None]:
        """Tokens per round and speedup of a tree; None for what is not known."""
        try:
            tokens = None if shape is None else self.rates.tokens_per_round(shape)
        except ValueError:
            tokens = None
        if tokens is None or shape is None or self.costs is None:
            return tokens, None
        return tokens, tokens * self.costs.plain / self.costs.of(shape.num_nodes, shape.max_depth)

    def seconds(self, planned: PlannedShape) -> float | None:
        """The time of a round with a tree; None without costs."""
        return None if self.costs is None else self.costs.of(planned.nodes, planned.depth)

    def speedups(self) -> tuple[str, dict[str, float]]:
        """``"measured"`` or ``"predicted"``, and these speedups of the old and the new tree if known."""
        measured = {name: each.speedup for name, each in self.measured.items() if each.speedup is not None}
        if "new" in measured:
            return "measured", measured
        predicted = {name: self.predicted(tree)[1] for name, tree in self.trees.items()}
        return "predicted", {name: value for name, value in predicted.items() if value is not None}

    def advice(self) -> tuple[str, str]:
        """``"new"``, ``"old"`` or ``"none"``, for the tree to take, and the reason in a sentence."""
        (said, speedups), at = self.speedups(), f"at T={self.temperature:g}"
        if not speedups:
            old, new = (self.predicted(self.trees[name])[0] for name in ("old", "new"))
            if old is not None and new is not None and old >= new:
                return "old", f"keep the old tree {at}: the best one found has no more tokens per round ({new:.2f})"
            return "new", f"best tree {at}, {self.best.nodes} nodes:"
        name, speed = max(speedups.items(), key=lambda each: (each[1], each[0] == "old"))
        if speed <= 1:
            return "none", f"none pays here: {at} the fastest tree is {said} at {speed:.2f}x, so decode plainly"
        if name == "old" and not self.same:
            best = f"the best one found at {speedups['new']:.2f}x"
            return "old", f"keep the old tree {at}: {said} at {speed:.2f}x, {best}"
        return "new", f"best tree {at}, {self.best.nodes} nodes, {said} at {speed:.2f}x:"


def written_shape(shape: TreeShape) -> str:
    """A shape as ``drafter.shape=`` takes it, in its shortest form."""
    if shape.is_chain:
        return str(shape.num_nodes)
    widths = [
        {len(shape.children[node]) for node, depth in enumerate(shape.depths) if depth == level}
        for level in range(shape.max_depth)
    ]
    alike = all(len(each) == 1 for each in widths)
    value = [next(iter(each)) for each in widths] if alike else [list(path) for path in shape.paths]
    return json.dumps(value, separators=(",", ":"))


def rates_table(optimized: Optimized, bootstrap: Bootstrap) -> Table:
    """A row per depth, a column per rank: the rate, its interval, and how many nodes it was measured on."""
    recorded, rates = optimized.recorded, optimized.rates
    notes = [
        "the share of accepted nodes of the depth above whose child of this rank was accepted, drawn a little to the "
        f"rank's average; its interval at {bootstrap.confidence:.0%} over {len(recorded.prompts)} prompts; behind / "
        "the number of such nodes",
    ]
    offered = recorded.offered.sum(0)

    def cell(depth: int, rank: int) -> Cell | str:
        if rank >= len(rates.at(depth)):
            return NOTHING
        bounds = recorded.rate_interval(depth, rank, bootstrap)
        more = "" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f} "
        return Cell(f"{rates.at(depth)[rank]:.3f}", (f"{more}/ {offered[depth - 1, rank]:.0f}",))

    ranks = range(rates.table.shape[1])
    title = f"Acceptance rates at T={optimized.temperature:g}, by depth and sibling rank"
    table = Table([Column("depth"), *(Column(f"rank {rank}") for rank in ranks)], title, notes)
    for depth in range(1, rates.max_depth + 1):
        table.add(str(depth), *(cell(depth, rank) for rank in ranks))
    return table


def sizes_table(optimized: Optimized) -> Table:
    """A row per size: the best tree with twice as many nodes as the row before, and the chosen one."""
    columns = [*map(Column, ("nodes", "depth", "tokens\nper round", "ms\nper round", "speedup"))]
    columns += [left("children of the root,\nof its first child, …")]
    table = Table(columns, f"The best trees at T={optimized.temperature:g}", ["predicted; bold: chosen"])
    best_of = _best_by_nodes(optimized)
    sizes = {size for size in _SIZES if size in best_of} | {optimized.best.nodes, max(best_of)}
    for nodes in sorted(sizes):
        each = optimized.best if nodes == optimized.best.nodes else best_of[nodes]
        seconds = optimized.seconds(each)
        spine, node = [], 0
        while each.shape.children[node]:
            spine.append(len(each.shape.children[node]))
            node = each.shape.children[node][0]
        cells = [str(nodes), str(each.depth), f"{each.tokens:.3f}", number(None if seconds is None else 1000 * seconds)]
        cells += [times(optimized.predicted(each.shape)[1]), " ".join(map(str, spine))]
        emphasis = Emphasis.BEST if each is optimized.best else Emphasis.NONE
        table.add(*(Cell(text, emphasis=emphasis) for text in cells))
    return table


def _best_by_nodes(optimized: Optimized) -> dict[int, PlannedShape]:
    """The best tree of every number of nodes: by tokens per second, without costs by tokens."""

    def value(each: PlannedShape) -> float:
        return each.tokens / (optimized.seconds(each) or 1.0)

    found: dict[int, PlannedShape] = {}
    for each in optimized.planned:
        if each.nodes not in found or value(each) > value(found[each.nodes]):
            found[each.nodes] = each
    return found


def measured_table(optimized: Optimized, bootstrap: Bootstrap) -> Table:
    """The old and the new tree, and how one compares with the other: predicted and measured."""
    headings = ("nodes", "depth", "tokens per round\npredicted", "\nmeasured", "\ndifference")
    columns = [left("tree"), *map(Column, (*headings, "speedup\npredicted", "\nmeasured"))]
    few, many = min(each.prompts for each in optimized.measured.values()), len(optimized.recorded.prompts)
    notes = [
        f"measured on {few} prompts, predicted from {many}" if few != many else f"{many} prompts",
        f"tokens per round: in rounds that the end of the output did not cut; intervals at {bootstrap.confidence:.0%} "
        f"over prompts; predicted speedups count rounds alone, measured ones the prompts' prefill, too",
    ]
    table = Table(columns, f"Predicted and measured at T={optimized.temperature:g}", notes)
    predicted = {name: optimized.predicted(tree) for name, tree in optimized.trees.items()}
    for name, measured in optimized.measured.items():
        tree, (tokens, speedup) = optimized.trees[name], predicted[name]
        bounds = None
        if tokens is not None and tree is not None:
            bounds = optimized.recorded.tokens_interval(tree, bootstrap)
        table.add(
            name,
            NOTHING if tree is None else str(tree.num_nodes),
            NOTHING if tree is None else str(tree.max_depth),
            with_interval(number(tokens), bounds),
            with_interval(number(measured.tokens), measured.tokens_interval),
            _gain(measured.tokens, tokens),
            times(speedup),
            with_interval(times(measured.speedup), measured.speedup_interval),
        )
    if "old" in optimized.measured:
        old, new = optimized.measured["old"], optimized.measured["new"]
        tokens, speed = (_gain(predicted["new"][index], predicted["old"][index]) for index in (0, 1))
        measured = (_gain(new.tokens, old.tokens), _gain(new.speedup, old.speedup))
        table.add(Cell("gain", emphasis=Emphasis.BEST), "", "", tokens, measured[0], "", speed, measured[1])
    return table


def _gain(new: float | None, old: float | None) -> str:
    return signed_percent(None if new is None or not old else new / old - 1)


def remarks(optimized: Optimized) -> list[str]:
    """Sentences that a reader of the tables needs."""
    best, rates = optimized.best, optimized.rates
    said = []
    if not optimized.recorded.top_down:
        said.append(
            "The rule looks below a node before it decides about it, so rates depend on the tree that was recorded: "
            "take the predictions as approximate."
        )
    most = max(each.nodes for each in optimized.planned)
    if best.depth == rates.max_depth:
        said.append(f"The tree is as deep as the recorded one ({best.depth}): a deeper trace may show a better one.")
    used: dict[int, int] = {}
    for rank, depth in zip(best.shape.ranks, best.shape.depths, strict=True):
        used[depth] = max(used.get(depth, 0), rank + 1)
    full = [str(depth) for depth in range(1, best.depth + 1) if used[depth] == len(rates.at(depth))]
    if full:
        said.append(
            f"It has as many children as the recorded one at depth {', '.join(full)}: a wider trace may show a "
            f"better one."
        )
    if best.nodes == most:
        said.append(
            f"It has as many nodes as were allowed or recorded ({most}): a larger max_nodes may show a better one."
        )
    if optimized.costs is not None and optimized.costs.largest_error > 0.1:
        said.append(
            f"The costs of single trees are up to {optimized.costs.largest_error:.0%} away from the fitted ones: "
            f"measure them on an idle machine."
        )
    return said


def print_found(console: Console, optimized: Optimized, bootstrap: Bootstrap) -> None:
    """Print the rates, the sizes, and the best tree as an override."""
    for table in (rates_table(optimized, bootstrap), sizes_table(optimized)):
        console.print(terminal.render(table, terminal.Frame.NARROW))
    terminal.say(console, *remarks(optimized))
    print_advice(console, optimized)


def print_advice(console: Console, optimized: Optimized) -> None:
    """Print which tree to take, the new one as an override."""
    choice, reason = optimized.advice()
    terminal.say(console, reason)
    if choice == "new":
        shape = written_shape(optimized.best.shape)
        console.print(f"'drafter.shape={shape}'", highlight=False, markup=False, soft_wrap=True)


def write_figures(optimized: Optimized, out: Path, bootstrap: Bootstrap, about: str) -> Path:
    """Write all figures as JSON; returns the path."""
    recorded, rates = optimized.recorded, optimized.rates
    offered = recorded.offered.sum(0)
    names = ("tokens_per_round", "speedup")
    content = {
        "about": about,
        "temperature": optimized.temperature,
        "rounds": recorded.rounds,
        "prompts": len(recorded.prompts),
        "recorded_shape": json.loads(written_shape(recorded.shape)),
        "tokens_per_round_recorded": recorded.tokens,
        "rates": [
            {
                "depth": depth,
                "rank": rank,
                "rate": float(rate),
                "interval": recorded.rate_interval(depth, rank, bootstrap),
                "nodes": float(offered[depth - 1, rank]),
            }
            for depth in range(1, rates.max_depth + 1)
            for rank, rate in enumerate(rates.at(depth))
        ],
        "planned": [
            {"nodes": p.nodes, "depth": p.depth, "tokens": p.tokens, "shape": json.loads(written_shape(p.shape))}
            for p in optimized.planned
        ],
        "best": json.loads(written_shape(optimized.best.shape)),
        "old": optimized.old,
        "predicted": {
            n: dict(zip(names, optimized.predicted(tree), strict=True)) for n, tree in optimized.trees.items()
        },
        "measured": {
            name: {key.replace("tokens", "tokens_per_round"): value for key, value in asdict(each).items()}
            for name, each in optimized.measured.items()
        },
        "advice": optimized.advice()[0],
        "remarks": remarks(optimized),
    }
    path = out / f"T{optimized.temperature:g}.json"
    path.write_text(json_text(content), encoding="utf-8")
    return path


def write_found(optimized: Optimized, out: Path, about: str) -> list[Path]:
    """Write the tree as an option of ``tree=``, and the pictures; returns their paths."""
    name, shape = f"T{optimized.temperature:g}", optimized.best.shape
    tree = out / TREES / f"{name}.yaml"
    tree.parent.mkdir(parents=True, exist_ok=True)
    tree.write_text(
        "# @package drafter\n"
        f"# {about}\n"
        f"# {shape.num_nodes} nodes, {shape.max_depth} deep: {optimized.best.tokens:.2f} tokens per round predicted at "
        f"T={optimized.temperature:g}.\n"
        f"# {optimized.advice()[1].rstrip(':')}.\n"
        f"# Take it with: --config-dir {out} tree={name}\n"
        f"shape: {written_shape(shape)}\n",
        encoding="utf-8",
    )
    pictures = [tree_plot(optimized, out / f"{name}_tree.png", about)]
    return [tree, *pictures, sizes_plot(optimized, out / f"{name}_sizes.png", about)]


@style.styled()
def tree_plot(optimized: Optimized, path: Path, subtitle: str) -> Path:
    """The chosen tree: how likely each node is to be accepted, by colour, and in numbers where there is room."""
    from matplotlib.colors import Normalize

    shape = optimized.best.shape
    reached, (x, y) = optimized.rates.reached(shape), _places(shape)
    figure = style.new_figure(style.PAGE, 1.2 + 0.62 * (shape.max_depth + 1))
    axes = figure.subplots()
    numbered = shape.num_nodes <= _MOST_LABELS
    for node in range(1, shape.num_nodes + 1):
        parent, width = shape.parents[node], 0.4 + 1.8 * reached[node]
        axes.plot([x[parent], x[node]], [y[parent], y[node]], color=style.FAINT, linewidth=width, zorder=1)
        if numbered:
            text = f"{reached[node]:.2f}".removeprefix("0") if reached[node] < 0.995 else "1"
            style.note(axes, text, (x[node], y[node]), (0, -9), ha="center", va="top")
    looks: dict[str, Any] = {"c": reached, "cmap": "cividis", "norm": Normalize(0, 1), "s": 46 if numbered else 18}
    points = axes.scatter(x, y, zorder=2, edgecolors="black", linewidths=0.4, **looks)
    axes.margins(x=0.03)
    axes.set_ylim(shape.max_depth + 0.55, -0.4)
    axes.set_yticks(range(shape.max_depth + 1), ["root", *map(str, range(1, shape.max_depth + 1))])
    axes.set_ylabel("depth")
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    figure.colorbar(points, ax=axes, pad=0.01, aspect=30).set_label("accepted with all above it")
    tokens = f"{shape.num_nodes} nodes, {optimized.best.tokens:.2f} tokens per round predicted"
    about = f"{tokens}; siblings by rank from the left; {subtitle}"
    style.title(figure, f"The best tree at T = {optimized.temperature:g}", about)
    return style.save(figure, path)


def _places(shape: TreeShape) -> tuple[list[float], list[float]]:
    """Places of the nodes: every leaf beside the last one, every other node above the middle of its children."""
    x = [0.0] * (shape.num_nodes + 1)
    free = 0.0

    def place(node: int) -> None:
        nonlocal free
        children = shape.children[node]
        for child in children:
            place(child)
        if children:
            x[node] = sum(x[child] for child in children) / len(children)
        else:
            x[node] = free
            free += 1

    place(0)
    return x, [float(depth) for depth in shape.depths]


@style.styled()
def sizes_plot(optimized: Optimized, path: Path, subtitle: str) -> Path:
    """Tokens per round and tokens per second by the number of nodes, a line per depth; the chosen tree is marked."""
    from matplotlib.ticker import MaxNLocator

    costs, best = optimized.costs, optimized.best
    figure = style.new_figure(style.COLUMN if costs is None else style.PAGE, 2.9)
    panels = figure.subplots(1, 1 if costs is None else 2, squeeze=False)[0]
    figures = [lambda each: each.tokens]
    if costs is not None:
        figures.append(lambda each: costs.rows * each.tokens / costs.of(each.nodes, each.depth))
    for axes, value, text in zip(panels, figures, ("tokens per round", "tokens per second"), strict=False):
        for index, depth in enumerate(sorted({each.depth for each in optimized.planned})):
            same = [each for each in optimized.planned if each.depth == depth]
            nodes = [each.nodes for each in same]
            marks = [place for place, size in enumerate(nodes) if size in _SIZES or place == len(nodes) - 1]
            axes.plot(
                nodes, [value(each) for each in same], label=f"depth {depth}", markevery=marks, **style.looks(index)
            )
        axes.plot([best.nodes], [value(best)], label="chosen", zorder=5, **_STAR)
        axes.set(xlabel="drafted nodes", ylabel=f"predicted {text}")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.grid()
    if costs is not None:
        speed = costs.rows / costs.plain
        panels[1].axhline(speed, color="black", linewidth=0.9, linestyle="--", label="plain decoding")
    style.legend(figure, *panels[-1].get_legend_handles_labels())
    style.title(figure, f"The best tree of every size at T = {optimized.temperature:g}", subtitle)
    return style.save(figure, path)
