"""transformers' generation config and its processors as our parameters: the same processors, order, law and tokens."""

from typing import Any

import pytest
import torch
from transformers import (
    EpsilonLogitsWarper,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkingConfig,
)

from specdec.engine.processors import process
from specdec.generation import from_generation_config
from specdec.generation.config import sampling_fields
from specdec.requests import SamplingParams
from specdec.sampling import adjust, distribution
from tests.forwards import slots_of
from tests.models import tiny_model

VOCAB = 32
PROMPT = [5, 6, 7, 8, 9, 5]


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=VOCAB, layers=1)


def test_a_config_is_translated() -> None:
    sampled = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "num_return_sequences": 2}
    config = GenerationConfig(**sampled, max_new_tokens=33, eos_token_id=[2, 5], stop_strings=["x"])
    sampling = from_generation_config(config, seed=4)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.7, 50, 0.9)
    assert (sampling.max_new_tokens, sampling.stop_token_ids, sampling.stop, sampling.n) == (33, (2, 5), ("x",), 2)
    assert sampling.ignore_eos, "the config's EOS tokens replace the target's, as in generate"
    plain = from_generation_config(GenerationConfig(max_new_tokens=3))
    assert plain.greedy and not plain.ignore_eos
    assert from_generation_config(GenerationConfig(max_length=30), prompt_length=8).max_new_tokens == 22


def of_transformers(model, config: GenerationConfig, prompt: list[int]) -> list[Any]:
    """The processors that ``generate`` makes of a config."""
    made: list[Any] = []

    def capture(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs) -> torch.Tensor:
        made.extend(logits_processor)
        return input_ids

    model.generate(torch.tensor([prompt]), generation_config=config, custom_generate=capture)
    return made


def described(processor: Any) -> tuple[str, dict[str, Any]]:
    """A processor's class and what it was made with."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return type(processor).__name__, {name: plain(value) for name, value in vars(processor).items()}


MANY: dict[str, Any] = {
    "sequence_bias": [[[3], 5.0], [[4, 5], -2.0]],
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[7], [8, 9]],
    "min_new_tokens": 4,
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 0,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (3, 1.5),
    "suppress_tokens": [10, 11],
    "begin_suppress_tokens": [12],
    "temperature": 0.8,
    "top_h": 0.9,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.05,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.02,
    "renormalize_logits": True,
}


@pytest.mark.parametrize("prompt_length", [1, 6])
def test_each_field_alone_makes_what_transformers_makes_of_it(model, prompt_length: int) -> None:
    """The built-in ones too: what stands for them has their values. A prompt of one token is special to `generate`."""
    prompt = PROMPT[:prompt_length]
    built_in = {"repetition_penalty", "temperature", "top_k", "top_p", "min_p"}
    for name, value in (MANY | {"min_length": 8}).items():
        arguments = {"top_k": 0} | {name: value}
        config = GenerationConfig(**arguments, do_sample=True, eos_token_id=[2], max_new_tokens=9)
        ours = from_generation_config(config, prompt_length=prompt_length)
        theirs = of_transformers(model, config, prompt)
        if name in built_in:
            assert getattr(ours, name) == value and not ours.processors and len(theirs) == 1
        else:
            assert [described(p) for p in ours.processors] == [described(p) for p in theirs], name
            assert len(theirs) >= 1


def ours_of(fields: dict[str, Any], ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """What our engine draws from at the end of a sequence."""
    sampling = SamplingParams(**fields)
    state = slots_of([ids[0].tolist()], vocab_size=VOCAB, params=[sampling]).sampling
    scores = adjust(logits[None], state, ids[:, None, -1:])
    return distribution(process(sampling.processors, ids, scores[:, 0])[:, None], state)[0, 0]


PENALTY = RepetitionPenaltyLogitsProcessor(1.7)
COLD = TemperatureLogitsWarper(0.5)
LISTS: dict[str, list[Any]] = {
    "our order": [
        PENALTY,
        NoRepeatNGramLogitsProcessor(2),
        SuppressTokensLogitsProcessor([1]),
        COLD,
        TopKLogitsWarper(9),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.1),
    ],
    "two top-k, the narrow one last": [TopKLogitsWarper(20), TopKLogitsWarper(3)],
    "two temperatures": [COLD, TemperatureLogitsWarper(3.0)],
    "bias before the penalty": [SequenceBiasLogitsProcessor({(5,): 3.0}), PENALTY],
    "top-p before the temperature": [TopPLogitsWarper(0.6), COLD],
    "top-p keeps some": [TopPLogitsWarper(0.05, min_tokens_to_keep=4)],
    "top-p of nothing keeps one": [TopPLogitsWarper(0.0)],
    "top-k keeps some": [TopKLogitsWarper(1, min_tokens_to_keep=4)],
    "top-k that does not forbid": [TopKLogitsWarper(3, filter_value=-2.0)],
    "a penalty of the end": [RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=3)],
    "typical after top-k": [TopKLogitsWarper(9), TypicalLogitsWarper(0.5)],
    "epsilon, then normalized": [COLD, EpsilonLogitsWarper(0.05), LogitNormalization()],
}


@pytest.mark.parametrize("case", LISTS)
def test_a_list_of_processors_gives_the_law_that_it_has_in_transformers(case: str) -> None:
    ids = torch.tensor([PROMPT])
    generator = torch.Generator().manual_seed(3)
    for _ in range(8):
        logits = torch.randn(1, VOCAB, generator=generator) * 2
        scores = LogitsProcessorList(LISTS[case])(ids, logits)
        law = ours_of(sampling_fields(LISTS[case], sample=True), ids, logits)
        torch.testing.assert_close(law, scores.softmax(-1)[0], rtol=1e-5, atol=1e-6)
        first = ours_of(sampling_fields(LISTS[case], sample=False), ids, logits)
        assert first.argmax() == scores.argmax() and first.max() == 1


def test_a_field_that_is_set_is_translated_or_refused_by_name() -> None:
    for fields, words in (
        ({"num_beams": 4}, "num_beams=4"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0"),
        ({"max_time": 1.0}, "max_time=1.0"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
        ({"watermarking_config": WatermarkingConfig()}, "watermarking_config="),
        ({"a_field_of_the_future": 1}, "a_field_of_the_future=1"),
        ({"min_new_tokens": 1, "eos_token_id": 2}, "min_new_tokens=1, .* prompt_length"),
        ({"forced_eos_token_id": 0}, "forced_eos_token_id=0, .* prompt_length"),
        ({"begin_suppress_tokens": [0]}, "prompt_length"),
        ({"min_length": 5}, "min_length=5, but no eos_token_id"),
        ({"max_new_tokens": None, "max_length": 30}, "set max_new_tokens, or give prompt_length"),
    ):
        with pytest.raises(ValueError, match=words):
            from_generation_config(GenerationConfig(**{"max_new_tokens": 3} | fields))
    with pytest.raises(ValueError, match=r"max_length=30 .* prompt of 30"):
        from_generation_config(GenerationConfig(max_length=30), prompt_length=30)
