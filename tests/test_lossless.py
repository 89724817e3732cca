"""Token for token: every drafter x verifier x architecture equals plain decoding written the obvious way.

Ragged prompts, more requests than slots (so slots are refilled), chunked prefill, and greedy rows that share the
batch with sampled and penalized ones. float32.

By default every drafter with rejection, every rule with the drafts that ask most of it, and every architecture with
one tree; all rules with Llama, and a drafter of every kind with the other models, are marked ``full``.
"""

import functools
import random

import pytest
from transformers import PreTrainedModel

from specdec import Engine, Noise, SamplingParams, Target
from specdec.checks.reference import reference_decode
from tests.components import DRAFTERS, EVERYWHERE, STRONGEST, VERIFIERS, skip_unfit, tried
from tests.models import ARCHITECTURES, tiny_model
from tests.shapes import shapes_unchecked
from tests.verifiers.cases import complete

pytestmark = pytest.mark.usefixtures("untried")

VOCAB = 64
LENGTHS = (5, 1, 9, 30, 2, 17)
SAMPLING = (
    SamplingParams(max_new_tokens=12),
    SamplingParams(max_new_tokens=11, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=6, temperature=1.0, top_p=0.8),
    SamplingParams(max_new_tokens=7, temperature=0.7, top_k=10),
    SamplingParams(max_new_tokens=10),
    SamplingParams(max_new_tokens=8, temperature=1.3, repetition_penalty=1.2, min_p=0.05),
)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    # Repetitive, so that n-gram lookup has something to find.
    return [[rng.choice(range(0, VOCAB, 5)) for _ in range(length)] for length in LENGTHS]


ACROSS = ("ngram", "medusa", "eagle3_chain_iid", "block_chain", "mtp_chain_iid", STRONGEST[EVERYWHERE])
"""One drafter of every kind, for the models besides Llama."""


def target_model(architecture: str = "llama") -> PreTrainedModel:
    return tiny_model(architecture, vocab_size=VOCAB, layers=2 if architecture == "llama" else None)


@functools.cache
def reference(architecture: str, noise: Noise = Noise.FRESH, kv_cache: str | None = None) -> list[list[int]]:
    model = target_model(architecture)
    with shapes_unchecked():
        return [
            reference_decode(model, p, s.seeded(i), noise=noise, kv_cache=kv_cache)
            for i, (p, s) in enumerate(zip(prompts(), SAMPLING, strict=True))
        ]


def is_strong(architecture: str, drafter: str, verifier: str) -> bool:
    return STRONGEST[verifier] == drafter or (architecture == "llama" and verifier == EVERYWHERE)


@pytest.mark.parametrize(
    ("architecture", "drafter", "verifier"),
    [
        complete(architecture, drafter, verifier, strong=is_strong(architecture, drafter, verifier))
        for architecture in ARCHITECTURES
        for drafter in DRAFTERS
        for verifier in VERIFIERS
        if (architecture == "llama" or (verifier == EVERYWHERE and drafter in ACROSS)) and tried(drafter, verifier)
    ],
)
def test_speculation_equals_the_reference(architecture: str, drafter: str, verifier: str) -> None:
    """Sampled rows, too, where drafter and target share their noise, and where nothing is drafted."""
    model = target_model(architecture)
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
    steps = [step for o, p in zip(outputs, SAMPLING, strict=True) if p.greedy for step in o.steps]
    assert any(step.proposed_nodes for step in steps)
    if drafter == STRONGEST[verifier]:  # plain decoding beside a drafter, and drafts that agree, but not always
        plain = engine.generate(prompts(), SAMPLING, speculate=False)
        assert [list(output.token_ids) for output in plain] == wanted
        assert sum(step.accepted for step in steps) > len(steps) / 2
        assert any(step.accepted < step.proposed_depth for step in steps)


def test_plain_decoding_equals_the_reference_sampled_rows_included() -> None:
    engine = Engine(Target(target_model()), max_batch_size=3, max_length=64, prefill_chunk=7)
    assert [list(output.token_ids) for output in engine.generate(prompts(), SAMPLING)] == reference("llama")
