"""Our engine inside transformers' generate: the tokens of its own loop in any call, and its configs."""

import os
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerFast, WatermarkingConfig
from transformers.generation import logits_process
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from drafters import ModelDrafter
from specdec import Engine, SamplingParams, Target, Verifier
from specdec.cache.transformers_cache import CACHE
from specdec.engine.processors import process
from specdec.generation import SpeculativeGenerate, from_generation_config, from_model, generate
from specdec.generation.config import sampling_fields
from specdec.sampling import adjust, distribution
from tests.components import DRAFTERS, perturbed
from tests.forwards import slots_of
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from tests.test_distribution import LENGTH, LEVEL, NO_RESIDUAL, PROMPT, exact_law, goodness
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

VOCAB, PAD = 32, 31


def batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[PAD, PAD, 3, 4, 3, 4], [5, 6, 7, 8, 9, 5], [PAD, 1, 2, 1, 2, 1]])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def penalties(*ignored: int) -> list[RepetitionPenaltyLogitsProcessor]:
    """A penalty with a length per row; none where transformers does not have it yet (5.17)."""
    try:
        return [RepetitionPenaltyLogitsProcessor(3.0, prompt_ignore_length=torch.tensor(ignored))]
    except ValueError:
        return []


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one letter per token, but for a special token: 31 is the padding."""
    vocab = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyzABCD")}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<pad>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", clean_up_tokenization_spaces=False)


def test_what_is_not_supported_is_refused_before_any_work(model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "Engine", None)
    ids, ours, gpt2 = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), SpeculativeGenerate(), tiny_model("gpt2", layers=1)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"attention_mask": torch.tensor([[1] * 4, [1, 1, 1, 0]])}, "row 1 of the attention mask"),
        ({"attention_mask": torch.tensor([[0, 1, 0, 1], [1] * 4])}, "row 0 of the attention mask"),
        ({"assistant_model": gpt2}, "assistant_model"),
        ({"guidance_scale": 2.0}, "runs the model itself at each step"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"position_ids": torch.arange(4)[None] + 1}, "row 0 of position_ids"),
        ({"max_time": 1.0}, "MaxTimeCriteria"),
        ({"stopping_criteria": [type("OwnEos", (EosTokenCriteria,), {})(3)]}, "OwnEos"),
        ({"stop_strings": "a"}, "need a tokenizer"),
        # Nothing pads the rows that end first.
        ({"stopping_criteria": [StopStringCriteria(letters(), "a")]}, "set eos_token_id"),
        *(({"logits_processor": [each]}, "for 3 rows, and the batch has 2") for each in penalties(1, 2, 3)),
        ({"inputs": None, "inputs_embeds": model.get_input_embeddings()(ids)}, "inputs_embeds are not supported"),
        ({CACHE: model(ids[:, :3], use_cache=True)[CACHE]}, f"{CACHE} holds 3 tokens"),
        ({"token_type_ids": torch.zeros_like(ids)}, "generate got token_type_ids for the model's forward"),
    ]
    for arguments, named in refused:
        asked = gpt2 if "token_type_ids" in arguments else model
        with pytest.raises(ValueError, match=named) as raised:
            asked.generate(**{"inputs": ids, "max_new_tokens": 3} | arguments, custom_generate=ours)
        assert "\n" not in str(raised.value)


TOKENS = st.integers(1, VOCAB - 2)  # the last one is the padding
SOME = st.lists(TOKENS, min_size=1, max_size=4, unique=True)
BIASES = st.tuples(st.lists(TOKENS, min_size=1, max_size=2), st.sampled_from([-4.0, 3.0])).map(list)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([0.7, 1.2, 1.8]),
    "no_repeat_ngram_size": st.integers(1, 3),
    "encoder_no_repeat_ngram_size": st.integers(1, 3),
    "encoder_repetition_penalty": st.sampled_from([0.6, 1.5]),
    "suppress_tokens": SOME,
    "begin_suppress_tokens": SOME,
    "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=3),
    "sequence_bias": st.lists(BIASES, min_size=1, max_size=2, unique_by=lambda each: tuple(each[0])),
    "renormalize_logits": st.just(True),
    "remove_invalid_values": st.just(True),
    "forced_eos_token_id": TOKENS,
    "logits_processor": st.sampled_from(
        [[logits_process.NoRepeatNGramLogitsProcessor(2)], [TopKLogitsWarper(5), RepetitionPenaltyLogitsProcessor(2.5)]]
    ).map(LogitsProcessorList),
}
WITH_EOS: dict[str, st.SearchStrategy[Any]] = {
    "min_new_tokens": st.integers(1, 9),
    "min_length": st.integers(1, 12),
    "exponential_decay_length_penalty": st.just((2, 1.5)),
}
CALLS = int(os.environ.get("SPECDEC_CALLS", "15"))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    lengths = [width, *(draw(st.integers(1, width)) for _ in range(rows - 1))]
    ids = [[PAD] * (width - length) + [draw(TOKENS) for _ in range(length)] for length in lengths]
    arguments: dict[str, Any] = {"inputs": torch.tensor(ids, dtype=dtype), "pad_token_id": PAD}
    arguments["attention_mask"] = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    arguments["max_new_tokens"] = draw(st.integers(1, 12))
    sampled = draw(st.booleans())
    arguments |= {"do_sample": True, "top_k": 1} if sampled else {"do_sample": False}
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=4, unique=True))
    arguments |= {name: draw(OPTIONS[name]) for name in names}
    if draw(st.booleans()):
        arguments["eos_token_id"] = draw(SOME)
        names = draw(st.lists(st.sampled_from(sorted(WITH_EOS)), max_size=2, unique=True))
        arguments |= {name: draw(WITH_EOS[name]) for name in names}
    if "exponential_decay_length_penalty" in arguments:
        # The least number of a dtype becomes infinite: in transformers where an output is so long, here for drafts too.
        arguments.pop("remove_invalid_values", None)
    limits = {"min_new_tokens": arguments["max_new_tokens"], "min_length": width + arguments["max_new_tokens"]}
    return arguments | {name: min(arguments[name], most) for name, most in limits.items() if name in arguments}


def breaks(after: int, kind: type[BaseException], input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A user's processor that raises behind so many tokens."""
    if input_ids.shape[1] >= after:
        raise kind("broken off")
    return scores


@pytest.mark.parametrize("drafter", [complete("ngram", strong=False), complete("model_tree_iid", strong=True)])
def test_random_calls_return_what_transformers_own_loop_does(model, drafter: str) -> None:
    """One object serves them all, also behind calls that failed or were interrupted."""
    ours = SpeculativeGenerate(DRAFTERS[drafter](model), RejectionVerifier())

    @given(calls(), st.sampled_from([None, None, ValueError, KeyboardInterrupt]), st.integers(1, 12))
    @settings(max_examples=CALLS, deadline=None, suppress_health_check=list(HealthCheck))
    def search(arguments: dict[str, Any], kind: type[BaseException] | None, after: int) -> None:
        try:
            wanted = model.generate(**arguments)
        except (ValueError, RuntimeError):  # options that contradict each other, or leave no number to draw from
            reject()
        if kind is not None:
            processors = [*arguments.get("logits_processor", ()), partial(breaks, after, kind)]
            with suppress(BaseException):
                model.generate(**arguments | {"logits_processor": processors}, custom_generate=ours)
        found = model.generate(**arguments, custom_generate=ours)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)

    search()


def allowed(batch_id: int, tokens: torch.Tensor) -> list[int]:
    """A constraint that depends on all that ``prefix_allowed_tokens_fn`` is given, padding included."""
    return [t for t in range(VOCAB) if (t + 5 * batch_id + len(tokens) + int(tokens[-1])) % 3]


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"eos_token_id": [2, 13, 20], "pad_token_id": None},
    {"num_return_sequences": 1, "logits_processor": [logits_process.NoRepeatNGramLogitsProcessor(3)]},
    {"prefix_allowed_tokens_fn": allowed},
    {"stopping_criteria": [EosTokenCriteria([2, 13, 20])], "eos_token_id": list(range(12))},
    {"stopping_criteria": [MaxLengthCriteria(9)]},
    {"stopping_criteria": [MaxLengthCriteria(2)]},
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
    common = {"max_new_tokens": LENGTH, "do_sample": True, "top_k": 4, "temperature": 1.3, "pad_token_id": 0}
    common |= {"logits_processor": [logits_process.NoRepeatNGramLogitsProcessor(2)], "custom_generate": ours}

    def drawn() -> torch.Tensor:
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **common)[:, len(PROMPT) :]

    torch.manual_seed(1)
    rows = [drawn()]
    with shapes_unchecked():
        rows += [drawn() for _ in range(3)]
    torch.manual_seed(1)
    repeated = torch.equal(drawn(), rows[0])
    law = exact_law(model, SamplingParams(temperature=1.3, top_k=4, logits_processor=common["logits_processor"]))
    return goodness(map(tuple, torch.cat(rows).tolist()), law), repeated


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
    model.generate(prompt, **common)
    assert heard.end.call_count == 1, "the next call has none, and does not find the old one"
    for listener in ({"streamer": Mock()}, {"on_tokens": print}):
        with pytest.raises(ValueError, match=f"{next(iter(listener))} follows one sequence"):
            model.generate(**batch(), **common, **listener, pad_token_id=PAD)


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


@pytest.mark.parametrize("stops", [[(0, 10, 13), (1, 8, 10)], [(1, 4, 7)], []], ids=["several", "first", "never"])
def test_stop_strings_end_a_row_where_they_do_in_transformers(model, stops: list[tuple[int, int, int]]) -> None:
    """Strings are those of rows and columns of greedy outputs."""
    common = {"max_new_tokens": 12, "pad_token_id": PAD, "eos_token_id": 29}
    whole = model.generate(**batch(), **common)
    spelled = [letters().convert_ids_to_tokens(row) for row in whole.tolist()]
    stop = ["".join(spelled[row][begin:end]) for row, begin, end in stops] or ["zzzzzzz"]
    plain = model.generate(**batch(), **common, stop_strings=stop, tokenizer=letters())
    assert torch.equal(plain, whole) == (not stops)
    named = {"stop_strings": stop, "tokenizer": letters()}
    # A criterion brings what it needs: no tokenizer is given.
    own = {"stopping_criteria": [StopStringCriteria(letters(), stop)]}
    for stopping, options in ((named, {}), (own, {"max_batch_size": 2})):
        ours = SpeculativeGenerate(DRAFTERS["model_chain_iid"](model), RejectionVerifier(), **options)
        assert torch.equal(model.generate(**batch(), **common, **stopping, custom_generate=ours), plain)


def test_what_a_models_files_ask_for_is_a_call_away() -> None:
    model = tiny_model(vocab_size=VOCAB, layers=2)
    files = {"repetition_penalty": 1.1, "suppress_tokens": [5], "do_sample": True, "top_p": 0.8, "max_length": 40}
    model.generation_config.update(**files)
    target, prompt = Target(model), [1, 2, 3]
    model.generation_config.do_sample = False
    asked = from_model(target, max_new_tokens=12)
    (found,) = Engine(target, max_length=40).generate([prompt], asked)
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=12, pad_token_id=0)[0, 3:]
    assert list(found.token_ids) == wanted.tolist() and asked.repetition_penalty == 1.1
    with pytest.raises(ValueError, match="max_length=40 stands alone"):
        from_model(target)
    assert from_model(target, prompt_length=10).max_new_tokens == 30


IDS = [5, 6, 7, 8, 9, 5]


def test_a_config_is_translated() -> None:
    sampled = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3}
    ends = {"eos_token_id": [2, 5], "stop_strings": ["x"], "num_return_sequences": 2, "bad_words_ids": [[7], [8, 9]]}
    sampling = from_generation_config(GenerationConfig(**sampled, **ends, max_new_tokens=33), seed=4)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.7, 50, 0.9, 0.05)
    assert (sampling.max_new_tokens, sampling.stop_token_ids, sampling.stop, sampling.n) == (33, (2, 5), ("x",), 2)
    assert (sampling.repetition_penalty, sampling.bad_words_ids) == (1.3, ((7,), (8, 9)))
    assert sampling.ignore_eos, "the config's EOS tokens replace the target's, as in generate"
    plain = from_generation_config(GenerationConfig(max_new_tokens=3))
    assert plain.greedy and not plain.ignore_eos
    found = from_generation_config(GenerationConfig(max_length=30, min_length=12, eos_token_id=2), prompt_length=8)
    assert (found.max_new_tokens, found.min_new_tokens) == (22, 4)


@pytest.mark.parametrize("prompt_length", [1, 6])
def test_a_configs_processors_are_those_that_transformers_makes(model, prompt_length: int) -> None:
    """Those that count from the prompt's end, too; a prompt of one token is special to `generate`."""
    counting = {"forced_bos_token_id": 1, "forced_eos_token_id": 0, "exponential_decay_length_penalty": (3, 1.5)}
    options = {"begin_suppress_tokens": [12], "typical_p": 0.9, "do_sample": True, "top_k": 0, "eos_token_id": [2]}
    config, theirs = GenerationConfig(**counting, **options, max_new_tokens=9), list[Any]()

    def capture(model, input_ids, logits_processor, **given: Any) -> torch.Tensor:
        theirs.extend(logits_processor)
        return input_ids

    model.generate(torch.tensor([IDS[:prompt_length]]), generation_config=config, custom_generate=capture)
    ours = from_generation_config(config, prompt_length=prompt_length).processors
    assert [(type(each), str(vars(each))) for each in ours] == [(type(each), str(vars(each))) for each in theirs]
    assert len(ours) >= 4


def ours_of(fields: dict[str, Any], ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The law that our engine draws from at the end of a sequence."""
    sampling = SamplingParams(**fields)
    rows = slots_of([ids[0].tolist()], vocab_size=VOCAB, params=[sampling])
    scores = adjust(logits[None], rows.sampling, ids[:, None, -1:])
    return distribution(process(rows.processors[0], ids, scores[:, 0])[:, None], rows.sampling)[0, 0]


PENALTY = RepetitionPenaltyLogitsProcessor(1.7)
COLD = logits_process.TemperatureLogitsWarper(0.5)
LISTS: dict[str, list[Any]] = {
    "our order": [
        *(PENALTY, logits_process.NoRepeatNGramLogitsProcessor(2), logits_process.SuppressTokensLogitsProcessor([1])),
        *(COLD, TopKLogitsWarper(9), TopPLogitsWarper(0.8), logits_process.MinPLogitsWarper(0.1)),
    ],
    "two top-k, the narrow one last": [TopKLogitsWarper(20), TopKLogitsWarper(3)],
    "two temperatures": [COLD, logits_process.TemperatureLogitsWarper(3.0)],
    "bias before the penalty": [logits_process.SequenceBiasLogitsProcessor({(5,): 3.0}), PENALTY],
    "top-p before the temperature": [TopPLogitsWarper(0.6), COLD],
    "top-p keeps some": [TopPLogitsWarper(0.05, min_tokens_to_keep=4)],
    "top-p of nothing keeps one": [TopPLogitsWarper(0.0)],
    "top-k keeps some": [TopKLogitsWarper(1, min_tokens_to_keep=4)],
    "top-k that does not forbid": [TopKLogitsWarper(3, filter_value=-2.0)],
    "a penalty of the end": [RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=3)],
    "typical after top-k": [TopKLogitsWarper(9), logits_process.TypicalLogitsWarper(0.5)],
    "epsilon, then normalized": [COLD, logits_process.EpsilonLogitsWarper(0.05), logits_process.LogitNormalization()],
}


@pytest.mark.parametrize("case", LISTS)
def test_a_list_of_processors_gives_the_law_that_it_has_in_transformers(case: str) -> None:
    ids = torch.tensor([IDS])
    generator = torch.Generator().manual_seed(3)
    for _ in range(8):
        logits = torch.randn(1, VOCAB, generator=generator) * 2
        scores = LogitsProcessorList(LISTS[case])(ids, logits)
        sampled = ours_of(sampling_fields(LISTS[case], sample=True), ids, logits)
        torch.testing.assert_close(sampled, scores.softmax(-1)[0], rtol=1e-5, atol=1e-6)
        first = ours_of(sampling_fields(LISTS[case], sample=False), ids, logits)
        assert first.argmax() == scores.argmax() and first.max() == 1


def test_a_field_that_is_set_is_translated_or_refused_by_name() -> None:
    for fields, words in (
        ({"num_beams": 4}, "num_beams=4"),
        ({"watermarking_config": WatermarkingConfig()}, "watermarking_config="),
        ({"a_field_of_the_future": 1}, "a_field_of_the_future=1"),
        ({"min_new_tokens": 1, "eos_token_id": 2}, "min_new_tokens=1, .* prompt_length"),
        ({"min_length": 5}, "min_length=5, but no eos_token_id"),
        ({"max_new_tokens": None, "max_length": 30}, "set max_new_tokens, or give prompt_length"),
    ):
        with pytest.raises(ValueError, match=words):
            from_generation_config(GenerationConfig(**{"max_new_tokens": 3} | fields))
    with pytest.raises(ValueError, match=r"max_length=30 .* prompt of 30"):
        from_generation_config(GenerationConfig(max_length=30), prompt_length=30)
