"""Synthetic drafts: accepted as often as asked for, the output of plain decoding, and what is refused."""

from dataclasses import replace

import pytest
from scipy.stats import binomtest

from experiments.bench.synthetic import SyntheticDrafter, SyntheticSession
from specdec import Engine, SamplingParams, Sizes, Step, Target
from specdec.checks.reference import reference_decode
from specdec.physics.speculation import tokens_per_round
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


def test_every_request_is_drafted_its_own_continuation() -> None:
    """Also one that is longer than before, or penalized, or whose continuation was given; drafting takes its time."""
    drafter, prompt, sampling = SyntheticDrafter(1.0, 4, cost=0.01), PROMPTS[0], SamplingParams(max_new_tokens=5)
    engine = engine_with(drafter)
    engine.timer.enabled = True
    longer = replace(sampling, max_new_tokens=20)
    outputs = [
        engine.generate([prompt], each)[0] for each in (sampling, longer, replace(longer, repetition_penalty=1.5))
    ]
    assert [len(output.steps) for output in outputs] == [1, 4, 4]
    right, penalized = outputs[1:]
    assert right.token_ids != penalized.token_ids
    assert list(right.token_ids) == reference_decode(MODEL, prompt, longer)
    assert all(step.seconds["draft"] >= 0.01 for step in right.steps)
    drafter.learn(prompt, [(token + 1) % 64 for token in right.token_ids])
    wrong = engine.generate([prompt], longer)[0]
    assert wrong.token_ids == right.token_ids and len(wrong.steps) == 20, "no wrong draft is accepted"
