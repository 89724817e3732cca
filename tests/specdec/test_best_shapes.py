"""The best tree shapes, against a search that looks at every tree."""

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specdec import TreeShape
from specdec.drafting.best_shapes import AcceptanceRates, best_shapes, fastest
from specdec.drafting.costs import RoundCosts

Paths = frozenset[tuple[int, ...]]


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


def known_trees(rates: AcceptanceRates, nodes: int, depth: int) -> Iterator[TreeShape]:
    """Those of them whose nodes all have a known rate."""
    for tree in all_trees(nodes, depth):
        if all(path[-1] < len(rates.at(len(path))) for path in tree):
            yield TreeShape(tree)


def random_rates(seed: int) -> AcceptanceRates:
    """Rates of up to four depths and four ranks."""
    random = np.random.default_rng(seed)
    sizes = range(random.integers(1, 5))
    return AcceptanceRates.of([random.dirichlet(np.full(random.integers(2, 6), 0.7))[:-1].tolist() for _ in sizes])


@pytest.mark.parametrize("seed", [1, 3])
def test_no_tree_is_better(seed: int) -> None:
    """For every number of nodes and every bound on the depth, the best of all trees is among those that are planned."""
    rates = random_rates(seed)
    planned = best_shapes(rates, max_nodes=6)
    for each in planned:
        assert each.tokens == pytest.approx(rates.tokens_per_round(each.shape), rel=1e-12)
        assert all((*path[:-1], path[-1] - 1) in each.shape.paths for path in each.shape.paths if path[-1] > 0)
    for nodes, depth in itertools.product(range(1, 7), range(1, rates.max_depth + 1)):
        best = max((rates.tokens_per_round(shape) for shape in known_trees(rates, nodes, depth)), default=None)
        found = [each.tokens for each in planned if each.nodes == nodes and each.depth <= depth]
        assert (best is None and not found) or max(found) == pytest.approx(best, rel=1e-12)


def test_the_most_probable_paths_are_not_always_best() -> None:
    """A rank that is better than the one before it can be had only with that one: a greedy choice would miss it."""
    rates = AcceptanceRates.of([[0.5, 0.0, 0.4], [0.35]])
    planned = {each.nodes: each for each in best_shapes(rates, max_nodes=3)}
    assert planned[2].shape == TreeShape.chain(2)
    assert planned[3].shape == TreeShape.branching(3)


def costs_of(
    seconds: Callable[[int, int], float],
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
    depths: tuple[int, ...] = (1, 2, 4),
) -> RoundCosts:
    trees = tuple((nodes, depth) for nodes in sizes for depth in depths if nodes >= depth)
    return RoundCosts(rows=(1,), table=((0.01, *(seconds(*tree) for tree in trees)),), trees=((0, 0), *trees))


def flat_then_rising(nodes: int, depth: int) -> float:
    """A forward that costs the same up to 8 nodes, and a call of the drafter for every level."""
    return 0.01 + 0.002 * depth + 0.001 * max(nodes - 8, 0)


def test_costs_between_measured_trees() -> None:
    costs = costs_of(flat_then_rising)
    assert costs.largest_error < 1e-9
    for nodes, depth in [(3, 3), (6, 2), (12, 3), (20, 4), (64, 8)]:
        assert costs.of(nodes, depth) == pytest.approx(flat_then_rising(nodes, depth), rel=1e-6)


def test_a_larger_tree_never_costs_less() -> None:
    """However disturbed the measurements are."""
    random = np.random.default_rng(0)
    costs = costs_of(lambda nodes, depth: flat_then_rising(nodes, depth) * random.uniform(0.7, 1.5))
    assert costs.largest_error > 0.05
    for depth in range(1, 6):
        row = [costs.of(nodes, depth) for nodes in range(depth, 40)]
        assert row == sorted(row)
    assert costs.of(20, 3) >= costs.of(20, 2)


def test_the_fastest_tree() -> None:
    """Where nodes cost nothing the largest is fastest; where they cost as much as the root, the smallest."""
    planned = best_shapes(AcceptanceRates.of([[0.5, 0.2]] * 4), max_nodes=16)
    assert fastest(planned, costs_of(lambda nodes, depth: 0.01)).nodes == 16
    assert fastest(planned, costs_of(lambda nodes, depth: 0.01 * (1 + nodes))).nodes == 1
    rising = costs_of(flat_then_rising)
    found = fastest(planned, rising)
    speeds = [each.tokens / flat_then_rising(each.nodes, each.depth) for each in planned]
    assert found.tokens / flat_then_rising(found.nodes, found.depth) == pytest.approx(max(speeds), rel=1e-6)


def test_costs_are_kept_and_other_files_hold_none(tmp_path: Path) -> None:
    costs, path = costs_of(flat_then_rising), tmp_path / "costs.json"
    costs.save(path)
    assert RoundCosts.load(path) == costs
    words = '{"rows": [1], "table": [[1.0, 1.0]], "trees": [[0, 0], ["a", 1]]}'
    for content in ("", '{"rows": [1], "table": [[1.0]], "trees": [[1, 1]]}', words):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"costs\.json holds no costs of rounds"):
            RoundCosts.load(path)
