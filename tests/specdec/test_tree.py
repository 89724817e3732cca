"""Tree shapes and draft trees, on literal tables."""

import pytest
import torch

from specdec.tree import DraftTree, TreeShape, along_path
from specdec.types import DraftSampling
from tests.shapes import shapes_unchecked

# 0 - 1 - 2 with a second child 3 of node 1, and a second child 4 of the root.
PARENTS = [-1, 0, 1, 1, 0]
ANCESTORS = [
    [1, 0, 0, 0, 0],
    [1, 1, 0, 0, 0],
    [1, 1, 1, 0, 0],
    [1, 1, 0, 1, 0],
    [1, 0, 0, 0, 1],
]


def tree(
    *parents: list[int],
    valid: list[list[int]] | None = None,
    max_depth: int | None = None,
    max_children: int | None = None,
) -> DraftTree:
    table = torch.tensor(parents)
    return DraftTree.build(
        torch.arange(table.numel()).view_as(table) + 10,
        table,
        valid=None if valid is None else torch.tensor(valid).bool(),
        max_depth=max_depth,
        max_children=max_children,
    )


def test_shapes_are_numbered_level_by_level() -> None:
    shape = TreeShape.from_paths([(1,), (0, 1), (0,), (0, 0), (0, 1, 0)])
    assert shape.paths == ((0,), (1,), (0, 0), (0, 1), (0, 1, 0))
    assert shape.parents == (-1, 0, 0, 1, 1, 4)
    assert shape.depths == (0, 1, 1, 2, 2, 3)
    assert shape.ranks == (0, 0, 1, 0, 1, 0)
    assert shape.children == ((1, 2), (3, 4), (), (), (5,), ())
    assert (shape.num_nodes, shape.max_depth, shape.max_children, shape.is_chain) == (5, 3, 2, False)


def test_chains() -> None:
    shape = TreeShape.chain(3)
    assert shape.paths == ((0,), (0, 0), (0, 0, 0))
    assert shape.parents == (-1, 0, 1, 2)
    assert (shape.num_nodes, shape.max_depth, shape.max_children, shape.is_chain) == (3, 3, 1, True)
    assert repr(shape) == "TreeShape.chain(3)"


def test_branching() -> None:
    shape = TreeShape.branching(3, 2)
    assert shape.num_nodes == 3 + 6
    assert shape.parents == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3)
    assert TreeShape.branching(1, 1) == TreeShape.chain(2)
    assert not TreeShape.branching(2).is_chain


def test_equal_shapes_are_equal() -> None:
    one, other = TreeShape.branching(2, 1), TreeShape.from_paths([(1, 0), (1,), (0, 0), (0,), (0,)])
    assert one == other and hash(one) == hash(other)
    assert one != TreeShape.branching(2) and one != "shape"
    assert eval(repr(one)) == one


def test_shapes_as_a_configuration_writes_them() -> None:
    assert TreeShape.of(3) == TreeShape.chain(3)
    assert TreeShape.of([3, 2]) == TreeShape.branching(3, 2)
    assert TreeShape.of([[0], [1], [0, 0]]) == TreeShape.from_paths([(0,), (1,), (0, 0)])
    shape = TreeShape.chain(2)
    assert TreeShape.of(shape) is shape


def test_cut_shapes() -> None:
    shape = TreeShape.from_paths([(0,), (1,), (0, 0), (0, 0, 0)])
    assert shape.cut(2) == TreeShape.from_paths([(0,), (1,), (0, 0)])
    assert shape.cut(3) is shape and shape.cut(9) is shape


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TreeShape.chain(0), "a chain of 0 drafted tokens: the length must be at least 1"),
        (lambda: TreeShape.branching(), r"branching factors \(\): give at least one"),
        (lambda: TreeShape.branching(2, 0), r"branching factors \(2, 0\)"),
        (lambda: TreeShape.from_paths([]), "needs at least one path"),
        (lambda: TreeShape.from_paths([()]), r"path \(\) in a tree shape"),
        (lambda: TreeShape.from_paths([(0,), (-1,)]), r"path \(-1,\) in a tree shape: ranks start at 0"),
        (lambda: TreeShape.from_paths([(0,), (1, 0)]), r"path \(1, 0\) .* has no parent: add the path \(1,\)"),
        (lambda: TreeShape.of([]), r"tree shape is \[\]: give a length"),
        (lambda: TreeShape.of([2, [0]]), r"tree shape is \[2, \[0\]\]: give a length such as 4"),
        (lambda: TreeShape.branching(64, 64, 64), r"\[64, 64, 64\] make a tree of 266,304 nodes, .* at most 4,096"),
        (lambda: TreeShape.branching(*[9] * 99), "at most 4,096 nodes"),  # refused before a node is made
        (lambda: TreeShape.chain(5000), "a chain of 5,000 drafted tokens, and a tree may have at most 4,096 nodes"),
        (lambda: TreeShape.of([[rank] for rank in range(5000)]), "of 5,000 paths, and a tree may have at most 4,096"),
    ],
)  # fmt: skip
def test_errors(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DraftTree.from_shape(4, torch.zeros(1, 5, dtype=torch.long)), "shape is an int: give a TreeShape; "),
        (lambda: DraftTree.from_shape(TreeShape.chain(2), torch.zeros(1, 2, dtype=torch.long)),
         r"the tokens of a draft tree have shape \[1, 2\]: give \[batch, 3\], the root and 2 nodes"),
        (lambda: DraftTree.from_shape(TreeShape.chain(2), torch.zeros(3, dtype=torch.long)), r"shape \[3\]: give"),
        (lambda: DraftTree.from_shape(TreeShape.chain(1), torch.zeros(1, 2, dtype=torch.long),
                                      draft_probs=torch.ones(1, 1, 8)),
         r"draft_probs of a draft tree has shape \[1, 1, 8\]: give \[1, 2, vocab\]"),
        (lambda: DraftTree.from_shape(TreeShape.chain(1), torch.zeros(1, 2, dtype=torch.long),
                                      valid=torch.ones(2, dtype=torch.bool)),
         r"valid of a draft tree has shape \[2\]: give \[1, 2\], as tokens has"),
        (lambda: DraftTree.build(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)),
         r"parents of a draft tree has shape \[1, 3\]: give \[1, 2\]"),
    ],
)  # fmt: skip
def test_tensors_that_make_no_tree(make, message: str) -> None:
    with shapes_unchecked(), pytest.raises(ValueError, match=message):
        make()


def test_depth_and_ancestors() -> None:
    batch = tree(PARENTS, [-1, 0, 0, 2, 3])
    assert batch.depth.tolist() == [[0, 1, 2, 2, 1], [0, 1, 1, 2, 3]]
    assert batch.ancestors[0].int().tolist() == ANCESTORS
    assert batch.ancestors[1].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 1, 1, 1],
    ]
    tight = tree(PARENTS, max_depth=2, max_children=2)
    assert torch.equal(tight.depth[0], batch.depth[0]) and torch.equal(tight.ancestors[0], batch.ancestors[0])


def test_the_docstrings_example_of_ancestors() -> None:
    assert tree([-1, 0, 1, 1]).ancestors[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]


def test_children_are_in_sibling_order_without_gaps() -> None:
    assert tree(PARENTS, max_children=2).children[0].tolist() == [[1, 4], [2, 3], [-1, -1], [-1, -1], [-1, -1]]
    # A looser bound only pads.
    assert tree(PARENTS, max_children=4).children[0].tolist()[:2] == [[1, 4, -1, -1], [2, 3, -1, -1]]
    assert tree(PARENTS).children[0].tolist()[:2] == [[1, 4], [2, 3]], "it is derived where it is not given"
    # Without node 1 and what stands below it, node 4 is the root's first child.
    pruned = tree(PARENTS, PARENTS, valid=[[1, 0, 0, 0, 1], [1, 1, 0, 1, 1]], max_children=2)
    assert pruned.children[0].tolist() == [[4, -1], *[[-1, -1]] * 4]
    assert pruned.children[1].tolist() == [[1, 4], [3, -1], *[[-1, -1]] * 3]


def test_padding_is_nobodys_child() -> None:
    padded = tree([-1, 0, 0, 0], [-1, 0, -1, -1], valid=[[1, 1, 0, 0], [1, 1, 0, 0]], max_children=1)
    assert padded.children.tolist() == [[[1], [-1], [-1], [-1]]] * 2


def test_static_shapes_need_no_computation_and_agree_with_it() -> None:
    shape = TreeShape.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (2, 0, 0)])
    tokens = torch.arange(16).view(2, 8)
    static = DraftTree.from_shape(shape, tokens)
    computed = DraftTree.build(
        tokens, torch.tensor([shape.parents] * 2), max_depth=shape.max_depth, max_children=shape.max_children
    )
    assert {"depth", "ancestors"} <= vars(static.topology).keys() and "children" in vars(static)
    for name in ("depth", "ancestors", "children", "parents", "valid", "law"):
        assert torch.equal(getattr(static, name), getattr(computed, name)), name
    assert (static.max_depth, static.max_children, static.width) == (3, 3, 8)


def test_static_shapes_with_invalid_nodes() -> None:
    valid = torch.tensor([[True, False, True]])
    ragged = DraftTree.from_shape(TreeShape.branching(2), torch.tensor([[5, 6, 7]]), valid=valid)
    assert ragged.children.tolist() == [[[2, -1], [-1, -1], [-1, -1]]]


def test_limited_keeps_each_rows_upper_levels() -> None:
    whole = DraftTree.from_shape(TreeShape.branching(2, 1), torch.arange(15).view(3, 5))
    assert whole.children is not None  # computed before, and not to be taken over
    limited = whole.limited(torch.tensor([0, 1, 2]))
    assert limited.valid.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert limited.children[:, 0].tolist() == [[-1, -1], [1, 2], [1, 2]]
    assert limited.children[:, 1].tolist() == [[-1, -1], [-1, -1], [3, -1]]
    assert torch.equal(limited.depth, whole.depth) and torch.equal(limited.ancestors, whole.ancestors)
    assert whole.valid.all(), "the tree itself has changed"
    again = limited.limited(torch.tensor([5, 0, 1]))
    assert again.valid.sum(1).tolist() == [1, 1, 3], "a node came back"


def test_along_path_takes_the_root_and_the_path() -> None:
    path = torch.tensor([[1, 3], [-1, -1]])
    values = torch.arange(20.0).view(2, 5, 2)
    expected = [[[0.0, 1.0], [2.0, 3.0], [6.0, 7.0]], [[10.0, 11.0]] * 3]
    assert along_path(values, path).tolist() == expected
    assert along_path(values[..., 0].contiguous(), path).tolist() == [[0.0, 2.0, 6.0], [10.0, 10.0, 10.0]]


def test_root_only() -> None:
    root = DraftTree.root_only(torch.tensor([3, 4]))
    assert root.tokens.tolist() == [[3], [4]] and root.parents.tolist() == [[-1], [-1]]
    assert (root.width, root.max_depth, root.max_children) == (1, 0, 0)
    assert root.children.shape == (2, 1, 0)
    assert root.depth.tolist() == [[0], [0]] and root.ancestors.tolist() == [[[True]], [[True]]]


def test_one_law_or_a_law_per_node() -> None:
    tokens, parents = torch.tensor([[1, 2, 3]]), torch.tensor([[-1, 0, 0]])
    assert DraftTree.build(tokens, parents).law.tolist() == [[0, 0, 0]]
    one = DraftTree.build(tokens, parents, sampling=DraftSampling.WITHOUT_REPLACEMENT)
    assert one.law.tolist() == [[2, 2, 2]] and one.law.dtype == torch.int8
    law = torch.tensor([[0, 0, 1]], dtype=torch.int8)
    assert DraftTree.build(tokens, parents, sampling=law).law is law
