"""Shared noise: the output is plain decoding's whatever was drafted, and coupled drafts are accepted as computed."""

from typing import Any

import pytest
from torch import Tensor

import specdec.engine.round
from drafters.model import ModelDrafter
from specdec import DraftSampling, DraftTree, Engine, Noise, SamplingParams, Target
from specdec.checks.outcomes import check_shared
from specdec.checks.reference import reference_decode
from specdec.checks.tables import Tables
from specdec.coupling import winners
from specdec.random import shared_noise
from tests.changed_rule import ChangedRule, accept_the_first
from tests.components import perturbed
from tests.models import tiny_model
from tests.verifiers.cases import IID, KINDS, SHAPES, SWOR, TOP, expected_coupled
from verifiers import SharedNoiseVerifier

COUPLED = DraftSampling.COUPLED
LEVEL = 1e-5
SAMPLES = 5000


# The promise, over tables


@pytest.mark.parametrize("law", [COUPLED, TOP, IID, SWOR], ids=lambda law: law.name)
def test_every_output_is_plain_decodings(law: DraftSampling) -> None:
    for kinds in ("dense", "every kind"):
        tables = Tables.random(4, 2, seed=2, kinds=KINDS[kinds])
        result = check_shared(SharedNoiseVerifier(), tables, SHAPES["2x2"], law, samples=SAMPLES, seed=1)
        assert result.differing == 0
        assert result.p_value > LEVEL
        assert result.accepted > 0


@pytest.mark.parametrize("mistake", [{"after": lambda tree, p, laws, stop: p[:, 0]}, {"stop": accept_the_first}])
def test_a_wrong_rule_differs(mistake: dict[str, Any]) -> None:
    tables = Tables.random(4, 2, seed=2)
    rule = ChangedRule(SharedNoiseVerifier(), **mistake)
    assert check_shared(rule, tables, SHAPES["2x2"], COUPLED, samples=SAMPLES).differing > SAMPLES // 20


def test_a_law_that_is_not_the_targets_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: numbers that are a little too large for improbable tokens."""
    import specdec.checks.outcomes

    def tilted(probs: Tensor, noise: Tensor) -> Tensor:
        return winners(probs**1.1, noise)

    monkeypatch.setattr(specdec.checks.outcomes, "winners", tilted)
    result = check_shared(SharedNoiseVerifier(), Tables.random(4, 2, seed=2), SHAPES["2x2"], COUPLED, samples=20_000)
    assert result.p_value < LEVEL


# The acceptance


def test_the_noise_gives_the_computed_acceptance() -> None:
    """Within five standard errors: once in two million seeds a correct implementation is outside."""
    tables, shape = Tables.random(4, 2, seed=5, kinds=("zeros",)), SHAPES["2x2"]
    result = check_shared(SharedNoiseVerifier(), tables, shape, COUPLED, samples=20_000)
    expected = expected_coupled(tables, shape)
    assert result.accepted == pytest.approx(expected, abs=5 * result.error)
    # Drafts with noise of their own are far outside.
    fresh = check_shared(SharedNoiseVerifier(), tables, shape, IID, samples=20_000)
    assert fresh.accepted < expected - 5 * fresh.error


# Through the engine. Outputs, and that nothing is random given a tree: tests/test_lossless.py

PROMPTS = [[1, 2, 3, 1, 2], [7], [5, 6, 5, 6, 5, 6, 5, 6, 5]]
SAMPLING = (
    SamplingParams(max_new_tokens=10, temperature=1.0),
    SamplingParams(max_new_tokens=12, temperature=0.8, top_k=12, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(max_new_tokens=13),
)


def test_noise_of_the_round_breaks_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: keyed by the position of the round's root alone, as fresh noise is keyed by the round."""
    model, pairs = tiny_model("llama", vocab_size=24, layers=2), enumerate(zip(PROMPTS, SAMPLING, strict=True))
    expected = [reference_decode(model, prompt, s.seeded(i), noise=Noise.SHARED) for i, (prompt, s) in pairs]

    def by_root(target_probs: Tensor, tree: DraftTree, keys: Tensor, lengths: Tensor) -> Tensor:
        return winners(target_probs, shared_noise(keys, lengths[:, None] + 1, target_probs.shape[2]))

    monkeypatch.setattr(specdec.engine.round, "decided", by_root)
    drafter = ModelDrafter(perturbed(model, 0.3), 3, sampling="coupled")
    engine = Engine(Target(model), drafter, SharedNoiseVerifier(), max_batch_size=3, max_length=40)
    assert [list(output.token_ids) for output in engine.generate(PROMPTS, SAMPLING)] != expected
    assert [list(output.token_ids) for output in engine.generate(PROMPTS, SAMPLING, speculate=False)] == expected
