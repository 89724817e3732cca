"""The look-ups that the rules share, by hand on one tree."""

import pytest
import torch

from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.verifiers.cases import IID, SWOR, TOP
from verifiers.target_walk import law_of_steps
from verifiers.trees import entries, law_in_post_order, rows_of
from verifiers.walk import Family

# The root's children are 1 and 2 (tokens 2 and 0), node 1 has the child 3 (token 1); row 1 lacks node 2.
TOKENS = torch.tensor([[1, 2, 0, 1], [1, 1, 2, 2]])
PARENTS = torch.tensor([[-1, 0, 0, 1]] * 2)
VALID = torch.tensor([[True] * 4, [True, True, False, True]])
P = torch.arange(24, dtype=torch.float64).view(2, 4, 3) / 100
Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).expand(2, 4, 3).contiguous()


def tree(*laws: DraftSampling, draft_probs: torch.Tensor | None = Q) -> DraftTree:
    law = torch.tensor([TOP, *laws], dtype=torch.int8).expand(2, -1)
    return DraftTree.build(
        TOKENS, PARENTS, valid=VALID, sampling=law, draft_probs=draft_probs, max_depth=2, max_children=2
    )


def test_rows_and_entries_of_a_table() -> None:
    assert torch.equal(rows_of(torch.tensor([2, 0]), P)[0], torch.stack([P[0, 2], P[1, 0]]))
    p, q = rows_of(torch.tensor([[3, 1], [0, 3]]), P, Q)
    assert torch.equal(p, torch.stack([P[0, [3, 1]], P[1, [0, 3]]])) and torch.equal(q, Q[:, :2])
    assert torch.equal(rows_of(torch.tensor([[0, 3]]), P[1:])[0], p[1:]), "a batch of one needs no offsets"
    # In a vocabulary of 10, token 1 below node 1 stands at 11; tokens below the root stand at themselves.
    assert entries(tree(IID, IID, IID), 10)[0, 1:].tolist() == [2, 0, 11]


def test_a_family() -> None:
    """Nothing is looked up that nobody reads: a rule that does not use q, or p, costs no copy of it."""
    family = Family(tree(IID, SWOR, TOP), P, torch.tensor([[1, 0], [0, 3]]), 2)
    assert family.exists.tolist() == [[[True, False], [True, True]], [[True, False], [False, False]]]
    assert family.index.tolist() == [[3, 0, 1, 2], [1, 0, 0, 0]], "the root where there is no child"
    assert family.tokens[0].tolist() == [[1, 1], [2, 0]] and family.parents.tolist() == [[1, 0], [0, -1]]
    assert family.laws.tolist() == [[[TOP, -1], [IID, SWOR]], [[IID, -1], [-1, -1]]]
    assert not {"p", "q"} & vars(family).keys()
    assert torch.equal(family.p, rows_of(family.nodes, P)[0]) and torch.equal(family.q, Q[:, :2])


@pytest.mark.parametrize("law", [TOP, IID, SWOR])
def test_what_children_were_drawn_from(law: DraftSampling) -> None:
    """Below the root of row 0: token 2, then token 0."""
    expected = {
        TOP: [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]],
        IID: [[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]],
        SWOR: [[0.5, 0.3, 0.2], [0.5 / 0.8, 0.3 / 0.8, 0.0]],
    }
    family = Family(tree(law, law, TOP), P, torch.zeros(2, 1, dtype=torch.long), 2)
    rows = torch.stack([row[0, 0] for row in family.drawn_from()])
    torch.testing.assert_close(rows, torch.tensor(expected[law], dtype=torch.float64))


def test_the_law_of_a_chains_steps_needs_no_ancestors() -> None:
    step = torch.tensor([[1.0, 0.5, 0.4], [1.0, 0.0, 0.4]], dtype=torch.float64)
    chain = DraftTree.from_shape(TreeShape.chain(2), TOKENS[:, :3])
    general = DraftTree.build(TOKENS[:, :3], chain.parents, max_depth=2, max_children=1)
    assert chain.in_line and not general.in_line
    expected = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]], dtype=torch.float64)
    for shape in (chain, general):
        torch.testing.assert_close(law_of_steps(shape, step), expected)


def test_a_chance_that_was_rounded_up_gives_no_node_a_negative_probability() -> None:
    chance = torch.tensor([[1.0, 1 + 2**-23, 0.5, 1.0], [1.0, 0.5, 0.0, 1 + 2**-23]])
    law = law_in_post_order(tree(IID, IID, IID), chance)
    assert (law >= 0).all()
    torch.testing.assert_close(law.sum(-1), torch.ones(2))
