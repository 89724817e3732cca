"""Our engine inside transformers' generate, and its generation config as our parameters."""

import pytest
import scipy.stats
import torch
from transformers import GenerationConfig, NoRepeatNGramLogitsProcessor

from drafters.model import ModelDrafter
from specdec.generation import SpeculativeGenerate, from_generation_config
from specdec.requests import SamplingParams
from tests.components import DRAFTERS, perturbed
from tests.models import tiny_model
from tests.test_distribution import exact_law
from verifiers.rejection import RejectionVerifier

VOCAB, PAD = 32, 31


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=VOCAB)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[PAD, PAD, 3, 4, 3, 4], [5, 6, 7, 8, 9, 5], [PAD, 1, 2, 1, 2, 1]])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


ARGUMENTS = [
    {},
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 5, "eos_token_id": list(range(12))},
    {"eos_token_id": [3, 17, 20]},
    {"sequence_bias": [[[3], 5.0]], "repetition_penalty": 1.2},
    {"num_return_sequences": 1, "logits_processor": [NoRepeatNGramLogitsProcessor(3)]},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda options: ", ".join(options) or "nothing")
@pytest.mark.parametrize("drafter", [None, "ngram", "model_tree_iid"])
def test_greedy_generate_is_unchanged(model, drafter: str | None, arguments: dict[str, object]) -> None:
    ours = SpeculativeGenerate(DRAFTERS[drafter](model), RejectionVerifier()) if drafter else SpeculativeGenerate()
    common = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD} | arguments
    plain = model.generate(**batch(), **common)
    assert torch.equal(model.generate(**batch(), **common, custom_generate=ours), plain)
    assert torch.equal(model.generate(**batch(), **common, custom_generate=ours), plain)  # the engine is kept


@pytest.mark.parametrize("processed", [False, True])
def test_sampled_generate_follows_the_target(processed: bool) -> None:
    """Seeded chi-square on two tokens; a correct engine fails once in 100 000 seeds."""
    model = tiny_model(vocab_size=5, scale=1.5, layers=2)
    prompt = torch.tensor([[1, 2, 1, 2, 1]] * 500)
    ours = SpeculativeGenerate(ModelDrafter(perturbed(model, 0.6), 2), RejectionVerifier())
    processors = [NoRepeatNGramLogitsProcessor(2)] if processed else None
    common = {"max_new_tokens": 3, "do_sample": True, "top_k": 4, "temperature": 1.3, "pad_token_id": 0}
    common |= {"logits_processor": processors, "custom_generate": ours}
    torch.manual_seed(1)
    rows = [model.generate(prompt, attention_mask=torch.ones_like(prompt), **common)[:, 5:] for _ in range(4)]
    law = exact_law(model, SamplingParams(temperature=1.3, top_k=4, logits_processor=processors))
    outputs = [tuple(row) for row in torch.cat(rows).tolist()]
    assert all(law[output] > 0 for output in outputs)
    common_keys = [key for key, mass in law.items() if mass * len(outputs) >= 8]
    observed = [outputs.count(key) for key in common_keys]
    expected = [law[key] * len(outputs) for key in common_keys]
    observed.append(len(outputs) - sum(observed))
    expected.append(max(len(outputs) - sum(expected), 1e-9))
    assert scipy.stats.chisquare(observed, expected, sum_check=False).pvalue > 1e-5
    torch.manual_seed(1)
    again = model.generate(prompt, attention_mask=torch.ones_like(prompt), **common)
    assert torch.equal(again[:, 5:], rows[0])


def test_tokens_arrive_round_by_round(model) -> None:
    got: list[int] = []
    ours = SpeculativeGenerate(DRAFTERS["model_chain_iid"](model), RejectionVerifier())
    output = model.generate(
        torch.tensor([[1, 2, 3]]),
        max_new_tokens=9,
        custom_generate=ours,
        on_tokens=lambda tokens: got.extend(tokens.tolist()),
    )
    assert output[0, 3:].tolist() == got
    with pytest.raises(ValueError, match="on_tokens follows one sequence"):
        model.generate(**batch(), max_new_tokens=4, custom_generate=ours, on_tokens=print, pad_token_id=PAD)


def test_a_config_is_translated() -> None:
    config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        max_new_tokens=33,
        eos_token_id=[2, 5],
        stop_strings=["x"],
        num_return_sequences=2,
    )
    sampling = from_generation_config(config, seed=4)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.7, 50, 0.9)
    assert (sampling.max_new_tokens, sampling.stop_token_ids, sampling.stop, sampling.n) == (33, (2, 5), ("x",), 2)
    assert from_generation_config(GenerationConfig(max_new_tokens=3)).greedy
    assert from_generation_config(GenerationConfig(max_length=30), prompt_length=8).max_new_tokens == 22


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GenerationConfig(num_beams=4, max_new_tokens=3), "num_beams=4"),
        (GenerationConfig(do_sample=True, typical_p=0.5, max_new_tokens=3), "typical_p=0.5"),
        (GenerationConfig(guidance_scale=2.0, max_new_tokens=3), "guidance_scale=2.0"),
        (GenerationConfig(min_new_tokens=2, max_new_tokens=3), "min_new_tokens=2"),
        (GenerationConfig(max_length=30), "set max_new_tokens, or give prompt_length"),
    ],
)
def test_what_is_not_supported_is_an_error(config: GenerationConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_generation_config(config)


def test_foreign_stopping_criteria_are_refused(model) -> None:
    with pytest.raises(ValueError, match="MaxTimeCriteria"):
        model.generate(torch.tensor([[1]]), max_new_tokens=3, max_time=1.0, custom_generate=SpeculativeGenerate())
