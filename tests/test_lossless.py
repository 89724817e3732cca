"""Token for token: every drafter x verifier x architecture equals plain decoding written the obvious way.

Ragged prompts, more requests than slots (so slots are refilled), chunked prefill, and greedy rows that share the
batch with sampled and penalized ones. float32.

By default every drafter with rejection, every rule with the drafts that ask most of it, and every architecture with
one tree. Marked ``full``: one of the other rules for every drafter with Llama, in turn, and one drafter of a kind with
the other models. Recurrent layers and caches of one byte per number take part with a few drafters each.
"""

import functools
import itertools
import random
from collections.abc import Iterator

import pytest
from _pytest.mark.structures import ParameterSet
from transformers import PreTrainedModel

from drafters import ModelDrafter
from specdec import Engine, Noise, SamplingParams, Target
from specdec.cache.formats import FORMATS
from tests.architectures import tiny
from tests.components import DRAFTERS, EVERYWHERE, STRONGEST, TRIED_WITH, VERIFIERS, skip_unfit, tried
from tests.models import ARCHITECTURES, tiny_model
from tests.reference import reference_decode
from tests.shapes import shapes_unchecked
from tests.verifiers.cases import complete, spread

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

MAIN = "qwen3"
"""A model whose outputs every format of a cache changes."""
SOME = {*spread(DRAFTERS, [rule for rule in VERIFIERS if rule not in (EVERYWHERE, *TRIED_WITH)])} | {
    (drafter, rule) for rule, drafters in TRIED_WITH.items() for drafter in drafters
}
"""Pairs that are tried with Llama: greedy rows ask the same of all rules."""
RECURRENT = ("qwen3_next", "mamba", "falcon_h1", "lfm2")
ELSEWHERE = (
    *(("qwen3_next", "eagle3_expansion", EVERYWHERE, None), ("mamba", "recycling", EVERYWHERE, None)),
    *((name, "ngram", EVERYWHERE, "int8") for name in ("mistral_sliding", "gemma2")),
    *((MAIN, drafter, EVERYWHERE, "fp8") for drafter in (STRONGEST[EVERYWHERE], "ngram")),
    *((MAIN, STRONGEST[rule], rule, "int8") for rule in ("traversal", "shared_noise")),
    *((MAIN, "medusa", EVERYWHERE, "int8"), (MAIN, "ngram", EVERYWHERE, "fp8_e5m2")),
)
"""Cases of recurrent models and of quantized caches that run by default."""
MORE = (
    *((name, "ngram", EVERYWHERE, None) for name in RECURRENT),
    *(("qwen3_next", drafter, EVERYWHERE, None) for drafter in ("medusa", "block_chain")),
    *((MAIN, "ngram", EVERYWHERE, form) for form in FORMATS),
)


def target_model(architecture: str = "llama") -> PreTrainedModel:
    if architecture in RECURRENT:
        return tiny(architecture)
    return tiny_model(architecture, vocab_size=VOCAB, layers=2 if architecture == "llama" else None)


@functools.cache
def reference(architecture: str, noise: Noise = Noise.FRESH, kv_cache: str | None = None) -> list[list[int]]:
    model = target_model(architecture)
    with shapes_unchecked():
        return [
            reference_decode(model, p, s.seeded(i), noise=noise, kv_cache=kv_cache)
            for i, (p, s) in enumerate(zip(prompts(), SAMPLING, strict=True))
        ]


def cases() -> Iterator[ParameterSet]:
    """Every case; outside of ``ELSEWHERE`` and the strong ones they are marked ``full``."""
    for architecture, drafter, verifier in itertools.product(ARCHITECTURES, DRAFTERS, VERIFIERS):
        strongest, everywhere = STRONGEST[verifier] == drafter, verifier == EVERYWHERE
        llama = architecture == "llama" and (everywhere or strongest or (drafter, verifier) in SOME)
        if (llama or (everywhere and drafter in ACROSS)) and tried(drafter, verifier):
            strong = strongest or (architecture == "llama" and everywhere)
            yield complete(architecture, drafter, verifier, None, strong=strong)
    others = dict.fromkeys([*ELSEWHERE, *MORE])
    yield from (complete(*case, strong=case in ELSEWHERE) for case in others)


@pytest.mark.parametrize(("architecture", "drafter", "verifier", "kv_cache"), [*cases()])
def test_speculation_equals_the_reference(architecture: str, drafter: str, verifier: str, kv_cache: str | None) -> None:
    """Sampled rows, too, where drafter and target share their noise, and where nothing is drafted."""
    model = target_model(architecture)
    made, rule = DRAFTERS[drafter](model), VERIFIERS[verifier]()
    skip_unfit(made, rule)
    if isinstance(made, ModelDrafter):
        made.kv_cache = kv_cache
    engine = Engine(Target(model), made, rule, max_batch_size=3, max_length=64, prefill_chunk=7, kv_cache=kv_cache)
    outputs = engine.generate(prompts(), SAMPLING)
    wanted = reference(architecture, rule.noise, kv_cache)
    for output, sampling, expected in zip(outputs, SAMPLING, wanted, strict=True):
        assert len(output.token_ids) == sampling.max_new_tokens
        if sampling.greedy or rule.noise is Noise.SHARED:
            assert list(output.token_ids) == expected
    # The comparison means something only if drafts were judged on the way.
    steps = [step for o, p in zip(outputs, SAMPLING, strict=True) if p.greedy for step in o.steps]
    assert any(step.proposed_nodes for step in steps)
    strongest, special = drafter == STRONGEST[verifier], architecture in RECURRENT or kv_cache is not None
    if strongest or special:  # plain decoding beside a drafter
        plain = engine.generate(prompts(), SAMPLING, speculate=False)
        assert [list(output.token_ids) for output in plain] == wanted
        if rule.noise is Noise.SHARED and kv_cache is None:  # logprobs are those under p, not under the draw
            both = [[x for output in each for step in output.steps for x in step.logprobs] for each in (outputs, plain)]
            assert both[0] == pytest.approx(both[1], abs=1e-4) and any(-5 < x < -0.1 for x in both[0])
    if rule.noise is Noise.SHARED:
        judged = [step for output in outputs for step in output.steps]
        assert all(step.expected_accepted == step.accepted for step in judged), "given the tree nothing is random"
    if strongest or architecture in RECURRENT:  # drafts that agree, but not always
        steps = steps if strongest else [step for output in outputs for step in output.steps]
        assert sum(step.accepted for step in steps) > (len(steps) / 2 if strongest else 0)
        assert any(step.accepted < step.proposed_depth for step in steps)


def test_plain_decoding_equals_the_reference_sampled_rows_included() -> None:
    engine = Engine(Target(target_model()), max_batch_size=3, max_length=64, prefill_chunk=7)
    assert [list(output.token_ids) for output in engine.generate(prompts(), SAMPLING)] == reference("llama")
