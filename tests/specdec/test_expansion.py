"""Trees of the most probable paths, against Python that keeps all; the best shapes, against a search of every tree."""

import functools
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import Batch, DraftSampling, Topology, TreeShape
from specdec.drafting.best_shapes import AcceptanceRates, best_shapes, fastest
from specdec.drafting.builders import ExpansionTree, Grown, SampledTree, TreeBuilder
from specdec.drafting.builders.expansion import BeamTree
from specdec.drafting.drawing import Drawing
from specdec.drafting.scorer import Scorer
from specdec.drafting.vocabulary import VocabularyMap
from tests.forwards import node_paths, slots_of

ROOTS = (3, 7, 3)
Path = tuple[int, ...]
Paths = frozenset[Path]


class Table(Scorer):
    """Scores every token by the token before it and by its depth, or by its depth alone."""

    def __init__(self, vocab: int, depth: int, *, per_depth: bool, missing: float = 0.0):
        self.per_depth, generator = per_depth, torch.Generator().manual_seed(vocab)
        self.logits = 3 * torch.randn(depth, vocab, vocab, generator=generator)
        self.logits[..., 1:][torch.rand(depth, vocab, vocab - 1, generator=generator) < missing] = -torch.inf

    def root_logits(self, batch: Batch) -> Tensor:
        return self.logits[0, torch.tensor(ROOTS)][:, None]

    def level_logits(self, batch: Batch, tokens: Tensor, topology: Topology, depth: int) -> Tensor:
        return self.logits[depth, tokens]

    def all_logits(self, batch: Batch, depth: int) -> Tensor:
        return self.logits[:depth, 0].expand(len(ROOTS), -1, -1)

    def likely(self, path: Path, root: int) -> list[tuple[float, int]]:
        """The tokens that may follow a path, the likeliest first."""
        row = self.logits[len(path), 0 if self.per_depth else (path or (root,))[-1]]
        return sorted(((float(log_p), token) for token, log_p in enumerate(row.log_softmax(-1))), reverse=True)


def by_hand(scorer: Table, tree: BeamTree, root: int, depth: int) -> dict[Path, int]:
    """The paths of a tree, and the number under which the scorer was shown each: -1 for those that it was not."""
    front: list[Path] = [()]
    worth: dict[Path, float] = {(): 0.0}
    shown: dict[Path, int] = {(): 0}
    for level in range(depth):
        offered = [
            (worth[path] + log_p, (*path, token))
            for path in front
            for log_p, token in scorer.likely(path, root)[: tree.children]
        ]
        worth.update({path: score for score, path in offered})
        front = [path for _, path in sorted(offered, reverse=True)[: tree.width]]
        if tree.ordered:  # of drawn nodes that are worth as much, the one that was drawn first comes first
            front = [path for _, path in offered if path in front]
        if level + 1 < depth:
            shown.update({path: len(shown) + i for i, path in enumerate(front)})
    possible = [path for path in worth if worth[path] > -torch.inf]
    best = sorted(possible, key=lambda path: tree.depth_cost * len(path) - worth[path])[: tree.max_nodes + 1]
    return {path: shown.get(path, -1) for path in best}


def grown(tree: TreeBuilder, scorer: Scorer, max_depth: list[int], vocab: int) -> Grown:
    batch = slots_of([[0, root] for root in ROOTS], vocab_size=vocab, max_depth=max_depth)
    tree.bind(batch.device)
    drawing = Drawing.of(batch, VocabularyMap(vocab, vocab), DraftSampling.DETERMINISTIC, None)
    return tree.grow(scorer, drawing, min(tree.max_depth, max(max_depth)))


def paths_of(found: Grown, row: int) -> dict[Path, int]:
    return {tuple(path[1:]): int(found.nodes[row, node]) for node, path in node_paths(found.tree, row).items()}


@pytest.mark.parametrize("per_depth", [False, True])
@pytest.mark.parametrize(
    ("tree", "max_depth"),
    [
        (ExpansionTree(59, 8, 10), [8, 8, 8]),
        (ExpansionTree(20, 4, 5), [4, 1, 2]),
        (ExpansionTree(4, 6, 1), [9, 3, 9]),
        (SampledTree(12, 4, 4), [2, 1, 4]),
        (ExpansionTree(20, 4, 3, children=9, depth_cost=0.4), [4, 1, 2]),
        (ExpansionTree(9, 4, 5, children=2), [4, 4, 3]),
    ],
)
def test_the_tree_is_that_of_the_best_paths(tree: TreeBuilder, max_depth: list[int], per_depth: bool) -> None:
    """Where rows have room for other depths, too; and the scorer's numbers are those of the nodes that it was shown."""
    scorer = Table(24, 8, per_depth=per_depth)
    found = grown(tree, scorer, max_depth, 24)
    deepest = min(tree.max_depth, max(max_depth))
    for row, root in enumerate(ROOTS):
        depth = min(tree.max_depth, max_depth[row])
        expected = by_hand(scorer, tree, root, depth)
        paths = paths_of(found, row)
        assert set(paths) == set(expected)
        # A row with room for less is shown more with the others, below its last level.
        numbers = {path: number for path, number in paths.items() if len(path) < depth or depth == deepest}
        assert numbers == {path: expected[path] for path in numbers}


def test_impossible_tokens_and_those_behind_nan_are_not_drafted() -> None:
    scorer, tree = Table(24, 3, per_depth=False, missing=0.95), ExpansionTree(40, 3, 24)
    found = grown(tree, scorer, [3, 3, 3], 24)
    for row, root in enumerate(ROOTS):
        assert set(paths_of(found, row)) == set(by_hand(scorer, tree, root, 3))
    assert not found.tree.valid.all(), "fewer paths are possible than were asked for"
    scorer = Table(24, 4, per_depth=True)
    scorer.logits[1, 0, 5] = torch.nan
    paths = paths_of(grown(ExpansionTree(12, 4, 4), scorer, [4, 4, 4], 24), 0)
    assert {len(path) for path in paths} == {0, 1}


def test_the_kernels_grow_the_same_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported for a GPU")
    for module in ("drafting.builders.expansion", "topology"):
        monkeypatch.setattr(f"specdec.{module}.usable", lambda tensor: True)
    for per_depth in (False, True):
        test_the_tree_is_that_of_the_best_paths(ExpansionTree(20, 4, 5), [4, 1, 2], per_depth)


@functools.cache
def all_trees(nodes: int, depth: int) -> frozenset[Paths]:
    """All trees of so many nodes and at most this depth, in which a rank comes with all ranks before it."""
    if nodes == 0:
        return frozenset([frozenset()])
    found: set[Paths] = set()
    for tree in all_trees(nodes - 1, depth):
        for parent in [(), *tree]:
            if len(parent) < depth:
                rank = sum(path[:-1] == parent for path in tree if path)
                found.add(tree | {(*parent, rank)})
    return frozenset(found)


def random_rates(seed: int) -> AcceptanceRates:
    random = np.random.default_rng(seed)
    sizes = range(random.integers(1, 5))
    return AcceptanceRates.of([random.dirichlet(np.full(random.integers(2, 6), 0.7))[:-1].tolist() for _ in sizes])


@pytest.mark.parametrize("rates", [random_rates(1), random_rates(3), AcceptanceRates.of([[0.5, 0.0, 0.4], [0.35]])])
def test_no_tree_is_better(rates: AcceptanceRates) -> None:
    """Every number of nodes and bound on the depth. With the last rates a greedy choice misses the best."""
    planned = best_shapes(rates, max_nodes=6)
    speeds = [each.tokens / (3 + each.nodes + 2 * each.depth) for each in planned]
    assert fastest(planned, lambda nodes, depth: 3 + nodes + 2 * depth) is planned[speeds.index(max(speeds))]
    for each in planned:
        assert each.tokens == pytest.approx(rates.tokens_per_round(each.shape), rel=1e-12)
        assert all((*path[:-1], path[-1] - 1) in each.shape.paths for path in each.shape.paths if path[-1] > 0)
    for nodes, depth in itertools.product(range(1, 7), range(1, rates.max_depth + 1)):
        known = [tree for tree in all_trees(nodes, depth) if all(path[-1] < len(rates.at(len(path))) for path in tree)]
        best = max((rates.tokens_per_round(TreeShape(tree)) for tree in known), default=None)
        found = [each.tokens for each in planned if each.nodes == nodes and each.depth <= depth]
        assert (best is None and not found) or max(found) == pytest.approx(best, rel=1e-12)
