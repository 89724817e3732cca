"""Our engine inside transformers' generate: the same tokens as its own loop, and few engines made."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    WatermarkingConfig,
)

from drafters.model import ModelDrafter
from specdec import Engine, SamplingParams, Target, Verifier
from specdec.generation import SpeculativeGenerate, from_model, generate
from tests.components import DRAFTERS, perturbed
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from tests.specdec.generation.test_calls import PAD, VOCAB, batch, letters, penalties
from tests.test_distribution import LENGTH, LEVEL, NO_RESIDUAL, PROMPT, exact_law, goodness
from verifiers.rejection import RejectionVerifier


def allowed(batch_id: int, tokens: torch.Tensor) -> list[int]:
    """A constraint that depends on all that ``prefix_allowed_tokens_fn`` is given, padding included."""
    return [t for t in range(VOCAB) if (t + 5 * batch_id + len(tokens) + int(tokens[-1])) % 3]


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"eos_token_id": [2, 13, 20], "pad_token_id": None},
    {"num_return_sequences": 1, "logits_processor": [NoRepeatNGramLogitsProcessor(3)]},
    {"prefix_allowed_tokens_fn": allowed},
    {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria([2, 13, 20])]), "eos_token_id": list(range(12))},
    {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(9)])},
    {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(2)])},
    # A penalty that the user makes counts the padding, too.
    {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.6)], "sequence_bias": [[[PAD], 1.0], [[3], 1.0]]},
    {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.6, prompt_ignore_length=3)]},
    {"logits_processor": penalties(6, 0, 1), "sequence_bias": [[[PAD], 1.0], [[3], 1.0]]},
    {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")},
]
"""Those that random calls do not combine."""


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
def test_sampled_generate_follows_the_target_and_with_a_biased_rule_does_not() -> None:
    level, repeated = sampled(RejectionVerifier())
    assert level > LEVEL
    assert repeated, "torch's seed repeats the output"
    assert sampled(NO_RESIDUAL)[0] < LEVEL


def test_tokens_arrive_round_by_round(model) -> None:
    """At a streamer, and at a function."""
    ours = SpeculativeGenerate(DRAFTERS["model_chain_iid"](model), RejectionVerifier())
    heard, got = Mock(), []
    prompt, common = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 9, "custom_generate": ours}
    output = model.generate(prompt, **common, streamer=heard, on_tokens=lambda tokens: got.extend(tokens.tolist()))
    first, *rounds = [call.args[0].flatten().tolist() for call in heard.put.call_args_list]
    assert first == [1, 2, 3]  # by transformers itself
    assert [token for tokens in rounds for token in tokens] == output[0, 3:].tolist() == got
    assert len(rounds) == len(ours.completions[0].steps)
    # The next call has none, and does not find the old one.
    model.generate(prompt, **common)
    assert heard.end.call_count == 1
    for given in ({"streamer": Mock()}, {"on_tokens": print}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} follows one sequence"):
            model.generate(**batch(), **common, **given, pad_token_id=PAD)


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = tiny_model(vocab_size=VOCAB, layers=2)
    ours = SpeculativeGenerate()
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, custom_generate=ours)
    model.model.norm.weight.data[3] = torch.nan  # which is read where it is
    with pytest.raises(RuntimeError, match="row 0: the logits or the draft's probabilities were not finite"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, custom_generate=ours)


def test_a_conversation_needs_few_engines(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length doubles: of 13, 26, ... up to 104 tokens, four engines, and the outputs are plain ones."""
    counted = Mock(side_effect=Engine)
    monkeypatch.setattr(generate, "Engine", counted)
    ours = SpeculativeGenerate(DRAFTERS["ngram"](model), RejectionVerifier())
    ids = torch.tensor([[1, 2, 3]])
    for turn in range(8):
        plain = model.generate(ids, max_new_tokens=10)
        assert torch.equal(model.generate(ids, max_new_tokens=10, custom_generate=ours), plain)
        ids = torch.cat([plain, torch.tensor([[turn, 5, 9]])], dim=1)
    assert counted.call_count == 4


STOPS = {
    "several": [(0, 10, 13), (1, 8, 10)],
    "from the prompt on": [(1, 4, 7)],
    "never": [],
}
"""The rows and columns of greedy outputs that stop strings spell."""


@pytest.mark.parametrize("case", STOPS)
def test_stop_strings_end_a_row_where_they_do_in_transformers(model, case: str) -> None:
    common = {"max_new_tokens": 12, "pad_token_id": PAD, "eos_token_id": 29}
    whole = model.generate(**batch(), **common)
    spelled = [letters().convert_ids_to_tokens(row) for row in whole.tolist()]
    stop = ["".join(spelled[row][begin:end]) for row, begin, end in STOPS[case]] or ["zzzzzzz"]
    plain = model.generate(**batch(), **common, stop_strings=stop, tokenizer=letters())
    assert torch.equal(plain, whole) == (case == "never")
    named = {"stop_strings": stop, "tokenizer": letters()}
    # A criterion brings what it needs: no tokenizer is given.
    criteria = {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(letters(), stop)])}
    for given, options in ((named, {}), (criteria, {"max_batch_size": 2})):
        ours = SpeculativeGenerate(DRAFTERS["model_chain_iid"](model), RejectionVerifier(), **options)
        assert torch.equal(model.generate(**batch(), **common, **given, custom_generate=ours), plain)


def test_what_a_models_files_ask_for_is_a_call_away() -> None:
    model = tiny_model(vocab_size=VOCAB, layers=2)
    files = {"repetition_penalty": 1.1, "suppress_tokens": [5], "do_sample": True, "top_p": 0.8, "max_length": 40}
    for name, value in files.items():
        setattr(model.generation_config, name, value)
    target, prompt = Target(model), [1, 2, 3]
    model.generation_config.do_sample = False
    asked = from_model(target, max_new_tokens=12)
    (found,) = Engine(target, max_length=40).generate([prompt], asked)
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=12, pad_token_id=0)[0, 3:]
    assert list(found.token_ids) == wanted.tolist() and asked.repetition_penalty == 1.1
    with pytest.raises(ValueError, match="max_length=40 stands alone"):
        from_model(target)
    assert from_model(target, prompt_length=10).max_new_tokens == 30
