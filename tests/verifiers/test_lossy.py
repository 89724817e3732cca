"""Lossy rules: they say so, their published distances, exact where switched off, greedy at temperature 0."""

import pytest
import torch

from specdec.checks.drafts import enumerate_drafts
from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.reference import reference_decode
from specdec.checks.tables import Tables
from specdec.engine.engine import Engine
from specdec.interfaces import Verifier
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling, Exactness
from tests.components import DRAFTERS
from tests.models import tiny_model
from tests.verifiers.cases import BIASED, EXACT, IID, SHAPES, SWOR, TOP, needs_tables
from verifiers import (
    FuzzyVerifier,
    LenientVerifier,
    RejectionVerifier,
    RelaxedTopKVerifier,
    TargetWalkVerifier,
    ThresholdVerifier,
    TypicalVerifier,
)

RULES: dict[str, Verifier] = {
    "lenient": LenientVerifier(lenience=0.5),
    "single": ThresholdVerifier(single=0.3),
    "accumulated": ThresholdVerifier(accumulated=0.6),
    "relaxed top-k": RelaxedTopKVerifier(k=2),
    "fuzzy": FuzzyVerifier(threshold=0.4, divergence="total_variation"),
    "fuzzy, Kullback-Leibler": FuzzyVerifier(threshold=1.0, divergence="kl"),
    "fuzzy, Jensen-Shannon": FuzzyVerifier(threshold=0.3),
    "typical": TypicalVerifier(),
}


def shape_of(rule: Verifier) -> TreeShape:
    return TreeShape.chain(2) if rule.chain_only else SHAPES["2x2"]


@pytest.mark.parametrize("rule", RULES)
def test_it_is_lossy_and_says_so(rule: str) -> None:
    assert RULES[rule].exactness is Exactness.LOSSY
    result = enumerate_outcome(RULES[rule], Tables.random(4, 2, seed=3), shape_of(RULES[rule]), IID)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9)


@needs_tables
@pytest.mark.parametrize(
    ("rule", "figure"),
    [(LenientVerifier(lenience=0.8), 0.152), (TypicalVerifier(), 0.345), (ThresholdVerifier(accumulated=0.8), 0.042)],
    ids=["lenient", "typical", "threshold"],
)
def test_published_distances(tables: dict[str, Tables], rule: Verifier, figure: float) -> None:
    assert enumerate_outcome(rule, tables["A"], TreeShape.chain(4), IID).tv == pytest.approx(figure, abs=5.1e-4)


@pytest.mark.parametrize(
    ("rule", "same"),
    [
        (LenientVerifier(lenience=1.0), RejectionVerifier()),
        (ThresholdVerifier(), TargetWalkVerifier()),
        (FuzzyVerifier(threshold=0.0), RejectionVerifier()),
    ],
    ids=["lenient", "threshold", "fuzzy"],
)
@pytest.mark.parametrize("laws", [TOP, IID, SWOR], ids=lambda law: law.name)
def test_switched_off_it_is_exact(rule: Verifier, same: Verifier, laws: DraftSampling) -> None:
    tables = Tables.random(3, 2, seed=1, kinds=("dense", "zeros"))
    result = enumerate_outcome(rule, tables, shape_of(rule), laws)
    assert result.tv < EXACT
    assert result.expected_accepted == pytest.approx(
        enumerate_outcome(same, tables, shape_of(rule), laws).expected_accepted, abs=EXACT
    )


@pytest.mark.parametrize("rule", RULES)
def test_temperature_zero_is_greedy_matching(rule: str) -> None:
    """One-hot p, and the deterministic drafts that greedy requests get."""
    verifier, shape = RULES[rule], shape_of(RULES[rule])
    made = enumerate_drafts(Tables.random(4, 2, seed=5, kinds=("one_hot",)), shape, TOP)
    p = made.target_probs.float()
    stop_law = verifier.laws(made.tree, p).stop
    assert torch.equal(stop_law, RejectionVerifier().laws(made.tree, p).stop)
    stop = stop_law.argmax(1)
    assert torch.equal(verifier.laws(made.tree, p).after(stop), p[torch.arange(len(p)), stop])


P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def one_level(*tokens: int) -> tuple[DraftTree, torch.Tensor]:
    shape = TreeShape.branching(len(tokens))
    return DraftTree.from_shape(shape, torch.tensor([[0, *tokens]])), P.expand(1, len(tokens) + 1, 3).contiguous()


@pytest.mark.parametrize(
    ("rule", "tokens", "expected"),
    [
        (ThresholdVerifier(accumulated=0.8), (2, 1), [0.375, 0.25, 0.375]),  # .2 / .8, then (.2 + .3) / .8
        (ThresholdVerifier(accumulated=0.4), (2, 1, 0), [0.0, 0.5, 0.5, 0.0]),  # the second exceeds 1
        (ThresholdVerifier(single=0.3), (2, 1, 0), [0.0, 0.2, 0.8, 0.0]),  # the second takes what is left
        (ThresholdVerifier(accumulated=0.8), (2, 2), [0.75, 0.25, 0.0]),  # a repetition counts once
        (RelaxedTopKVerifier(k=2), (2, 1), [0.0, 0.0, 1.0]),
        (RelaxedTopKVerifier(k=2), (1, 0), [0.0, 0.0, 1.0]),  # of two that pass, the more probable one
        (RelaxedTopKVerifier(k=1), (2, 1), [1.0, 0.0, 0.0]),
    ],
)
def test_one_level_by_hand(rule: Verifier, tokens: tuple[int, ...], expected: list[float]) -> None:
    tree, p = one_level(*tokens)
    torch.testing.assert_close(rule.laws(tree, p).stop, torch.tensor([expected], dtype=torch.float64))


def test_fuzzy_trusts_close_nodes_only() -> None:
    """Total variation .1 at the root and .5 below: the first token is always kept, the second judged by p."""
    p = torch.tensor([[[0.5, 0.5], [1.0, 0.0], [0.5, 0.5]]], dtype=torch.float64)
    q = torch.tensor([[[0.4, 0.6], [0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    tree = DraftTree.from_shape(TreeShape.chain(2), torch.tensor([[0, 1, 1]]), sampling=IID, draft_probs=q)
    rule = FuzzyVerifier(threshold=0.2, divergence="total_variation")
    assert rule.laws(tree, p).stop.tolist() == [[0.0, 1.0, 0.0]]
    assert rule.laws(tree, p).after(torch.tensor([1])).tolist() == [[1.0, 0.0]]
    assert torch.equal(rule.laws(tree, p).after(torch.tensor([2])), p[:, 2])


def stop_of(tokens: list[int], shape: TreeShape, **kwargs: float) -> int:
    tree = DraftTree.from_shape(shape, torch.tensor([tokens]))
    table = torch.tensor([0.6, 0.3, 0.08, 0.02], dtype=torch.float64).expand(1, len(tokens), 4).contiguous()
    law = TypicalVerifier(**kwargs).laws(tree, table).stop
    assert law.sum() == 1 and law.max() == 1
    return int(law.argmax())


def test_typical_acceptance_by_hand() -> None:
    # H = .948, so delta * exp(-H) = 0.3 * 0.3875 = 0.1163 is above epsilon = 0.09, which is then the threshold.
    chain = TreeShape.chain(3)
    assert stop_of([0, 0, 1, 2], chain) == 2  # .6 and .3 pass, .08 does not
    assert stop_of([0, 2, 0, 0], chain) == 0  # what follows a rejected token is lost
    assert stop_of([0, 0, 1, 2], chain, epsilon=0.05) == 3
    assert stop_of([0, 0, 1, 2], chain, epsilon=0.5, delta=0.9) == 1  # 0.9 * exp(-H) = .353 is the smaller one
    # Two paths of length two: the more probable one; the longer one wins over the more probable.
    shape = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0)])
    assert stop_of([0, 1, 0, 1, 0], shape) == 4
    assert stop_of([0, 1, 0, 1, 2], shape) == 3


def test_typical_acceptance_of_greedy_requests_is_exact() -> None:
    model = tiny_model()
    engine = Engine(Target(model), DRAFTERS["medusa"](model), TypicalVerifier(), max_length=64)
    for prompt in ([1, 2, 3], [5, 6, 5, 6, 5]):
        output = engine.generate([prompt], SamplingParams(max_new_tokens=16))[0]
        assert list(output.token_ids) == reference_decode(model, prompt, SamplingParams(max_new_tokens=16))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LenientVerifier(lenience=0.0), "lenience=0.0"),
        (lambda: LenientVerifier(lenience=1.5), "lenience=1.5"),
        (lambda: ThresholdVerifier(single=0.0), "single=0.0"),
        (lambda: ThresholdVerifier(accumulated=2.0), "accumulated=2.0"),
        (lambda: RelaxedTopKVerifier(k=0), "k=0"),
        (lambda: FuzzyVerifier(threshold=-1.0), "threshold=-1.0"),
        (lambda: FuzzyVerifier(divergence="l2"), "divergence='l2'"),
        (lambda: TypicalVerifier(epsilon=0.0), "epsilon=0.0"),
        (lambda: TypicalVerifier(delta=-1.0), "delta=-1.0"),
    ],
)
def test_bad_settings(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
