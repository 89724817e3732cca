"""Lossy rules: they say so, exact where switched off, greedy at temperature 0; FLy against all patterns of matches."""

import itertools

import pytest
import torch

from specdec import DraftTree, Engine, Exactness, SamplingParams, Target, TreeShape, Verifier
from specdec.checks.drafts import enumerate_drafts
from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.reference import reference_decode
from specdec.checks.tables import Tables
from tests.components import DRAFTERS
from tests.models import tiny_model
from tests.verifiers.cases import BIASED, EXACT, IID, SWOR, TOP, widest
from verifiers import (
    CascadeVerifier,
    FLyVerifier,
    FuzzyVerifier,
    LenientVerifier,
    RejectionVerifier,
    RelaxedTopKVerifier,
    TargetWalkVerifier,
    ThresholdVerifier,
    TypicalVerifier,
    WeightedTransportVerifier,
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
    "fly": FLyVerifier(window=1, threshold=0.0),
}


@pytest.mark.parametrize("rule", RULES)
def test_it_is_lossy_and_says_so(rule: str) -> None:
    """And is greedy at temperature 0, with the deterministic drafts that greedy requests get."""
    verifier, shape = RULES[rule], widest(RULES[rule])
    assert verifier.exactness is Exactness.LOSSY
    result = enumerate_outcome(verifier, Tables.random(4, 2, seed=3), shape, IID)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9)
    if rule == "fly":  # which judges a mismatch by what follows, greedy or not
        return
    made = enumerate_drafts(Tables.random(4, 2, seed=5, kinds=("one_hot",)), shape, TOP)
    p = made.target_probs.float()
    laws = verifier.laws(made.tree, p)
    assert torch.equal(laws.stop, RejectionVerifier().laws(made.tree, p).stop)
    stop = laws.stop.argmax(1)
    assert torch.equal(laws.after(stop), p[torch.arange(len(p)), stop])


@pytest.mark.parametrize(
    ("rule", "same"),
    [
        (LenientVerifier(lenience=1.0), RejectionVerifier()),
        (ThresholdVerifier(), TargetWalkVerifier()),
        (FuzzyVerifier(threshold=0.0), RejectionVerifier()),
        (FLyVerifier(window=1, threshold=1.0), TargetWalkVerifier()),
        (FLyVerifier(window=3, threshold=0.0), TargetWalkVerifier()),  # the draft is too short for the window
    ],
)
def test_switched_off_it_is_exact(rule: Verifier, same: Verifier) -> None:
    tables, shape = Tables.random(3, 2, seed=1, kinds=("dense", "zeros")), widest(rule)
    for law in {TOP, IID, SWOR} & rule.samplings:
        off, exact = (enumerate_outcome(each, tables, shape, law) for each in (rule, same))
        assert off.tv < EXACT
        assert off.expected_accepted == pytest.approx(exact.expected_accepted, abs=EXACT)


def test_typical_acceptance_of_greedy_requests_is_exact() -> None:
    model = tiny_model(layers=2)
    engine = Engine(Target(model), DRAFTERS["medusa"](model), TypicalVerifier(), max_length=64)
    output = engine.generate([[5, 6, 5, 6, 5]], SamplingParams(max_new_tokens=12))[0]
    assert list(output.token_ids) == reference_decode(model, [5, 6, 5, 6, 5], SamplingParams(max_new_tokens=12))


def literal(match: list[float], unsure: list[bool], window: int) -> list[float]:
    """FLy's law of the last accepted position, over all patterns of matches."""
    stop = [0.0] * (len(match) + 1)
    for pattern in itertools.product([True, False], repeat=len(match)):
        chance = 1.0
        for matched, p in zip(pattern, match, strict=True):
            chance *= p if matched else 1 - p
        accepted = 0
        while accepted < len(match):
            after = pattern[accepted + 1 : accepted + 1 + window]
            if not pattern[accepted] and not (unsure[accepted] and len(after) == window and all(after)):
                break
            accepted += 1
        stop[accepted] += chance
    return stop


@pytest.mark.parametrize("window", [1, 2, 6])
@pytest.mark.parametrize("per_row", [False, True])
def test_the_law_of_fly_is_that_of_all_patterns(window: int, per_row: bool) -> None:
    generator = torch.Generator().manual_seed(window)
    rows, depth, vocab = 4, 8, 5
    p = (4 * torch.rand(rows, depth + 1, vocab, generator=generator, dtype=torch.float64) ** 2).softmax(-1)
    tokens = torch.randint(0, vocab, (rows, depth + 1), generator=generator)
    valid = torch.ones(rows, depth + 1, dtype=torch.bool)
    valid[1, 4:] = False
    shape = TreeShape.chain(depth)
    if per_row:
        tree = DraftTree.build(tokens, torch.tensor([shape.parents] * rows), valid=valid)
    else:
        tree = DraftTree.from_shape(shape, tokens, valid=valid)
    laws = FLyVerifier(window=window, threshold=0.8).laws(tree, p.where(valid[..., None], torch.nan))
    top = p.topk(3, -1).values
    top = top / top.sum(-1, keepdim=True)
    unsure = -(top * top.log()).sum(-1) / torch.tensor(3.0).log() > 0.8
    assert unsure.any() and not unsure.all()
    for row in range(rows):
        count = int(valid[row].sum()) - 1
        match = p[row, torch.arange(count), tokens[row, 1 : count + 1]].tolist()
        expected = literal(match, unsure[row, :count].tolist(), window) + [0.0] * (depth - count)
        torch.testing.assert_close(laws.stop[row], torch.tensor(expected, dtype=torch.float64))
    walk = TargetWalkVerifier().laws(tree, p)
    for node in range(depth + 1):
        stop = torch.full((rows,), node)
        torch.testing.assert_close(laws.after(stop)[valid[:, node]], walk.after(stop)[valid[:, node]])


def test_fly_is_greedy_matching_at_temperature_zero() -> None:
    p = torch.zeros(1, 9, 4)
    p[0, :, 2] = 1
    tree = DraftTree.from_shape(TreeShape.chain(8), torch.tensor([[0, 2, 1, 2, 2, 2, 2, 2, 2]]))
    laws = FLyVerifier().laws(tree, p)
    assert laws.stop.tolist() == [[0, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert torch.equal(laws.after(torch.tensor([1])), p[:, 1])


@pytest.mark.parametrize(
    ("rule", "name", "value"),
    [
        (LenientVerifier, "lenience", 0.0),
        (LenientVerifier, "lenience", 1.5),
        (ThresholdVerifier, "single", 0.0),
        (ThresholdVerifier, "accumulated", 2.0),
        (RelaxedTopKVerifier, "k", 0),
        (FuzzyVerifier, "threshold", -1.0),
        (FuzzyVerifier, "divergence", "l2"),
        (TypicalVerifier, "epsilon", 0.0),
        (TypicalVerifier, "delta", -1.0),
        (FLyVerifier, "threshold", 1.5),
        (FLyVerifier, "window", 0),
        (FLyVerifier, "top", 1),
        (CascadeVerifier, "deferral", "opf"),
        (CascadeVerifier, "alpha", float("nan")),
        (WeightedTransportVerifier, "solver", "simplex"),
    ],
)
def test_settings_that_make_no_rule(rule: type[Verifier], name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}="):
        rule(**{name: value})


def test_programs_are_not_solved_over_large_vocabularies() -> None:
    p = torch.full((1, 3, 200), 1 / 200)
    tree = DraftTree.from_shape(TreeShape.branching(2), torch.tensor([[0, 1, 2]]), sampling=SWOR, draft_probs=p)
    with pytest.raises(ValueError, match="200 tokens"):
        WeightedTransportVerifier(solver="program").laws(tree, p)
    assert WeightedTransportVerifier().laws(tree, p).stop.sum() == pytest.approx(1)
