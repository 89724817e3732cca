"""What length policies choose, and that a drafter with one keeps to it and stays exact."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafters.adaptive import AdaptiveDrafter
from drafters.model import ModelDrafter
from drafters.ngram import NGramDrafter
from drafters.round_costs import measure_costs
from specdec.drafting.costs import RoundCosts
from specdec.drafting.policies import AdditiveLength, CostAwareLength, FixedLength, LengthPolicy
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.components import perturbed
from tests.models import tiny_model
from verifiers.rejection import RejectionVerifier

DEPTH = 6
SLOTS = np.array([0, 1])


def bound(policy: LengthPolicy) -> LengthPolicy:
    policy.bind(max_batch_size=2, max_depth=DEPTH)
    for slot in range(2):
        policy.admit(slot)
    return policy


def costs(draft: float, fixed: float = 1.0, verify: float = 0.0) -> RoundCosts:
    """A round takes ``fixed``, and ``draft`` and ``verify`` more for every drafted token; verify also per row."""
    rows = (1, 8)
    table = tuple(tuple(fixed + (draft + verify * count) * depth for depth in range(DEPTH + 1)) for count in rows)
    return RoundCosts(rows=rows, table=table)


def play(policy: LengthPolicy, rate: float, rounds: int, seed: int = 0) -> list[int]:
    """The depths that a policy chooses where every token is accepted with one probability."""
    rng, chosen = np.random.default_rng(seed), []
    for _ in range(rounds):
        depths = policy.depths(SLOTS)
        wrong = rng.random((2, DEPTH)) >= rate
        reach = np.where(wrong.any(1), wrong.argmax(1), DEPTH)
        policy.note(SLOTS, depths, np.minimum(reach, depths))
        chosen.append(int(depths[0]))
    return chosen


@pytest.mark.parametrize(("rate", "draft"), [(0.05, 0.1), (0.8, 0.02), (0.97, 0.1)])
def test_learning_of_other_depths_costs_little(rate: float, draft: float) -> None:
    """With all rounds counted, those that explore too, it is within 2 % of the best fixed depth."""
    table = costs(draft)
    chosen = play(bound(CostAwareLength(table)), rate, 800)[100:]
    expected = np.cumsum(rate ** np.arange(DEPTH + 1))
    found = expected[chosen].sum() / table.seconds(2, DEPTH)[chosen].sum()
    assert found > 0.98 * (expected / table.seconds(2, DEPTH)).max()
    assert DEPTH in chosen or rate < 0.9, "the deepest drafts are tried at times"


def test_what_was_learned_of_one_request_is_where_the_next_begins() -> None:
    policy = bound(CostAwareLength(costs(0.3), memory=1000, explore=0))
    first = policy.depths(SLOTS)[0]
    play(policy, 0.98, 300)
    policy.admit(0)
    assert policy.depths(SLOTS)[0] > first


def test_additive_length() -> None:
    policy = bound(AdditiveLength(start=3))
    assert policy.depths(SLOTS).tolist() == [3, 3]
    policy.note(SLOTS, np.array([3, 3]), np.array([3, 1]))
    assert policy.depths(SLOTS).tolist() == [5, 2]
    policy.note(SLOTS, np.array([5, 0]), np.array([5, 0]))
    assert policy.depths(SLOTS).tolist() == [DEPTH, 2], "as deep as the drafter can; nothing drafted, nothing learned"
    for _ in range(5):
        policy.note(SLOTS, np.array([1, 1]), np.array([0, 0]))
    assert policy.depths(SLOTS).tolist() == [1, 1]
    policy.admit(1)
    assert policy.depths(SLOTS).tolist() == [1, 3]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=24, layers=1))


@pytest.mark.parametrize("shape", [DEPTH, [2, 2, 1]])
def test_drafts_are_no_deeper_than_the_policy_says(target: Target, shape: Any) -> None:
    drafter = AdaptiveDrafter(ModelDrafter(perturbed(target.model, 0.05), shape), FixedLength(2))
    with Engine(target, drafter, RejectionVerifier(), max_batch_size=2) as engine:
        speculated = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_new_tokens=20))
        engine.session.policy.depth = 0
        plain = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_new_tokens=20))
    assert [done.token_ids for done in speculated] == [done.token_ids for done in plain]
    assert {step.proposed_depth for step in speculated[0].steps[:4]} == {2}
    assert {step.proposed_depth for step in plain[0].steps} == {0}


def test_the_policy_hears_what_was_proposed_and_accepted(target: Target) -> None:
    class Listening(FixedLength):
        heard: list[tuple[int, int]] = []  # noqa: RUF012

        def note(self, slots: np.ndarray, proposed: np.ndarray, accepted: np.ndarray) -> None:
            self.heard += list(zip(proposed.tolist(), accepted.tolist(), strict=True))

    policy = Listening()
    drafter = AdaptiveDrafter(NGramDrafter(max_draft_tokens=4, max_ngram=2), policy)
    with Engine(target, drafter, RejectionVerifier()) as engine:
        (done,) = engine.generate([[1, 2, 3, 1, 2]], SamplingParams(max_new_tokens=30))
    told = [(step.proposed_depth, step.accepted) for step in done.steps]
    assert policy.heard == told[: len(policy.heard)]
    assert len(policy.heard) >= len(told) - 1, "the last round may end the request before it is told"
    assert len({depth for depth, _ in told}) > 1, "an n-gram that is not found drafts nothing"


def test_costs_are_measured_kept_and_read_again(target: Target, tmp_path: Path) -> None:
    drafter, path = ModelDrafter(target.model, 2), tmp_path / "costs.json"
    found = measure_costs(target, drafter, RejectionVerifier(), [[1, 2, 3]], rows=(2, 1), rounds=2)
    assert found.rows == (1, 2) and found.max_depth == 2
    assert (found.device, found.dtype, found.drafter) == ("cpu", "float32", "ModelDrafter")
    found.save(path)
    assert RoundCosts.load(path) == found
    path.write_text('{"rows": [1]}')
    with pytest.raises(ValueError, match="holds no costs of rounds"):
        RoundCosts.load(path)
    with Engine(target, drafter, RejectionVerifier()) as engine:  # the drafter is free again
        assert engine.generate([[1, 2]], SamplingParams(max_new_tokens=3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda target: RoundCosts(rows=(1, 2), table=((1.0, 2.0),)), "one row per batch size"),
        (lambda target: RoundCosts(rows=(2, 1), table=((1.0,), (1.0,))), "ascending"),
        (lambda target: RoundCosts(rows=(1,), table=((1.0, 0.0),)), "no positive number"),
        (lambda target: costs(0.1).seconds(1, 9), "depth 6, .* 9 deep"),
        (lambda target: CostAwareLength(memory=0), "numbers of rounds"),
        (lambda target: measure_costs(target, NGramDrafter(), RejectionVerifier(), []), "there are none"),
    ],
)
def test_numbers_that_do_not_fit(target: Target, make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(target)
