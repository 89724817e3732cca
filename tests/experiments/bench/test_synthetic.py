"""Synthetic drafts: accepted as often as asked for, the output of plain decoding, and what is refused."""

from dataclasses import replace

import pytest
from scipy.stats import binomtest

from experiments.bench.synthetic import SyntheticDrafter, SyntheticSession
from specdec.checks.reference import reference_decode
from specdec.engine.engine import Engine
from specdec.interfaces import Sizes
from specdec.physics.speculation import tokens_per_round
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.types import Step
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from verifiers.rejection import RejectionVerifier

RATES = (0.9, 0.5, 0.8)
PROMPTS = [[1 + i % 60, 2, 3 * i % 61] for i in range(96)]
MODEL = tiny_model(layers=2)


def engine_with(drafter: SyntheticDrafter, **options: int) -> Engine:
    return Engine(Target(MODEL), drafter, RejectionVerifier(), max_length=256, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    """Rounds of 96 requests of 30 tokens, those at an output's end left out: they have room for fewer drafts."""
    drafter, sampling = SyntheticDrafter(RATES, depth=None), SamplingParams(max_new_tokens=30, ignore_eos=True)
    engine = engine_with(drafter, max_batch_size=96)
    with shapes_unchecked():
        for output in engine.generate(PROMPTS, replace(sampling, max_new_tokens=33), speculate=False):
            drafter.learn(output.prompt_ids, output.token_ids)
        outputs = engine.generate(PROMPTS, sampling)
    return [step for output in outputs for step in output.steps if step.proposed_depth == len(RATES)]


def refuted(steps: list[Step], rates: tuple[float, ...]) -> bool:
    """Whether acceptance by position, given that all before was accepted, contradicts these rates.

    Two-sided binomial tests at 1e-4 each: right rates are refuted once in about 3,300 seeds.
    """
    reached = [[step for step in steps if step.accepted >= i] for i in range(len(rates))]
    accepted = [sum(step.accepted > i for step in those) for i, those in enumerate(reached)]
    return any(
        binomtest(count, len(those), rate).pvalue < 1e-4
        for count, those, rate in zip(accepted, reached, rates, strict=True)
    )


def test_acceptance_by_position_is_what_was_asked_for(steps: list[Step]) -> None:
    assert len(steps) > 600
    assert not refuted(steps, RATES)
    mean = sum(step.accepted + 1 for step in steps) / len(steps)
    # 600 rounds with a standard deviation of about 1.1: five standard errors.
    assert mean == pytest.approx(tokens_per_round(RATES), abs=0.23)


@pytest.mark.parametrize("rates", [(0.8, 0.5, 0.8), (0.9, 0.6, 0.8), (0.9, 0.5, 0.65), (0.5, 0.9, 0.8)])
def test_other_rates_are_refuted(steps: list[Step], rates: tuple[float, ...]) -> None:
    assert refuted(steps, rates)


class OffByOne(SyntheticDrafter):
    """Drafts what comes one token later: what a drafter does that forgets that the root is in the sequence."""

    def bind(self, target: Target, sizes: Sizes) -> SyntheticSession:
        session = super().bind(target, sizes)
        session._steps += 1
        return session


def test_a_drafter_that_looks_at_the_wrong_place_is_refuted() -> None:
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with shapes_unchecked():
        outputs = engine_with(OffByOne(RATES, depth=None), max_batch_size=8).generate(PROMPTS[:16], sampling)
    assert refuted([s for o in outputs for s in o.steps if s.proposed_depth >= 2], RATES)


@pytest.mark.parametrize("accept", [0.0, 0.7, 1.0])
def test_the_output_is_that_of_plain_decoding(accept: float) -> None:
    drafter = SyntheticDrafter(accept, 3)
    engine = engine_with(drafter, max_batch_size=2)
    sampling = SamplingParams(max_new_tokens=20)
    outputs = engine.generate(PROMPTS[:3], sampling)
    assert [list(o.token_ids) for o in outputs] == [reference_decode(MODEL, p, sampling) for p in PROMPTS[:3]]
    rounds = [len(output.steps) for output in outputs]
    if accept != 0.7:
        assert rounds == [5 if accept else 20] * 3, "4 tokens per round, or one"


def test_a_penalized_request_has_a_continuation_of_its_own() -> None:
    engine = engine_with(SyntheticDrafter(1.0, 4))
    sampling = SamplingParams(max_new_tokens=20)
    plain, penalized = (engine.generate(PROMPTS[:1], replace(sampling, repetition_penalty=p))[0] for p in (1.0, 1.5))
    assert plain.token_ids != penalized.token_ids
    assert len(plain.steps) == len(penalized.steps) == 4


def test_a_longer_request_is_decoded_again() -> None:
    engine = engine_with(SyntheticDrafter(1.0, 4))
    for count in (5, 25):
        output = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=count))[0]
        assert len(output.steps) == count // 5


def test_what_was_learned_is_drafted() -> None:
    drafter = SyntheticDrafter(1.0, 4)
    engine = engine_with(drafter)
    prompt, sampling = PROMPTS[0], SamplingParams(max_new_tokens=20)
    right = engine.generate([prompt], sampling)[0]
    drafter.learn(prompt, [(token + 1) % 64 for token in right.token_ids])
    wrong = engine.generate([prompt], sampling)[0]
    assert wrong.token_ids == right.token_ids
    assert len(right.steps) == 4 and len(wrong.steps) == 20, "no wrong draft is accepted"
    drafter.learn(prompt, right.token_ids)
    assert len(engine.generate([prompt], sampling)[0].steps) == 4


def test_a_sampled_request_gets_the_same_law() -> None:
    """Its drafts are judged like any other deterministic ones; the generic tests check the distribution."""
    engine = engine_with(SyntheticDrafter(1.0, 4))
    outputs = engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=20, temperature=1.0))
    assert all(len(output.token_ids) == 20 for output in outputs)
    assert any(step.proposed_nodes for output in outputs for step in output.steps)


def test_drafting_takes_the_time_it_is_said_to_take() -> None:
    engine = engine_with(SyntheticDrafter(1.0, 4, cost=0.01))
    engine.timer.enabled = True
    steps = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=10))[0].steps
    assert all(step.seconds["draft"] >= 0.01 for step in steps)
