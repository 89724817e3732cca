"""Token for token: every drafter x verifier x architecture equals plain decoding written the obvious way.

Ragged prompts, more requests than slots (so slots are refilled), chunked prefill, and greedy rows that share the
batch with sampled and penalized ones. float32.

By default every drafter with rejection, every rule with the drafts that ask most of it, and every architecture with
one tree; all pairs are marked ``full``.
"""

import functools
import random

import pytest

from specdec.checks.reference import reference_decode
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.types import Noise
from tests.components import DRAFTERS, EVERYWHERE, STRONGEST, VERIFIERS, skip_unfit, tried
from tests.models import ARCHITECTURES, tiny_model
from tests.shapes import shapes_unchecked
from tests.verifiers.cases import complete

VOCAB = 64
LENGTHS = (5, 1, 9, 30, 2, 17)
SAMPLING = (
    SamplingParams(max_new_tokens=12),
    SamplingParams(max_new_tokens=13, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=14, temperature=1.0, top_p=0.8),
    SamplingParams(max_new_tokens=15, temperature=0.7, top_k=10),
    SamplingParams(max_new_tokens=16),
    SamplingParams(max_new_tokens=17, temperature=1.3, repetition_penalty=1.2, min_p=0.05),
)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    # Repetitive, so that n-gram lookup has something to find.
    return [[rng.choice(range(0, VOCAB, 5)) for _ in range(length)] for length in LENGTHS]


@functools.cache
def reference(architecture: str, noise: Noise = Noise.FRESH) -> list[list[int]]:
    model = tiny_model(architecture, vocab_size=VOCAB)
    with shapes_unchecked():
        return [
            reference_decode(model, p, s.seeded(i), noise=noise)
            for i, (p, s) in enumerate(zip(prompts(), SAMPLING, strict=True))
        ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_decoding_equals_the_reference_sampled_rows_included(architecture: str) -> None:
    engine = Engine(
        Target(tiny_model(architecture, vocab_size=VOCAB)), max_batch_size=3, max_length=64, prefill_chunk=7
    )
    outputs = engine.generate(prompts(), SAMPLING)
    assert [list(output.token_ids) for output in outputs] == reference(architecture)


def is_strong(architecture: str, drafter: str, verifier: str) -> bool:
    return STRONGEST[verifier] == drafter or (architecture == "llama" and verifier == EVERYWHERE)


@pytest.mark.parametrize(
    ("architecture", "drafter", "verifier"),
    [
        complete(architecture, drafter, verifier, strong=is_strong(architecture, drafter, verifier))
        for architecture in ARCHITECTURES
        for drafter in DRAFTERS
        for verifier in VERIFIERS
        if (verifier == EVERYWHERE or architecture == "llama") and tried(drafter, verifier)
    ],
)
def test_greedy_speculation_equals_the_reference(architecture: str, drafter: str, verifier: str) -> None:
    """Sampled rows, too, where drafter and target share their noise."""
    model = tiny_model(architecture, vocab_size=VOCAB)
    made, rule = DRAFTERS[drafter](model), VERIFIERS[verifier]()
    skip_unfit(made, rule)
    engine = Engine(Target(model), made, rule, max_batch_size=3, max_length=64, prefill_chunk=7)
    outputs = engine.generate(prompts(), SAMPLING)
    wanted = reference(architecture, rule.noise)
    for output, sampling, expected in zip(outputs, SAMPLING, wanted, strict=True):
        assert len(output.token_ids) == sampling.max_new_tokens
        if sampling.greedy or rule.noise is Noise.SHARED:
            assert list(output.token_ids) == expected
    # The comparison means something only if drafts were judged on the way.
    assert any(step.proposed_nodes for o, p in zip(outputs, SAMPLING, strict=True) if p.greedy for step in o.steps)
    if architecture == "llama":  # plain decoding beside a drafter; in the other models it is tried without one
        plain = engine.generate(prompts(), SAMPLING, speculate=False)
        assert [list(output.token_ids) for output in plain] == wanted


@pytest.mark.parametrize("drafter", ["medusa", "model_chain_iid", "model_tree_without_replacement"])
def test_drafts_are_accepted_and_rejected(drafter: str) -> None:
    model = tiny_model(vocab_size=VOCAB)
    engine = Engine(Target(model), DRAFTERS[drafter](model), VERIFIERS["rejection"](), max_batch_size=3, max_length=64)
    steps = [step for output in engine.generate(prompts(), SAMPLING) for step in output.steps]
    assert sum(step.accepted for step in steps) > (0 if drafter == "medusa" else len(steps) * 0.5)
    assert any(step.accepted < step.proposed_depth for step in steps)
