"""Our engine inside transformers' generate: the same tokens as its own loop."""

from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from drafters.model import ModelDrafter
from specdec.generation import SpeculativeGenerate
from specdec.interfaces import Verifier
from specdec.requests import SamplingParams
from tests.components import DRAFTERS, perturbed
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from tests.specdec.generation.calls import PAD, VOCAB, batch, penalties
from tests.test_distribution import LENGTH, LEVEL, NO_RESIDUAL, PROMPT, exact_law, goodness
from verifiers.rejection import RejectionVerifier


def allowed(batch_id: int, tokens: torch.Tensor) -> list[int]:
    """A constraint that depends on all that ``prefix_allowed_tokens_fn`` is given, padding included."""
    return [t for t in range(VOCAB) if (t + 5 * batch_id + len(tokens) + int(tokens[-1])) % 3]


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"eos_token_id": [3, 17, 20], "pad_token_id": None},
    {"sequence_bias": [[[3], 5.0]], "repetition_penalty": 1.2},
    {"num_return_sequences": 1, "logits_processor": [NoRepeatNGramLogitsProcessor(3)]},
    {"prefix_allowed_tokens_fn": allowed},
    {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria([3, 17, 20])]), "eos_token_id": list(range(12))},
    {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(9)])},
    {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(2)])},
    # A penalty that the user makes counts the padding, too.
    {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.6)], "sequence_bias": [[[PAD], 1.0], [[3], 1.0]]},
    {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.6, prompt_ignore_length=3)]},
    {"logits_processor": penalties(6, 0, 1), "sequence_bias": [[[PAD], 1.0], [[3], 1.0]]},
    {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")},
]
"""Those that ``test_random_calls.py`` does not combine."""


@pytest.mark.parametrize(
    ("drafter", "arguments"),
    [(None, {}), ("ngram", {}), *(("model_tree_iid", arguments) for arguments in ARGUMENTS)],
    ids=lambda value: ", ".join(value) or "nothing" if isinstance(value, dict) else str(value),
)
def test_greedy_generate_is_unchanged(model, drafter: str | None, arguments: dict[str, Any]) -> None:
    ours = SpeculativeGenerate(DRAFTERS[drafter](model), RejectionVerifier()) if drafter else SpeculativeGenerate()
    common = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD} | arguments
    plain = model.generate(**batch(), **common)
    if len(arguments) > 0 and arguments.get("num_return_sequences") != 1:
        without = model.generate(**batch(), max_new_tokens=12, pad_token_id=PAD)
        assert not torch.equal(plain, without), "it has no effect"
    assert torch.equal(model.generate(**batch(), **common, custom_generate=ours), plain)
    assert torch.equal(model.generate(**batch(), **common, custom_generate=ours), plain)  # the engine is kept


def sampled(verifier: Verifier) -> tuple[float, bool]:
    """Chi-square p-value of 2000 outputs of three tokens, and whether the seed repeats the first 500."""
    model = tiny_model(vocab_size=5, scale=1.5, layers=2)
    prompt = torch.tensor([PROMPT] * 500)
    ours = SpeculativeGenerate(ModelDrafter(perturbed(model, 0.6), 2), verifier)
    processors = [NoRepeatNGramLogitsProcessor(2)]
    common = {"max_new_tokens": LENGTH, "do_sample": True, "top_k": 4, "temperature": 1.3, "pad_token_id": 0}
    common |= {"logits_processor": processors, "custom_generate": ours}

    def drawn() -> torch.Tensor:
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **common)[:, len(PROMPT) :]

    torch.manual_seed(1)
    rows = [drawn()]
    with shapes_unchecked():
        rows += [drawn() for _ in range(3)]
    torch.manual_seed(1)
    repeated = torch.equal(drawn(), rows[0])
    law = exact_law(model, SamplingParams(temperature=1.3, top_k=4, logits_processor=processors))
    counts = dict.fromkeys(law, 0)
    for row in torch.cat(rows).tolist():
        counts[tuple(row)] += 1
    return goodness(counts, law, 2000), repeated


@pytest.mark.full
def test_sampled_generate_follows_the_target() -> None:
    """Seeded; a correct engine would fail with one seed in 100 000."""
    level, repeated = sampled(RejectionVerifier())
    assert level > LEVEL
    assert repeated, "torch's seed repeats the output"


@pytest.mark.full
def test_a_biased_rule_is_rejected_through_generate() -> None:
    """With the same seed and number of outputs."""
    assert sampled(NO_RESIDUAL)[0] < LEVEL


class Heard(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.put_: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.put_.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_tokens_arrive_round_by_round(model) -> None:
    """At a streamer, and at a function."""
    ours = SpeculativeGenerate(DRAFTERS["model_chain_iid"](model), RejectionVerifier())
    heard, got = Heard(), []
    prompt, common = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 9, "custom_generate": ours}
    output = model.generate(prompt, **common, streamer=heard, on_tokens=lambda tokens: got.extend(tokens.tolist()))
    assert heard.put_[0] == [1, 2, 3]  # by transformers itself
    assert [token for tokens in heard.put_[1:] for token in tokens] == output[0, 3:].tolist() == got
    assert len(heard.put_) == 1 + len(ours.completions[0].steps)
    assert heard.ended == 1
    # The next call has none, and does not find the old one.
    model.generate(prompt, **common)
    assert heard.ended == 1
    for given in ({"streamer": Heard()}, {"on_tokens": print}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} follows one sequence"):
            model.generate(**batch(), **common, **given, pad_token_id=PAD)


def test_the_steps_of_a_call_can_be_looked_at(model) -> None:
    ours = SpeculativeGenerate(DRAFTERS["model_chain_iid"](model), RejectionVerifier())
    output = model.generate(**batch(), max_new_tokens=12, custom_generate=ours, pad_token_id=PAD)
    assert len(ours.completions) == 3
    for row, completion in enumerate(ours.completions):
        assert list(completion.prompt_ids) == [t for t in batch()["input_ids"][row].tolist() if t != PAD]
        assert list(completion.token_ids) == output[row, 6 : 6 + len(completion.token_ids)].tolist()
        assert [token for step in completion.steps for token in step.token_ids] == list(completion.token_ids)
        assert completion.mean_acceptance_length is not None
        assert completion.mean_acceptance_length > 1
        assert completion.finish_reason == "length"


def test_a_callback_that_fails_leaves_nothing_behind(model) -> None:
    def failing(tokens: torch.Tensor) -> None:
        raise OSError("the reader has gone")

    ours = SpeculativeGenerate()
    prompt = torch.tensor([[1, 2, 3]])
    with pytest.raises(OSError, match="the reader has gone"):
        model.generate(prompt, max_new_tokens=9, custom_generate=ours, on_tokens=failing)
    plain = model.generate(prompt, max_new_tokens=9)
    assert torch.equal(model.generate(prompt, max_new_tokens=9, custom_generate=ours), plain)


def test_a_dictionary_is_returned_where_one_is_asked_for(model) -> None:
    common = {"max_new_tokens": 6, "pad_token_id": PAD, "return_dict_in_generate": True}
    output = model.generate(**batch(), **common, custom_generate=SpeculativeGenerate())
    assert isinstance(output, GenerateDecoderOnlyOutput)
    assert torch.equal(output.sequences, model.generate(**batch(), **common).sequences)


def test_samples_of_a_prompt_have_batch_ids_of_their_own(model) -> None:
    """As transformers numbers them: the samples of a prompt stand together."""

    def prompts_seen(**arguments: Any) -> dict[int, tuple[int, ...]]:
        seen: dict[int, tuple[int, ...]] = {}

        def note(batch_id: int, tokens: torch.Tensor) -> list[int]:
            seen[batch_id] = tuple(tokens[:6].tolist())
            return list(range(VOCAB))

        common = {"max_new_tokens": 3, "do_sample": True, "num_return_sequences": 2, "pad_token_id": PAD}
        model.generate(**batch(), **common, prefix_allowed_tokens_fn=note, **arguments)
        return seen

    plain = prompts_seen()
    assert len(plain) == 6
    assert prompts_seen(custom_generate=SpeculativeGenerate()) == plain


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = tiny_model(vocab_size=VOCAB, layers=2)
    ours = SpeculativeGenerate()
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, custom_generate=ours)
    model.get_output_embeddings().weight.data[3] = torch.nan
    with pytest.raises(RuntimeError, match="row 0: the logits or the draft's probabilities were not finite"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, custom_generate=ours)


@pytest.mark.parametrize("architecture", ["gpt2", "mistral_sliding"])
def test_left_padding_in_other_models(architecture: str) -> None:
    model = tiny_model(architecture, vocab_size=VOCAB)
    ours = SpeculativeGenerate(DRAFTERS["ngram"](model), RejectionVerifier())
    common = {"max_new_tokens": 12, "pad_token_id": PAD, "no_repeat_ngram_size": 3}
    assert torch.equal(model.generate(**batch(), **common, custom_generate=ours), model.generate(**batch(), **common))


def test_an_empty_cache_and_the_usual_positions_change_nothing(model) -> None:
    inputs, common = batch(), {"max_new_tokens": 5, "pad_token_id": PAD}
    plain = model.generate(**inputs, **common)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    for given in ({"position_ids": positions, "past_key_values": DynamicCache()}, {"cache_implementation": "static"}):
        found = model.generate(**inputs, **common, **given, custom_generate=SpeculativeGenerate())
        assert torch.equal(found, plain)
