"""The report of an optimized tree: rates, the best tree of every size, the chosen one, predicted beside measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.reporting import style, terminal
from experiments.reporting.columns import NOTHING, Col, between, number, signed_percent, times
from experiments.reporting.formats import write_texts
from experiments.reporting.table import Cell, Column, Emphasis, Table, left
from experiments.results.rows import Row, ends
from experiments.results.statistics import Bootstrap, Interval
from experiments.tracing.rates import Recorded
from specdec.drafting.best_shapes import AcceptanceRates, PlannedShape
from specdec.drafting.costs import TreeCosts
from specdec.shape import TreeShape

TREES = "tree"
"""The folder of the written shapes; its name is that of the configuration group."""
_SIZES = frozenset(2**power for power in range(13))
_MOST_LABELS = 40
"""A tree with more nodes than this has no numbers beside its nodes."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTree:
    """What a tree that was run has brought: expected tokens per round given the drafts, and its speedup.

    Rounds that the output's end did not cut count, on so many prompts.
    """

    tokens: float
    tokens_interval: Interval | None
    speedup: float | None
    speedup_interval: Interval | None
    prompts: int


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """The best tree at a temperature, and the trees it was chosen among: the best of every size.

    Without ``costs`` it was chosen by its tokens alone. ``old`` is the tree it is compared with, as ``drafter.shape``
    takes it; ``measured`` has the trees that were run, by ``"old"`` and ``"new"``.
    """

    temperature: float
    recorded: Recorded
    rates: AcceptanceRates
    planned: Sequence[PlannedShape]
    costs: TreeCosts | None
    best: PlannedShape
    old: Any
    measured: Mapping[str, MeasuredTree] = field(default_factory=dict)

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

    def advice(self) -> tuple[str, str]:
        """``"new"``, ``"old"`` or ``"none"``, for the tree to take, and the reason in a sentence."""
        at, trees = f"at T={self.temperature:g}", self.trees
        tokens, speeds = ({name: self.predicted(tree)[n] for name, tree in trees.items()} for n in (0, 1))
        said, known = "predicted", {name: value for name, value in speeds.items() if value is not None}
        run = {name: each.speedup for name, each in self.measured.items() if each.speedup is not None}
        if "new" in run:
            said, known = "measured", run
        if not known:
            if None not in tokens.values() and tokens["old"] >= tokens["new"]:  # type: ignore[operator]
                more = f"the best one found has no more tokens per round ({tokens['new']:.2f})"
                return "old", f"keep the old tree {at}: {more}"
            return "new", f"best tree {at}, {self.best.nodes} nodes:"
        name, speed = max(known.items(), key=lambda each: (each[1], each[0] == "old"))
        if speed <= 1:
            return "none", f"none pays here: {at} the fastest tree is {said} at {speed:.2f}x, so decode plainly"
        if name == "old" and not self.same:
            best = f"the best one found at {known['new']:.2f}x"
            return "old", f"keep the old tree {at}: {said} at {speed:.2f}x, {best}"
        return "new", f"best tree {at}, {self.best.nodes} nodes, {said} at {speed:.2f}x:"


def written_shape(shape: TreeShape) -> str:
    """A shape as ``drafter.shape=`` takes it, in its shortest form."""
    if shape.is_chain:
        return str(shape.num_nodes)
    widths: list[set[int]] = [set() for _ in range(shape.max_depth)]
    for node, depth in enumerate(shape.depths):
        if depth < shape.max_depth:
            widths[depth].add(len(shape.children[node]))
    alike = all(len(each) == 1 for each in widths)
    value = [next(iter(each)) for each in widths] if alike else [list(path) for path in shape.paths]
    return json.dumps(value, separators=(",", ":"))


def _rates(optimized: Optimized, bootstrap: Bootstrap) -> dict[tuple[int, int], Row]:
    """The rates by depth and rank, with their intervals and on how many nodes they were measured."""
    recorded, rates = optimized.recorded, optimized.rates
    offered = recorded.offered.sum(0)
    return {
        (depth, rank): {
            "depth": depth,
            "rank": rank,
            "rate": float(rate),
            **ends("rate", recorded.rate_interval(depth, rank, bootstrap)),
            "nodes": float(offered[depth - 1, rank]),
        }
        for depth in range(1, rates.max_depth + 1)
        for rank, rate in enumerate(rates.at(depth))
    }


def rates_table(optimized: Optimized, bootstrap: Bootstrap) -> Table:
    """A row per depth, a column per rank: the rate, its interval, and how many nodes it was measured on."""
    found, rate = _rates(optimized, bootstrap), Col("", "rate", ".3f")
    note = (
        "the share of accepted nodes of the depth above whose child of this rank was accepted, drawn a little to the "
        f"rank's average; its interval at {bootstrap.confidence:.0%} over {len(optimized.recorded.prompts)} prompts; "
        f"behind / the number of such nodes"
    )

    def cell(row: Row | None) -> Cell | str:
        return NOTHING if row is None else Cell(rate.cell(row).line, (f"/ {row['nodes']:.0f}",))

    ranks = range(optimized.rates.table.shape[1])
    title = f"Acceptance rates at T={optimized.temperature:g}, by depth and sibling rank"
    table = Table([Column("depth"), *(Column(f"rank {rank}") for rank in ranks)], title, [note])
    for depth in range(1, optimized.rates.max_depth + 1):
        table.add(str(depth), *(cell(found.get((depth, rank))) for rank in ranks))
    return table


def sizes_table(optimized: Optimized) -> Table:
    """A row per size: the best tree with twice as many nodes as the row before, and the chosen one."""
    best_of: dict[int, PlannedShape] = {}  # by tokens per second, without costs by tokens
    for each in sorted(optimized.planned, key=lambda each: -each.tokens / (optimized.seconds(each) or 1.0)):
        best_of.setdefault(each.nodes, each)
    best_of[optimized.best.nodes] = optimized.best
    sizes = sorted({*_SIZES.intersection(best_of), optimized.best.nodes, max(best_of)})

    def spine(each: PlannedShape) -> str:
        widths, node = [], 0
        while each.shape.children[node]:
            widths.append(str(len(each.shape.children[node])))
            node = each.shape.children[node][0]
        return " ".join(widths)

    def milliseconds(each: PlannedShape) -> str:
        seconds = optimized.seconds(each)
        return number(None if seconds is None else 1000 * seconds)

    columns = {
        "nodes": lambda each: str(each.nodes),
        "depth": lambda each: str(each.depth),
        "tokens\nper round": lambda each: f"{each.tokens:.3f}",
        "ms\nper round": milliseconds,
        "speedup": lambda each: times(optimized.predicted(each.shape)[1]),
    }
    headings = [*map(Column, columns), left("children of the root,\nof its first child, …")]
    table = Table(headings, f"The best trees at T={optimized.temperature:g}", ["predicted; bold: chosen"])
    for each in (best_of[nodes] for nodes in sizes):
        emphasis = Emphasis.BEST if each is optimized.best else Emphasis.NONE
        table.add(*(Cell(cell(each), emphasis=emphasis) for cell in (*columns.values(), spine)))
    return table


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
    for name, found in optimized.measured.items():
        tree, (tokens, speedup) = optimized.trees[name], predicted[name]
        bounds = None if tokens is None or tree is None else optimized.recorded.tokens_interval(tree, bootstrap)
        table.add(
            name,
            *((NOTHING, NOTHING) if tree is None else (str(tree.num_nodes), str(tree.max_depth))),
            Cell(number(tokens), between(bounds)),
            Cell(number(found.tokens), between(found.tokens_interval)),
            _gain(found.tokens, tokens),
            times(speedup),
            Cell(times(found.speedup), between(found.speedup_interval)),
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
    """Sentences that a reader of the tables needs: where a bound of the trace or of the search decided the tree."""
    best, rates, shape = optimized.best, optimized.rates, optimized.best.shape
    said = []
    if not optimized.recorded.top_down:
        said.append(
            "The rule looks below a node before it decides about it, so rates depend on the tree that was recorded: "
            "take the predictions as approximate."
        )
    if best.depth == rates.max_depth:
        said.append(f"The tree is as deep as the recorded one ({best.depth}): a deeper trace may show a better one.")
    widest = {
        depth: max(r for r, d in zip(shape.ranks, shape.depths, strict=True) if d == depth) for depth in shape.depths
    }
    full = [str(depth) for depth in range(1, best.depth + 1) if widest[depth] + 1 == len(rates.at(depth))]
    if full:
        said.append(f"It has as many children as the recorded one at depth {', '.join(full)}: a wider trace may help.")
    most = max(each.nodes for each in optimized.planned)
    if best.nodes == most:
        said.append(f"It has as many nodes as were allowed or recorded ({most}): a larger max_nodes may help.")
    if optimized.costs is not None and optimized.costs.largest_error > 0.1:
        error = f"up to {optimized.costs.largest_error:.0%} away from the fitted ones"
        said.append(f"The costs of single trees are {error}: measure them on an idle machine.")
    return said


def report_found(console: Console, optimized: Optimized, out: Path, bootstrap: Bootstrap, about: str) -> None:
    """Print the rates, the sizes and the best tree, and write it as an option of ``tree=``, figures and pictures."""
    terminal.show(console, rates_table(optimized, bootstrap), sizes_table(optimized))
    terminal.say(console, *remarks(optimized))
    _print_advice(console, optimized)
    name, shape = f"T{optimized.temperature:g}", optimized.best.shape
    tree = (
        "# @package drafter\n"
        f"# {about}\n"
        f"# {shape.num_nodes} nodes, {shape.max_depth} deep: {optimized.best.tokens:.2f} tokens per round predicted at "
        f"T={optimized.temperature:g}.\n"
        f"# {optimized.advice()[1].rstrip(':')}.\n"
        f"# Take it with: --config-dir {out} tree={name}\n"
        f"shape: {written_shape(shape)}\n"
    )
    written = write_texts(out / TREES, {f"{name}.yaml": tree})
    written += [tree_plot(optimized, out / f"{name}_tree.png", about)]
    terminal.list_written(console, [*written, *_write_figures(optimized, out, bootstrap, about)])


def report_measured(console: Console, optimized: Optimized, out: Path, bootstrap: Bootstrap, about: str) -> None:
    """Print what the trees have brought, and which to take; write the figures anew."""
    terminal.show(console, measured_table(optimized, bootstrap))
    _print_advice(console, optimized)
    _write_figures(optimized, out, bootstrap, about)


def _print_advice(console: Console, optimized: Optimized) -> None:
    """Print which tree to take, the new one as an override."""
    choice, reason = optimized.advice()
    terminal.say(console, reason)
    if choice == "new":
        shape = written_shape(optimized.best.shape)
        console.print(f"'drafter.shape={shape}'", highlight=False, markup=False, soft_wrap=True)


def _write_figures(optimized: Optimized, out: Path, bootstrap: Bootstrap, about: str) -> list[Path]:
    recorded = optimized.recorded

    def listed(shape: TreeShape) -> Any:
        return json.loads(written_shape(shape))

    predicted = {name: optimized.predicted(tree) for name, tree in optimized.trees.items()}
    content = {
        "about": about,
        "temperature": optimized.temperature,
        "rounds": recorded.rounds,
        "prompts": len(recorded.prompts),
        "recorded_shape": listed(recorded.shape),
        "tokens_per_round_recorded": recorded.tokens,
        "rates": list(_rates(optimized, bootstrap).values()),
        "planned": [
            {"nodes": each.nodes, "depth": each.depth, "tokens": each.tokens, "shape": listed(each.shape)}
            for each in optimized.planned
        ],
        "best": listed(optimized.best.shape),
        "old": optimized.old,
        "predicted": {name: {"tokens_per_round": t, "speedup": s} for name, (t, s) in predicted.items()},
        "measured": {
            name: {key.replace("tokens", "tokens_per_round"): value for key, value in asdict(each).items()}
            for name, each in optimized.measured.items()
        },
        "advice": optimized.advice()[0],
        "remarks": remarks(optimized),
    }
    return write_texts(out, {f"T{optimized.temperature:g}.json": content})


@style.styled()
def tree_plot(optimized: Optimized, path: Path, subtitle: str) -> Path:
    """The chosen tree: how likely each node is to be accepted, by colour, and in numbers where there is room."""
    from matplotlib.colors import Normalize

    shape = optimized.best.shape
    reached, x = optimized.rates.reached(shape), _places(shape)
    figure = style.new_figure(style.PAGE, 1.2 + 0.62 * (shape.max_depth + 1))
    axes = figure.subplots()
    numbered = shape.num_nodes <= _MOST_LABELS
    for node in range(1, shape.num_nodes + 1):
        parent, depth, width = shape.parents[node], shape.depths[node], 0.4 + 1.8 * reached[node]
        axes.plot([x[parent], x[node]], [depth - 1, depth], color=style.FAINT, linewidth=width, zorder=1)
        if numbered:
            text = f"{reached[node]:.2f}".removeprefix("0") if reached[node] < 0.995 else "1"
            style.note(axes, text, (x[node], depth), (0, -9), ha="center", va="top")
    looks: dict[str, Any] = {"c": reached, "cmap": "cividis", "norm": Normalize(0, 1), "s": 46 if numbered else 18}
    points = axes.scatter(x, list(shape.depths), zorder=2, edgecolors="black", linewidths=0.4, **looks)
    axes.margins(x=0.03)
    axes.set(ylim=(shape.max_depth + 0.55, -0.4), ylabel="depth", xticks=[])
    axes.set_yticks(range(shape.max_depth + 1), ["root", *map(str, range(1, shape.max_depth + 1))])
    axes.spines["bottom"].set_visible(False)
    axes.grid(visible=False)
    figure.colorbar(points, ax=axes, pad=0.01, aspect=30).set_label("accepted with all above it")
    tokens = f"{shape.num_nodes} nodes, {optimized.best.tokens:.2f} tokens per round predicted"
    about = f"{tokens}; siblings by rank from the left; {subtitle}"
    return style.finish(figure, path, f"The best tree at T = {optimized.temperature:g}", about)


def _places(shape: TreeShape) -> list[float]:
    """Every leaf beside the last one, every other node above the middle of its children."""
    x = [0.0] * (shape.num_nodes + 1)
    free = iter(range(len(x)))

    def place(node: int) -> None:
        children = shape.children[node]
        for child in children:
            place(child)
        x[node] = sum(x[child] for child in children) / len(children) if children else float(next(free))

    place(0)
    return x
