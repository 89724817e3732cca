"""Laws worked out by hand: of one level, of a block, of paths, and of lossy rules."""

import pytest
import torch
from torch import Tensor

import verifiers.greedy_multipath
from specdec import DraftSampling, DraftTree, TreeShape, Verifier
from specdec.coupling import winners
from tests.verifiers.cases import IID, SWOR, TOP
from verifiers import (
    FuzzyVerifier,
    RejectionVerifier,
    RelaxedTopKVerifier,
    ThresholdVerifier,
    TypicalVerifier,
)


def table(*rows: list[float], batch: int = 1) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).expand(batch, -1, -1).contiguous()


# p = (.5, .3, .2), q = (.2, .5, .3), one level, so p_1 = N([p - q]+) is all on token 0. Rejection is compared with its
# formulas in test_formulas.py, draft by draft.
REJECTION, TWO = RejectionVerifier(), RelaxedTopKVerifier(k=2)
ONE_LEVEL: list[tuple[Verifier, list[DraftSampling], list[int], list[float], list[float] | None]] = [
    # Token 1 for certain, then q without it, (.4, 0, .6), from what is left of p, (5/7, 0, 2/7):
    # token 2 is accepted with (2/7) / .6 = 10/21 of the .7, and N([p_1 - q_1]+) is all on token 0.
    (REJECTION, [TOP, SWOR], [1, 2], [0.7 * 11 / 21, 0.3, 0.7 * 10 / 21], [1.0, 0.0, 0.0]),
    # .2 / .8, then (.2 + .3) / .8
    (ThresholdVerifier(accumulated=0.8), [TOP, TOP], [2, 1], [0.375, 0.25, 0.375], None),
    (ThresholdVerifier(accumulated=0.4), [TOP] * 3, [2, 1, 0], [0.0, 0.5, 0.5, 0.0], None),  # the second exceeds 1
    (ThresholdVerifier(single=0.3), [TOP] * 3, [2, 1, 0], [0.0, 0.2, 0.8, 0.0], None),  # the second takes what is left
    (ThresholdVerifier(accumulated=0.8), [TOP, TOP], [2, 2], [0.75, 0.25, 0.0], None),  # a repetition counts once
    (TWO, [TOP, TOP], [2, 1], [0.0, 0.0, 1.0], None),
    (TWO, [TOP, TOP], [1, 0], [0.0, 0.0, 1.0], None),  # of two that pass, the more probable one
    (RelaxedTopKVerifier(k=1), [TOP, TOP], [2, 1], [1.0, 0.0, 0.0], None),
]


@pytest.mark.parametrize(("rule", "laws", "tokens", "stop", "residual"), ONE_LEVEL)
def test_one_level(rule: Verifier, laws, tokens: list[int], stop: list[float], residual: list[float] | None) -> None:
    p, q = table(*[[0.5, 0.3, 0.2]] * (len(tokens) + 1)), table(*[[0.2, 0.5, 0.3]] * (len(tokens) + 1))
    tree = DraftTree.from_shape(
        TreeShape.branching(len(tokens)),
        torch.tensor([[0, *tokens]]),
        sampling=torch.tensor([[TOP, *laws]], dtype=torch.int8),
        draft_probs=torch.full_like(q, torch.nan) if set(laws) == {TOP} else q,
    )
    found = rule.laws(tree, p)
    torch.testing.assert_close(found.stop, torch.tensor([stop], dtype=torch.float64))
    if residual is not None:
        torch.testing.assert_close(found.after(torch.tensor([0]))[0], torch.tensor(residual, dtype=torch.float64))
    # After a leaf p itself, to the last bit.
    assert torch.equal(found.after(torch.tensor([1])), p[:, 1])


def test_nothing_is_lost_on_long_paths_in_float32() -> None:
    """Forty tokens of probability 1/50 each: the mass of the prefix is 10^-68, and q~ is a law all the same."""
    p, q = torch.rand(2, 1, 41, 50).softmax(-1)
    for token in (0, 25):
        tokens = torch.full((1, 41), token)
        law = verifiers.greedy_multipath._law_of_the_largest(p, q, tokens, torch.tensor([[3]]), 3)
        assert torch.isfinite(law).all() and (law >= 0).all()
        torch.testing.assert_close(law.sum(-1), torch.ones(1, 41, dtype=torch.float64))


def test_fuzzy_trusts_close_nodes_only() -> None:
    """Total variation .1 at the root and .5 below: the first token is always kept, the second judged by p."""
    p, q = table([0.5, 0.5], [1.0, 0.0], [0.5, 0.5]), table([0.4, 0.6], [0.5, 0.5], [0.5, 0.5])
    tree = DraftTree.from_shape(TreeShape.chain(2), torch.tensor([[0, 1, 1]]), sampling=IID, draft_probs=q)
    laws = FuzzyVerifier(threshold=0.2, divergence="total_variation").laws(tree, p)
    assert laws.stop.tolist() == [[0.0, 1.0, 0.0]]
    assert laws.after(torch.tensor([1])).tolist() == [[1.0, 0.0]]
    assert torch.equal(laws.after(torch.tensor([2])), p[:, 2])


FORK = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0)])


@pytest.mark.parametrize(
    ("shape", "tokens", "options", "last"),
    [
        # H = .948, so delta * exp(-H) = 0.3 * 0.3875 = 0.1163 is above epsilon = 0.09, which is then the threshold.
        (TreeShape.chain(3), [0, 0, 1, 2], {}, 2),  # .6 and .3 pass, .08 does not
        (TreeShape.chain(3), [0, 2, 0, 0], {}, 0),  # what follows a rejected token is lost
        (TreeShape.chain(3), [0, 0, 1, 2], {"epsilon": 0.05}, 3),
        (TreeShape.chain(3), [0, 0, 1, 2], {"epsilon": 0.5, "delta": 0.9}, 1),  # 0.9 * exp(-H) = .353 is the smaller
        # Two paths of length two: the more probable one; the longer one wins over the more probable.
        (FORK, [0, 1, 0, 1, 0], {}, 4),
        (FORK, [0, 1, 0, 1, 2], {}, 3),
    ],
)
def test_typical_acceptance(shape: TreeShape, tokens: list[int], options: dict[str, float], last: int) -> None:
    tree = DraftTree.from_shape(shape, torch.tensor([tokens]))
    law = TypicalVerifier(**options).laws(tree, table(*[[0.6, 0.3, 0.08, 0.02]] * len(tokens))).stop
    assert law[0].tolist() == [float(node == last) for node in range(len(tokens))]


def test_the_first_to_arrive_wins() -> None:
    noise = torch.tensor([1.0, 2.0, 0.5, 0.1])
    assert winners(torch.tensor([0.5, 0.3, 0.2, 0.0]), noise).tolist() == [1, 0, 0, 0]  # .5, .15, .4, never
    assert winners(torch.tensor([0.2, 0.3, 0.2, 0.3]), noise).tolist() == [0, 0, 0, 1]
    assert winners(torch.tensor([0.0, 0.4, 0.1, 0.0]), noise).tolist() == [0, 1, 0, 0], "the lower of two equal ones"
    for bad in ([0.0, 0.0, 0.0, 0.0], [torch.nan, 0.5, 0.5, 0.0]):
        assert winners(torch.tensor(bad), noise).isnan().any(), "the engine reports such rows"
