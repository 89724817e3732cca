"""Processors and penalties at every node, and vocabularies that do not line up."""

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from drafters.model import ModelDrafter
from specdec import Engine, SamplingParams, Target
from tests.architectures import tiny
from tests.components import DRAFTERS, STRONGEST, fitting, lettered, perturbed, renumbered
from tests.models import tiny_model
from tests.reference import reference_decode
from tests.test_distribution import FEWER, LEVEL, NO_RESIDUAL, VOCAB, p_value
from tests.verifiers.cases import complete
from verifiers.rejection import RejectionVerifier

pytestmark = pytest.mark.usefixtures("untried")
WIDTH = 24
PLAIN = SamplingParams(max_new_tokens=14)

NO_REPEAT = logits_process.NoRepeatNGramLogitsProcessor
SUPPRESS = logits_process.SuppressTokensLogitsProcessor([0, 1, 2])


def masked_by_last(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.where((torch.arange(WIDTH) + ids[:, -1:]) % 3 > 0, -torch.inf)


ASKED: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.9, "frequency_penalty": 0.7, "logit_bias": {3: 2.0, 9: -1.0}},
    "early ends": {"min_new_tokens": 6, "repetition_penalty": 1.2, "logit_bias": {4: 9.0}},
    "bad words": {"bad_words_ids": [[5], [2, 7], [3]], "min_new_tokens": 3, "frequency_penalty": 2.0},
    "bias": {"logits_processor": logits_process.SequenceBiasLogitsProcessor({(3,): 4.0, (5, 7): 6.0, (2, 3, 5): -8.0})},
    "no_repeat": {"logits_processor": NO_REPEAT(2)},
    "several": {"logits_processor": LogitsProcessorList([NO_REPEAT(3), SUPPRESS])},
    "mask_by_last": {"logits_processor": masked_by_last},
}
CASES = [(STRONGEST["rejection"], case) for case in ASKED]
CASES += [("ngram", "no_repeat"), ("ngram", "penalties"), ("eagle3_chain_iid", "early ends")]


@functools.cache
def requests(case: str) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Prompts, what is asked of each, and the reference's tokens; a row without any processor shares the batch."""
    rng = random.Random(2)
    prompts = [[rng.randrange(WIDTH) for _ in range(length)] for length in (6, 1, 11)]
    wanted = [*[replace(PLAIN, stop_token_ids=(4,), **ASKED[case])] * len(prompts), PLAIN]
    prompts.append(prompts[0])
    stops = [frozenset(sampling.stop_token_ids) for sampling in wanted]
    model, rows = tiny_model(vocab_size=WIDTH), zip(prompts, wanted, stops, strict=True)
    expected = [reference_decode(model, p, s, stop_ids=stop) for p, s, stop in rows]
    without = reference_decode(model, prompts[0], PLAIN, stop_ids=stops[0])
    assert expected[0] != without
    return prompts, wanted, expected


# Every processor with one tree; other drafters with a penalty for what their path repeats: tests/test_lossless.py.
@pytest.mark.parametrize(("drafter", "case"), CASES)
def test_greedy_equals_the_reference(drafter: str, case: str) -> None:
    model = tiny_model(vocab_size=WIDTH)
    prompts, wanted, expected = requests(case)
    made = DRAFTERS[drafter](model)
    engine = Engine(Target(model), made, fitting(made), max_batch_size=3, max_length=40)
    outputs = [list(output.token_ids) for output in engine.generate(prompts, wanted)]
    assert outputs == expected
    if case == "early ends":
        assert {len(output) for output in outputs[:-1]} == {7}, "the first end that is allowed"


class Counts:
    """A processor that is no function of what it is given."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores if self.calls > 3 else scores.roll(1)


def test_scores_of_another_shape_counts_and_what_is_no_processor_are_refused() -> None:
    """One row of scores would be spread over all the nodes of a depth."""
    model = tiny_model(vocab_size=WIDTH, layers=2)
    engine = Engine(Target(model), DRAFTERS["model_tree_iid"](model), RejectionVerifier(), max_length=40)
    for processor, said in (
        (lambda ids, scores: scores[0], "return one row per row"),
        (lambda ids, scores: scores * torch.nan, "not finite"),
        (Counts(), "Counts counts"),
    ):
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8, logits_processor=processor))
        assert output.finish_reason == "error" and said in str(output.error)
    for name, value in {"logit_bias": {WIDTH: 1}, "bad_words_ids": [[1, -1]], "min_new_tokens": 99}.items():
        with pytest.raises(ValueError, match=name):
            engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8, **{name: value}))
    with pytest.raises(ValueError, match="logits_processor"):
        SamplingParams(logits_processor=["x"])


PROMPTS = ([1, 2, 3, 1, 2], [7], [9, 8] * 5)


def decode(model, drafter, prompts=PROMPTS, *, tokenizer=None, **sampling: object):
    """Completions of a new engine; plain decoding without a drafter."""
    rule = RejectionVerifier() if drafter else None
    engine = Engine(Target(model, tokenizer), drafter, rule, max_batch_size=2, max_length=64)
    return engine.generate(list(prompts), SamplingParams(max_new_tokens=20, **sampling))  # type: ignore[arg-type]


def test_padded_logits_may_be_drawn_and_have_no_text() -> None:
    tokenizer = lettered(sorted(pre_tokenizers.ByteLevel.alphabet())[33:89])  # 56 tokens, where the model has 64 logits
    model = tiny_model()
    outputs = decode(model, DRAFTERS["medusa"](model), ["Cat", "DOG"], tokenizer=tokenizer, temperature=3.0)
    drawn = [token for output in outputs for token in output.token_ids]
    assert len(tokenizer) <= max(drawn) < 64, "nothing of the padding was drawn"
    for output in outputs:
        assert output.finish_reason == "length"
        assert output.text == tokenizer.decode([token for token in output.token_ids if token < len(tokenizer)])


@pytest.mark.parametrize("drafter", [None, "ngram", "block_markov_tree", STRONGEST["rejection"]])
def test_padded_logits_may_be_at_minus_infinity(drafter: str | None) -> None:
    model = tiny("phi")
    model.lm_head.bias.data[56:] = -torch.inf
    made = DRAFTERS[drafter](model) if drafter else None
    for sampling in ({}, {"temperature": 2.0}, {"temperature": 2.0, "repetition_penalty": 1.3, "top_p": 0.95}):
        outputs = decode(model, made, **sampling)
        assert all(output.finish_reason == "length" and max(output.token_ids) < 56 for output in outputs)
        if made is None or not sampling:
            wanted = SamplingParams(max_new_tokens=20, **sampling)  # type: ignore[arg-type]
            expected = [reference_decode(model, p, wanted.seeded(i)) for i, p in enumerate(PROMPTS)]
            assert [list(output.token_ids) for output in outputs] == expected


@pytest.mark.parametrize(
    ("width", "shape"),
    [complete(VOCAB - 2, [2, 2], strong=True), complete(VOCAB + 3, 3, strong=False)],
    ids=["narrower", "wider"],
)
def test_a_drafter_of_another_width_is_lossless(width: int, shape: object) -> None:
    model = tiny_model("llama", vocab_size=VOCAB, scale=1.5, layers=2)
    twin = renumbered(perturbed(model, 0.3), [token % VOCAB for token in range(width)])
    drafter = ModelDrafter(twin, shape, sampling="iid")  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=1.0)
    assert p_value(model, drafter, RejectionVerifier(), sampling) > LEVEL
    # Mutant: a rejected draft is followed by a token from p, not from the residual.
    assert p_value(model, drafter, NO_RESIDUAL, sampling, samples=FEWER) < LEVEL
    prompts = [[1, 2, 1, 2], [4], [3] * 6]
    expected = [reference_decode(model, prompt, SamplingParams(max_new_tokens=20)) for prompt in prompts]
    assert [list(output.token_ids) for output in decode(model, drafter, prompts)] == expected
