"""Which nodes tree builders choose, against a search that looks at every path; and what they tell the scorer."""

import itertools
import math
from collections.abc import Hashable

import pytest
import torch
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.builders import ExpansionTree, Grown, SampledTree, TreeBuilder
from specdec.drafting.drawing import Drawing
from specdec.drafting.scorer import Scorer
from specdec.drafting.vocabulary import VocabularyMap
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import DraftSampling
from tests.forwards import slots_of

VOCAB, DEPTH = 5, 3
ROOTS = [[1, 2], [3, 4]]


class Table(Scorer):
    """Logits by path: those after tokens ``(a, b)`` are a fixed random row. It notes the path of every shown node."""

    def __init__(self, *, per_depth: bool = False, missing: float = 0.0, seed: int = 0):
        self.per_depth, self.missing = per_depth, missing
        self._seed = seed
        self.paths: list[list[tuple[int, ...]]] = []

    def law(self, row: int, path: tuple[int, ...]) -> Tensor:
        """Log-probabilities after a path."""
        where = (row, len(path)) if self.per_depth else (row, *path)
        generator = torch.Generator().manual_seed(hash((self._seed, where)) % 2**31)
        logits = 2 * torch.randn(VOCAB, generator=generator)
        logits[torch.rand(VOCAB, generator=generator) < self.missing] = -torch.inf
        return logits.log_softmax(-1)

    def root_logits(self, batch: Batch) -> Tensor:
        self.paths = [[()] for _ in range(len(batch))]
        return torch.stack([self.law(row, ()) for row in range(len(batch))])[:, None]

    def level_logits(self, batch: Batch, tokens: Tensor, topology: Topology, depth: int) -> Tensor:
        parents = topology.parents.expand(len(batch), -1)[:, -tokens.shape[1] :]
        rows = []
        for row, (given, above) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            new = [(*self.paths[row][parent], token) for token, parent in zip(given, above, strict=True)]
            assert {len(path) for path in new} == {depth}
            self.paths[row] += new
            rows.append(torch.stack([self.law(row, path) for path in new]))
        return torch.stack(rows)[:, :1] if self.per_depth else torch.stack(rows)

    def all_logits(self, batch: Batch, depth: int) -> Tensor:
        self.paths = [[()] for _ in range(len(batch))]
        return torch.stack([torch.stack([self.law(row, (0,) * d) for d in range(depth)]) for row in range(len(batch))])

    @property
    def version(self) -> Hashable:
        return 0


def grown(builder: TreeBuilder, scorer: Scorer, depth: int = DEPTH, *, max_depth: int | list[int] = 100) -> Grown:
    slots = slots_of(ROOTS, vocab_size=VOCAB, max_depth=max_depth)
    builder.bind(slots.device)
    drawing = Drawing.of(slots, VocabularyMap(VOCAB, VOCAB), DraftSampling.DETERMINISTIC, None)
    return builder.grow(scorer, drawing, depth)


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The tokens from the root's child to every valid node, in node order; () stands for the root."""
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(tree.parents[row].tolist()):
        paths.append(() if parent < 0 else (*paths[parent], int(tree.tokens[row, node])))
    return [path for path, valid in zip(paths, tree.valid[row].tolist(), strict=True) if valid]


def best_paths(scorer: Table, row: int, count: int) -> set[tuple[int, ...]]:
    """The most probable paths of all that there are."""
    every = [path for depth in range(1, DEPTH + 1) for path in itertools.product(range(VOCAB), repeat=depth)]
    score = {p: sum(float(scorer.law(row, p[:i])[p[i]]) for i in range(len(p))) for p in every}
    possible = [path for path in every if score[path] > -math.inf]
    return set(sorted(possible, key=lambda path: -score[path])[:count])


@pytest.mark.parametrize("per_depth", [False, True])
@pytest.mark.parametrize("count", [1, 4, 30])
def test_expansion_keeps_the_most_probable_paths(count: int, per_depth: bool) -> None:
    """Every level expands as many nodes as it has tokens, or as the tree has nodes: nothing better is passed over."""
    for seed in range(3):
        scorer = Table(per_depth=per_depth, seed=seed)
        tree = grown(ExpansionTree(count, DEPTH, width=max(count, VOCAB)), scorer).tree
        for row in range(2):
            assert set(paths_of(tree, row)) - {()} == best_paths(scorer, row, count)


def test_narrow_expansion_goes_on_from_the_best_of_every_level() -> None:
    scorer = Table()
    result = grown(ExpansionTree(6, DEPTH, width=2), scorer)
    for row in range(2):
        level = [()]
        offered: dict[tuple[int, ...], float] = {}
        scores: dict[tuple[int, ...], float] = {(): 0.0}
        for _ in range(DEPTH):
            children = {}
            for path in level:
                values, tokens = scorer.law(row, path).topk(2)
                for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
                    children[*path, token] = scores[path] + value
            offered |= children
            scores |= children
            level = sorted(children, key=lambda path: -children[path])[:2]
        wanted = set(sorted(offered, key=lambda path: -offered[path])[:6])
        assert set(paths_of(result.tree, row)) - {()} == wanted


@pytest.mark.parametrize("kind", [ExpansionTree, SampledTree])
@pytest.mark.parametrize("room", [1, 2])
def test_nodes_too_deep_for_a_row_take_no_other_nodes_place(
    room: int, kind: type[ExpansionTree] | type[SampledTree]
) -> None:
    """A row near its end has the same tree beside a longer row as alone, where no level is grown beyond its room."""
    builder = kind(5, DEPTH, width=5)
    together = grown(builder, Table(), max_depth=[room, DEPTH]).tree
    alone = grown(builder, Table(), room, max_depth=room).tree
    assert paths_of(together, 0) == paths_of(alone, 0)
    assert set(paths_of(together, 1)) - {()} == best_paths(Table(), 1, 5)


def test_impossible_tokens_are_not_drafted() -> None:
    scorer = Table(missing=0.7, seed=3)
    tree = grown(ExpansionTree(30, DEPTH, width=30), scorer).tree
    for row in range(2):
        assert set(paths_of(tree, row)) - {()} == best_paths(scorer, row, 30)
    assert (tree.parents[:, 1:] < torch.arange(1, tree.width)).all(), "parents stand before their children"
    assert not tree.valid.all(), "fewer paths are possible than were asked for"
