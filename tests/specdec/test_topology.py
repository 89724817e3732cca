"""Topologies: what is derived from parents, and bounds that are derived or checked, never trusted."""

import pytest
import torch

from specdec.shape import TreeShape
from specdec.topology import Topology
from specdec.tree import DraftTree

CPU = torch.device("cpu")
PARENTS = torch.tensor([[-1, 0, 1, 1, 0], [-1, 0, 1, 2, 3]])


def test_bounds_are_derived_from_parents() -> None:
    topology = Topology.from_parents(PARENTS)
    assert (topology.width, topology.max_depth, topology.max_children) == (5, 4, 2)
    assert topology.depth.tolist() == [[0, 1, 2, 2, 1], [0, 1, 2, 3, 4]]
    assert not topology.in_line, "nobody has looked"
    alone = Topology.from_parents(torch.tensor([[-1]]))
    assert (alone.width, alone.max_depth, alone.max_children) == (1, 0, 0)


def test_a_shape_and_its_parents_agree() -> None:
    for shape in (TreeShape.chain(3), TreeShape.branching(3, 2), TreeShape.from_paths([(0,), (1,), (1, 0), (1, 0, 0)])):
        static = Topology.of_shape(shape, CPU)
        computed = Topology.from_parents(torch.tensor([shape.parents]))
        assert (static.max_depth, static.max_children) == (computed.max_depth, computed.max_children)
        assert torch.equal(static.depth, computed.depth) and torch.equal(static.ancestors, computed.ancestors)
        assert static.in_line == shape.is_chain
        assert Topology.of_shape(shape, CPU) is static, "made once"


def test_a_long_chain_costs_no_loop() -> None:
    chain = Topology.chain(700, CPU)
    assert (chain.width, chain.max_depth, chain.max_children, chain.in_line) == (700, 699, 1, True)
    assert chain.depth[0, -1] == 699 and chain.ancestors[0].sum() == 700 * 701 // 2
    assert chain.parents[0, :3].tolist() == [-1, 0, 1]


def test_ancestors_are_packed_into_words() -> None:
    """The highest bit of a word is the sign of its number."""
    chain = Topology.chain(130, torch.device("cpu"))
    words = chain.ancestor_words[0]
    assert words.shape == (130, 3)
    for node in (0, 5, 62, 63, 64, 127, 128, 129):
        marks = sum((int(word) % 2**64) << (64 * i) for i, word in enumerate(words[node]))
        assert marks == 2 ** (node + 1) - 1
    tree = Topology.from_parents(torch.tensor([[-1, 0, 1, 1], [-1, 0, 0, 2]]))
    assert tree.ancestor_words[:, :, 0].tolist() == [[1, 0b11, 0b111, 0b1011], [1, 0b11, 0b101, 0b1101]]


def test_the_first_nodes_alone() -> None:
    topology = Topology.from_parents(PARENTS)
    part = topology.first(3)
    assert part.parents.tolist() == [[-1, 0, 1], [-1, 0, 1]]
    assert part.depth.tolist() == [[0, 1, 2]] * 2
    assert torch.equal(part.ancestors, topology.ancestors[:, :3, :3])
    assert topology.first(5) is topology


def test_a_depth_that_is_too_small_is_noticed() -> None:
    tree = DraftTree.build(torch.zeros_like(PARENTS), PARENTS, max_depth=3, max_children=2)
    with pytest.raises(ValueError, match="max_depth=3: a drafted node is deeper"):
        _ = tree.depth


def test_too_few_children_are_noticed() -> None:
    tree = DraftTree.build(torch.zeros_like(PARENTS), PARENTS, max_depth=4, max_children=1)
    with pytest.raises(ValueError, match="max_children=1: a drafted node has more children"):
        _ = tree.children


def test_padding_may_lie_beyond_the_bounds() -> None:
    valid = torch.tensor([[True, True, True, False, False], [True, True, True, False, False]])
    tree = DraftTree.build(torch.zeros_like(PARENTS), PARENTS, valid=valid, max_depth=2, max_children=1)
    assert (tree.depth[valid] <= 2).all()
    assert tree.children[:, 0].tolist() == [[1], [1]]


def test_loose_bounds_are_cut_to_what_is_possible() -> None:
    topology = Topology.from_parents(PARENTS, max_depth=99, max_children=99)
    assert (topology.max_depth, topology.max_children) == (4, 4)
    assert topology.depth.tolist() == [[0, 1, 2, 2, 1], [0, 1, 2, 3, 4]]
