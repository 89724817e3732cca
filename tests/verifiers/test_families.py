"""The look-ups that the rules share, by hand on one tree."""

import pytest
import torch

from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.verifiers.cases import IID, SWOR, TOP
from verifiers.families import Family, entries, rows_of
from verifiers.levels import chances_in_turn, law_of_levels, law_of_steps

# The root's children are 1 and 2 (tokens 2 and 0), node 1 has the child 3 (token 1); row 1 lacks node 2.
TOKENS = torch.tensor([[9, 2, 0, 1], [9, 1, 2, 2]])
PARENTS = torch.tensor([[-1, 0, 0, 1]] * 2)
VALID = torch.tensor([[True] * 4, [True, True, False, True]])
P = torch.arange(24, dtype=torch.float64).view(2, 4, 3) / 100
Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).expand(2, 4, 3).contiguous()


def tree(*laws: DraftSampling, draft_probs: torch.Tensor | None = Q, rows: slice = slice(2)) -> DraftTree:
    law = torch.tensor([TOP, *laws], dtype=torch.int8).expand(2, -1)
    return DraftTree.build(
        TOKENS[rows],
        PARENTS[rows],
        valid=VALID[rows],
        sampling=law[rows],
        draft_probs=None if draft_probs is None else draft_probs[rows],
        max_depth=2,
        max_children=2,
    )


def test_rows_of_a_table() -> None:
    assert torch.equal(rows_of(P, torch.tensor([2, 0])), torch.stack([P[0, 2], P[1, 0]]))
    several = rows_of(P, torch.tensor([[3, 1], [0, 3]]))
    assert torch.equal(several, torch.stack([P[0, [3, 1]], P[1, [0, 3]]]))
    assert torch.equal(rows_of(P[1:], torch.tensor([[0, 3]])), several[1:]), "a batch of one needs no offsets"


def test_where_tokens_stand() -> None:
    """In a vocabulary of 10, token 1 below node 1 stands at 11; tokens below the root stand at themselves."""
    assert entries(tree(IID, IID, IID), 10)[0, 1:].tolist() == [2, 0, 11]


def test_a_family() -> None:
    family = Family(tree(IID, SWOR, TOP), P, torch.tensor([[1, 0], [0, 3]]))
    assert family.exists.tolist() == [[[True, False], [True, True]], [[True, False], [False, False]]]
    assert family.index.tolist() == [[[3, 0], [1, 2]], [[1, 0], [0, 0]]], "the root where there is no child"
    assert family.flat_index.tolist() == [[3, 0, 1, 2], [1, 0, 0, 0]]
    assert family.tokens[0].tolist() == [[1, 9], [2, 0]]
    assert family.laws.tolist() == [[[TOP, -1], [IID, SWOR]], [[IID, -1], [-1, -1]]]
    assert torch.equal(family.p, rows_of(P, family.nodes)) and torch.equal(family.q, Q[:, :2])


def test_what_children_were_drawn_from() -> None:
    """Below the root of row 0: q for the first, token 2; then q without token 2, unless it is drawn anew."""
    for law, second in ((SWOR, [0.5 / 0.8, 0.3 / 0.8, 0.0]), (IID, [0.5, 0.3, 0.2])):
        rows = [row[0, 0] for row in Family(tree(law, law, TOP), P, torch.zeros(2, 1, dtype=torch.long)).drawn_from()]
        torch.testing.assert_close(torch.stack(rows), torch.tensor([[0.5, 0.3, 0.2], second], dtype=torch.float64))


def test_nothing_is_looked_up_that_nobody_reads() -> None:
    """A rule that does not use q, or p, costs no copy of it; without q there is only one copy of p."""
    family = Family(tree(TOP, TOP, TOP, draft_probs=None), P, torch.zeros(2, 1, dtype=torch.long))
    assert family.tokens.shape == (2, 1, 2)
    assert not {"p", "q"} & vars(family).keys()
    assert family.q is family.p


def test_the_nodes_that_have_children_come_first() -> None:
    family = Family.of_parents(tree(IID, IID, IID), P)
    assert [sorted(row[:2]) for row in family.nodes.tolist()] == [[0, 1], [0, 1]]
    leaf = Family.of_parents(DraftTree.root_only(torch.tensor([1])), P[:1, :1])
    assert leaf.nodes.tolist() == [[0]] and leaf.exists.shape == (1, 1, 0)


@pytest.mark.parametrize("valid", [None, torch.tensor([[True, True, False], [True, False, False]])])
def test_the_shortcut_of_chains_finds_the_same_children(valid: torch.Tensor | None) -> None:
    chain = DraftTree.from_shape(TreeShape.chain(2), TOKENS[:, :3], valid=valid)
    for node in range(3):
        short = Family(chain, P[:, :3], torch.full((2, 1), node))
        table = Family(chain, P[:, :3], torch.full((2, 2), node))
        assert torch.equal(short.index, table.index[:, :1]) and torch.equal(short.exists, table.exists[:, :1])


def test_chances_in_turn() -> None:
    """.5 of the first; .5 of what it leaves; the last takes half of the quarter."""
    chances = torch.tensor([[0.5, 0.5, 0.5], [1.0, 0.3, 0.3]], dtype=torch.float64)
    assert chances_in_turn(chances).tolist() == [[0.5, 0.25, 0.125], [1.0, 0.0, 0.0]]
    one = chances[:, :1]
    assert torch.equal(chances_in_turn(one), one)


def test_the_law_of_levels() -> None:
    """From the root to 1 with .5, to 2 with .2; from 1 to 3 with .4. Row 1 has no node 2."""
    family = Family(tree(IID, IID, IID), P, torch.tensor([[0, 1], [1, 0]]))
    accepted = torch.tensor([[[0.5, 0.2], [0.4, 0.0]], [[0.4, 0.0], [0.5, 0.0]]], dtype=torch.float64)
    expected = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.5, 0.3, 0.0, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(law_of_levels(family, accepted), expected)


def test_the_law_of_a_chains_steps_needs_no_ancestors() -> None:
    step = torch.tensor([[1.0, 0.5, 0.4], [1.0, 0.0, 0.4]], dtype=torch.float64)
    chain = DraftTree.from_shape(TreeShape.chain(2), TOKENS[:, :3])
    general = DraftTree.build(TOKENS[:, :3], chain.parents, max_depth=2, max_children=1)
    assert chain.in_line and not general.in_line
    expected = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]], dtype=torch.float64)
    for shape in (chain, general):
        torch.testing.assert_close(law_of_steps(shape, step), expected)
