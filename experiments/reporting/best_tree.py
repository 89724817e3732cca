"""The report of an optimized tree: rates, what every size brings, the best one, predicted beside measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.reporting import terminal
from experiments.reporting.best_tree_plot import sizes_plot, tree_plot
from experiments.reporting.cells import NOTHING, number, times, with_interval
from experiments.reporting.table import Cell, Column, Emphasis, Table
from experiments.results.plain_json import json_text
from experiments.results.statistics import Bootstrap, Interval
from experiments.tracing.rates import Recorded
from specdec.drafting.acceptance_rates import AcceptanceRates
from specdec.drafting.best_shapes import PlannedShape
from specdec.drafting.tree_costs import TreeCosts
from specdec.shape import TreeShape

TREES = "tree"
"""The folder of the written shapes; its name is that of the configuration group."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a tree brought.

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
    """The best tree at a temperature, and what it was chosen among.

    Attributes:
        temperature: The requests'.
        recorded: What the trace says.
        rates: The acceptance rates.
        planned: The best tree of every size.
        costs: How long rounds take; None where the tree was chosen by its tokens alone.
        best: The chosen tree.
        old: What it is compared with, as ``drafter.shape`` takes it.
        measured: What the old and the new tree brought, by ``"old"`` and ``"new"``; empty where nothing was run.
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

    def speedups(self) -> tuple[str, dict[str, float]]:
        """Returns ``"measured"`` or ``"predicted"``, and these speedups of the old and the new tree if known."""
        measured = {name: each.speedup for name, each in self.measured.items() if each.speedup is not None}
        if "new" in measured:
            return "measured", measured
        trees = {"old": self.old_tree, "new": self.best.shape}
        predicted = {name: self.predicted(tree)[1] for name, tree in trees.items()}
        return "predicted", {name: value for name, value in predicted.items() if value is not None}

    def advice(self) -> tuple[str, str]:
        """Returns ``"new"``, ``"old"`` or ``"none"``, for the tree to take, and the reason in a sentence."""
        (said, speedups), at = self.speedups(), f"at T={self.temperature:g}"
        if not speedups:
            tokens = {
                name: self.predicted(tree)[0] for name, tree in (("old", self.old_tree), ("new", self.best.shape))
            }
            old, new = tokens["old"], tokens["new"]
            if old is not None and new is not None and old >= new:
                return "old", f"keep the old tree {at}: the best one found has no more tokens per round ({new:.2f})"
            return "new", f"best tree {at}, {self.best.nodes} nodes:"
        name, speed = max(speedups.items(), key=lambda each: (each[1], each[0] == "old"))
        if speed <= 1:
            return "none", f"none pays here: {at} the fastest tree is {said} at {speed:.2f}x, so decode plainly"
        if name == "old" and not self.same:
            return (
                "old",
                f"keep the old tree {at}: {said} at {speed:.2f}x, the best one found at {speedups['new']:.2f}x",
            )
        return "new", f"best tree {at}, {self.best.nodes} nodes, {said} at {speed:.2f}x:"

    def predicted(self, shape: TreeShape | None) -> tuple[float | None, float | None]:
        """Tokens per round and speedup of a tree; None for what is not known."""
        try:
            tokens = None if shape is None else self.rates.tokens_per_round(shape)
        except ValueError:
            tokens = None
        if tokens is None or shape is None or self.costs is None:
            return tokens, None
        return tokens, tokens * self.costs.plain / self.costs.of(shape.num_nodes, shape.max_depth)


def written_shape(shape: TreeShape) -> str:
    """A shape as ``drafter.shape=`` takes it, in its shortest form."""
    if shape.is_chain:
        return str(shape.num_nodes)
    widths = [
        {len(shape.children[node]) for node, depth in enumerate(shape.depths) if depth == level}
        for level in range(shape.max_depth)
    ]
    if all(len(each) == 1 for each in widths):
        return _brackets([next(iter(each)) for each in widths])
    return _brackets([list(path) for path in shape.paths])


def _brackets(value: Sequence[Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def rates_table(optimized: Optimized, bootstrap: Bootstrap) -> Table:
    """A row per depth, a column per rank: the rate, its interval, and how many nodes it was measured on."""
    recorded = optimized.recorded
    ranks = optimized.rates.table.shape[1]
    notes = [
        "the share of accepted nodes of the depth above whose child of this rank was accepted, drawn a little to the "
        f"rank's average; its interval at {bootstrap.confidence:.0%} over {len(recorded.prompts)} prompts; behind / "
        "the number of such nodes",
    ]
    title = f"Acceptance rates at T={optimized.temperature:g}, by depth and sibling rank"
    table = Table([Column("depth"), *(Column(f"rank {rank}") for rank in range(ranks))], title, notes)
    offered = recorded.offered.sum(0)
    for depth in range(1, optimized.rates.max_depth + 1):
        cells: list[Cell | str] = []
        for rank in range(ranks):
            if rank >= len(optimized.rates.at(depth)):
                cells.append(NOTHING)
                continue
            bounds = recorded.rate_interval(depth, rank, bootstrap)
            more = "" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f} "
            value = f"{optimized.rates.at(depth)[rank]:.3f}"
            cells.append(Cell(value, (f"{more}/ {offered[depth - 1, rank]:.0f}",)))
        table.add(str(depth), *cells)
    return table


def sizes_table(optimized: Optimized) -> Table:
    """A row per size: the best tree with twice as many nodes as the row before, and the chosen one."""
    title = f"The best trees at T={optimized.temperature:g}"
    columns = [
        Column("nodes"),
        Column("depth"),
        Column("tokens\nper round"),
        Column("ms\nper round"),
        Column("speedup"),
    ]
    columns += [Column("children of the root,\nof its first child, …", "left")]
    notes = ["predicted; bold: chosen"]
    table = Table(columns, title, notes)
    best_of = best_by_nodes(optimized)
    sizes = {size for size in (2**power for power in range(13)) if size in best_of} | {optimized.best.nodes}
    for nodes in sorted(sizes | {max(best_of)}):
        each = optimized.best if nodes == optimized.best.nodes else best_of[nodes]
        _, speedup = optimized.predicted(each.shape)
        seconds = None if optimized.costs is None else 1000 * optimized.costs.of(each.nodes, each.depth)
        spine = [len(each.shape.children[0])]
        node = 0
        while each.shape.children[node]:
            node = each.shape.children[node][0]
            spine.append(len(each.shape.children[node]))
        cells = [str(nodes), str(each.depth), f"{each.tokens:.3f}", number(seconds), times(speedup)]
        cells.append(" ".join(map(str, spine[:-1])))
        chosen = each is optimized.best
        table.add(*(Cell(text, emphasis=Emphasis.BEST if chosen else Emphasis.NONE) for text in cells))
    return table


def best_by_nodes(optimized: Optimized) -> dict[int, PlannedShape]:
    """The best tree of every number of nodes: by tokens per second, without costs by tokens."""
    found: dict[int, tuple[float, PlannedShape]] = {}
    for each in optimized.planned:
        seconds = 1.0 if optimized.costs is None else optimized.costs.of(each.nodes, each.depth)
        value = each.tokens / seconds
        if each.nodes not in found or value > found[each.nodes][0]:
            found[each.nodes] = value, each
    return {nodes: each for nodes, (_, each) in found.items()}


def measured_table(optimized: Optimized, bootstrap: Bootstrap) -> Table:
    """The old and the new tree, and how one compares with the other: predicted and measured."""
    columns = [
        Column("tree", "left"),
        Column("nodes"),
        Column("depth"),
        Column("tokens per round\npredicted"),
        Column("\nmeasured"),
        Column("\ndifference"),
        Column("speedup\npredicted"),
        Column("\nmeasured"),
    ]
    few = min(each.prompts for each in optimized.measured.values())
    many = len(optimized.recorded.prompts)
    notes = [
        f"measured on {few} prompts, predicted from {many}" if few != many else f"{many} prompts",
        f"tokens per round: in rounds that the end of the output did not cut; intervals at {bootstrap.confidence:.0%} "
        f"over prompts; predicted speedups count rounds alone, measured ones the prompts' prefill, too",
    ]
    table = Table(columns, f"Predicted and measured at T={optimized.temperature:g}", notes)
    trees = {"old": optimized.old_tree, "new": optimized.best.shape}
    predicted = {name: optimized.predicted(tree) for name, tree in trees.items()}
    for name, measured in optimized.measured.items():
        tree, (tokens, speedup) = trees[name], predicted[name]
        bounds = None
        if tokens is not None and tree is not None:
            bounds = optimized.recorded.tokens_interval(tree, bootstrap)
        table.add(
            name,
            NOTHING if tree is None else str(tree.num_nodes),
            NOTHING if tree is None else str(tree.max_depth),
            with_interval(number(tokens), bounds),
            with_interval(number(measured.tokens), measured.tokens_interval),
            NOTHING if tokens is None else f"{measured.tokens / tokens - 1:+.1%}",
            times(speedup),
            with_interval(times(measured.speedup), measured.speedup_interval),
        )
    if "old" in optimized.measured:
        old, new = optimized.measured["old"], optimized.measured["new"]
        gains = [_gain(predicted["new"][index], predicted["old"][index]) for index in (0, 1)]
        table.add(
            Cell("gain", emphasis=Emphasis.BEST),
            "",
            "",
            gains[0],
            _gain(new.tokens, old.tokens),
            "",
            gains[1],
            _gain(new.speedup, old.speedup),
        )
    return table


def _gain(new: float | None, old: float | None) -> str:
    return NOTHING if new is None or not old else f"{new / old - 1:+.1%}"


def remarks(optimized: Optimized) -> list[str]:
    """What a reader has to know besides."""
    best, recorded = optimized.best, optimized.recorded
    said = []
    if not recorded.top_down:
        said.append(
            "The rule looks below a node before it decides about it, so rates depend on the tree that was recorded: "
            "take the predictions as approximate."
        )
    most = max(optimized.planned, key=lambda each: each.nodes).nodes
    if best.depth == optimized.rates.max_depth:
        said.append(f"The tree is as deep as the recorded one ({best.depth}): a deeper trace may show a better one.")
    widest = [len(optimized.rates.at(depth)) for depth in range(1, optimized.rates.max_depth + 1)]
    used = [
        max(r for r, d in zip(best.shape.ranks, best.shape.depths, strict=True) if d == depth) + 1
        for depth in range(1, best.depth + 1)
    ]
    full = [str(depth) for depth, (have, use) in enumerate(zip(widest, used, strict=False), start=1) if have == use]
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
    path = out / f"T{optimized.temperature:g}.json"
    path.write_text(json_text(_plain(optimized, bootstrap, about)), encoding="utf-8")
    return path


def write_found(optimized: Optimized, out: Path, about: str) -> list[Path]:
    """Write the tree as an option of ``tree=``, and the pictures; returns their paths."""
    name = f"T{optimized.temperature:g}"
    tree = out / TREES / f"{name}.yaml"
    tree.parent.mkdir(parents=True, exist_ok=True)
    shape = optimized.best.shape
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
    return [
        tree,
        tree_plot(optimized, out / f"{name}_tree.png", about),
        sizes_plot(optimized, out / f"{name}_sizes.png", about),
    ]


def _plain(optimized: Optimized, bootstrap: Bootstrap, about: str) -> dict[str, Any]:
    recorded, rates = optimized.recorded, optimized.rates
    offered = recorded.offered.sum(0)
    return {
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
            {
                "nodes": each.nodes,
                "depth": each.depth,
                "tokens": each.tokens,
                "shape": json.loads(written_shape(each.shape)),
            }
            for each in optimized.planned
        ],
        "advice": optimized.advice()[0],
        "best": json.loads(written_shape(optimized.best.shape)),
        "old": optimized.old,
        "predicted": {
            name: dict(zip(("tokens_per_round", "speedup"), optimized.predicted(tree), strict=True))
            for name, tree in (("old", optimized.old_tree), ("new", optimized.best.shape))
        },
        "measured": {
            name: {
                "tokens_per_round": each.tokens,
                "tokens_per_round_interval": each.tokens_interval,
                "prompts": each.prompts,
                "speedup": each.speedup,
                "speedup_interval": each.speedup_interval,
            }
            for name, each in optimized.measured.items()
        },
        "remarks": remarks(optimized),
    }
