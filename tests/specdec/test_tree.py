"""Tree shapes, topologies and draft trees, on literal tables; bounds are derived or checked, never trusted."""

import gc
from dataclasses import replace
from weakref import ref

import pytest
import torch

from specdec import DraftTree, Topology, TreeShape
from tests.shapes import shapes_unchecked

CPU = torch.device("cpu")

# 0 - 1 - 2 with a second child 3 of node 1, and a second child 4 of the root.
PARENTS = [-1, 0, 1, 1, 0]
ANCESTORS = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 0, 1]]
PAIR = torch.tensor([PARENTS, [-1, 0, 1, 2, 3]])


def tree(*parents: list[int], valid: list[list[int]] | None = None, **bounds: int) -> DraftTree:
    table = torch.tensor(parents)
    tokens = torch.arange(table.numel()).view_as(table) + 10
    return DraftTree.build(tokens, table, valid=None if valid is None else torch.tensor(valid).bool(), **bounds)


def test_shapes_are_numbered_level_by_level_however_they_are_written() -> None:
    shape = TreeShape.from_paths([(1,), (0, 1), (0,), (0, 0), (0, 1, 0)])
    assert shape.paths == ((0,), (1,), (0, 0), (0, 1), (0, 1, 0))
    assert (shape.parents, shape.depths, shape.ranks) == ((-1, 0, 0, 1, 1, 4), (0, 1, 1, 2, 2, 3), (0, 0, 1, 0, 1, 0))
    assert shape.children == ((1, 2), (3, 4), (), (), (5,), ())
    assert (shape.num_nodes, shape.max_depth, shape.max_children, shape.is_chain) == (5, 3, 2, False)
    shape = TreeShape.chain(3)
    assert shape.paths == ((0,), (0, 0), (0, 0, 0)) and shape.is_chain
    assert TreeShape.branching(3, 2).parents == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3)
    assert TreeShape.of(3) == shape and TreeShape.of(shape) is shape
    assert TreeShape.of([3, 2]) == TreeShape.branching(3, 2)
    assert TreeShape.of([[0], [1], [0, 0]]) == TreeShape.from_paths([(0,), (1,), (0, 0)])


def test_shapes_and_tensors_that_make_no_tree() -> None:
    tokens = torch.zeros(1, 2, dtype=torch.long)
    for make, named in (
        (lambda: TreeShape.from_paths([(0,), (-1,)]), r"path \(-1,\)"),
        (lambda: TreeShape.from_paths([(0,), (1, 0)]), r"path \(1, 0\) .*add the path \(1,\)"),
        (lambda: TreeShape.of([2, [0]]), r"tree shape is \[2, \[0\]\]"),
        (lambda: TreeShape.branching(*[9] * 99), "at most 4,096 nodes"),  # refused before a node is made
        (lambda: DraftTree.from_shape(TreeShape.chain(2), tokens), r"^the tokens .*\[1, 2\]: give \[batch, 3\]"),
        (lambda: DraftTree.build(tokens, torch.zeros(1, 3).long()), r"^parents .*\[1, 3\]: give \[1, 2\]"),
    ):
        with shapes_unchecked(), pytest.raises(ValueError, match=named):
            make()


def test_depth_ancestors_their_words_and_bounds_are_derived_from_parents_alone() -> None:
    batch = tree(PARENTS, [-1, 0, 0, 2, 3])
    assert batch.depth.tolist() == [[0, 1, 2, 2, 1], [0, 1, 1, 2, 3]]
    assert (batch.max_depth, batch.max_children) == (3, 2), "the deepest node and the largest family"
    assert batch.ancestors[0].int().tolist() == ANCESTORS
    other = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 1, 1]]
    assert batch.ancestors[1].int().tolist() == other
    loose = Topology.from_parents(PAIR, max_depth=99, max_children=99)
    assert (loose.max_depth, loose.max_children) == (4, 4), "cut to what is possible"
    assert loose.depth.tolist() == [[0, 1, 2, 2, 1], [0, 1, 2, 3, 4]]
    words = Topology.chain(130, CPU).ancestor_words[0]
    assert words.shape == (130, 3)
    for node in (0, 5, 62, 63, 64, 127, 128, 129):
        marks = sum((int(word) % 2**64) << (64 * i) for i, word in enumerate(words[node]))
        assert marks == 2 ** (node + 1) - 1
    packed = Topology.from_parents(torch.tensor([[-1, 0, 1, 1], [-1, 0, 0, 2]])).ancestor_words[:, :, 0]
    assert packed.tolist() == [[1, 0b11, 0b111, 0b1011], [1, 0b11, 0b101, 0b1101]]


def test_bounds_that_are_too_small_are_noticed() -> None:
    tokens = torch.zeros_like(PAIR)
    with pytest.raises(ValueError, match=r"^max_depth=3"):
        _ = DraftTree.build(tokens, PAIR, max_depth=3, max_children=2).depth
    with pytest.raises(ValueError, match=r"^max_children=1"):
        _ = DraftTree.build(tokens, PAIR, max_depth=4, max_children=1).children
    valid = torch.tensor([[True, True, True, False, False]] * 2)
    padded = DraftTree.build(tokens, PAIR, valid=valid, max_depth=2, max_children=1)
    assert (padded.depth[valid] <= 2).all(), "padding may lie beyond the bounds"
    assert padded.children[:, 0].tolist() == [[1], [1]]


def test_children_are_in_sibling_order_without_gaps() -> None:
    assert tree(PARENTS).children[0].tolist() == [[1, 4], [2, 3], [-1, -1], [-1, -1], [-1, -1]]
    padded = tree(PARENTS, max_children=4).children[0, :2].tolist()
    assert padded == [[1, 4, -1, -1], [2, 3, -1, -1]], "a looser bound only pads"
    # Without node 1 and what stands below it, node 4 is the root's first child.
    pruned = tree(PARENTS, PARENTS, valid=[[1, 0, 0, 0, 1], [1, 1, 0, 1, 1]], max_children=2)
    assert pruned.children[0].tolist() == [[4, -1], *[[-1, -1]] * 4]
    assert pruned.children[1].tolist() == [[1, 4], [3, -1], *[[-1, -1]] * 3]


@pytest.mark.parametrize(
    "shape", [TreeShape.chain(3), TreeShape.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (2, 0, 0)])]
)
def test_static_shapes_need_no_computation_and_agree_with_it(shape: TreeShape) -> None:
    tokens = torch.arange(2 * (shape.num_nodes + 1)).view(2, -1)
    static = DraftTree.from_shape(shape, tokens)
    assert static.topology.given is not None and static.is_whole
    assert static.topology is Topology.of_shape(shape, CPU), "made once"
    computed = DraftTree.build(tokens, torch.tensor([shape.parents] * 2))
    for name in ("depth", "ancestors", "children", "parents", "valid", "law"):
        assert torch.equal(getattr(static, name), getattr(computed, name)), name
    for name in ("max_depth", "max_children", "width"):
        assert getattr(static, name) == getattr(computed, name), name
    assert static.topology.in_line == shape.is_chain and not computed.topology.in_line, "nobody has looked"


def test_limited_keeps_each_rows_upper_levels() -> None:
    whole = DraftTree.from_shape(TreeShape.branching(2, 1), torch.arange(15).view(3, 5))
    assert whole.children is not None and whole.is_whole and not replace(whole, valid=whole.valid.clone()).is_whole
    limited = whole.limited(torch.tensor([0, 1, 2]))
    assert limited.valid.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert limited.children[:, 0].tolist() == [[-1, -1], [1, 2], [1, 2]]
    assert limited.children[:, 1].tolist() == [[-1, -1], [-1, -1], [3, -1]]
    assert torch.equal(limited.depth, whole.depth) and torch.equal(limited.ancestors, whole.ancestors)
    assert whole.valid.all(), "the tree itself has changed"
    assert limited.limited(torch.tensor([5, 0, 1])).valid.sum(1).tolist() == [1, 1, 3], "a node came back"


@pytest.mark.parametrize("width", [256, 257])
def test_chains_of_prompts_do_not_stay_in_memory(width: int) -> None:
    """Their marks grow with the square of the length: all lengths up to 512 have 45 MB, and up to 8192 many GB."""
    made = ref(Topology.chain(width, CPU))
    gc.collect()
    assert (made() is not None) == (width == 256)
    assert torch.equal(Topology.chain(width, CPU).ancestors[0], torch.ones(width, width).tril().bool())
