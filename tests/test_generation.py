"""Our engine inside transformers' generate: the same tokens as its own loop, or a refusal before any work."""

from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    TopKLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from drafters.model import ModelDrafter
from specdec.engine.engine import Engine
from specdec.generation import SpeculativeGenerate, generate
from specdec.interfaces import Verifier
from specdec.modeling.target import Target
from specdec.requests import SamplingParams
from tests.components import DRAFTERS, perturbed
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from tests.test_distribution import LENGTH, LEVEL, PROMPT, NoResidual, exact_law, goodness
from tests.verifiers.cases import complete
from verifiers.rejection import RejectionVerifier

VOCAB, PAD = 32, 31


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=VOCAB)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[PAD, PAD, 3, 4, 3, 4], [5, 6, 7, 8, 9, 5], [PAD, 1, 2, 1, 2, 1]])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def allowed(batch_id: int, tokens: torch.Tensor) -> list[int]:
    """A constraint that depends on all that ``prefix_allowed_tokens_fn`` is given, padding included."""
    return [t for t in range(VOCAB) if (t + 5 * batch_id + len(tokens) + int(tokens[-1])) % 3]


def penalties(*ignored: int) -> list[RepetitionPenaltyLogitsProcessor]:
    """A penalty with a length per row; none where transformers does not have it yet (5.17)."""
    try:
        return [RepetitionPenaltyLogitsProcessor(3.0, prompt_ignore_length=torch.tensor(ignored))]
    except ValueError:
        return []


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 5, "eos_token_id": list(range(12))},
    {"eos_token_id": [3, 17, 20]},
    {"sequence_bias": [[[3], 5.0]], "repetition_penalty": 1.2},
    {"num_return_sequences": 1, "logits_processor": [NoRepeatNGramLogitsProcessor(3)]},
    {"prefix_allowed_tokens_fn": allowed},
    {"eos_token_id": [3, 17, 20], "pad_token_id": None},
    {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria([3, 17, 20])])},
    {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria([3, 17, 20])]), "eos_token_id": list(range(12))},
    {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(9)])},
    {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(2)])},
    {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    # A penalty that the user makes counts the padding, too.
    {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.6)], "sequence_bias": [[[PAD], 1.0], [[3], 1.0]]},
    {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.6, prompt_ignore_length=3)]},
    {"logits_processor": penalties(6, 0, 1), "sequence_bias": [[[PAD], 1.0], [[3], 1.0]]},
    {"logits_processor": [TopKLogitsWarper(4), RepetitionPenaltyLogitsProcessor(3.0)]},
    {"forced_eos_token_id": 0, "begin_suppress_tokens": list(range(0, VOCAB, 2))},
    {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": [3, 17], "suppress_tokens": [20]},
    {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")},
]


@pytest.mark.parametrize(
    ("drafter", "arguments"),
    [
        complete(drafter, arguments, strong=drafter == "model_tree_iid" or not arguments)
        for drafter in (None, "ngram", "model_tree_iid")
        for arguments in ARGUMENTS
    ],
    ids=lambda value: ", ".join(value) or "nothing" if isinstance(value, dict) else str(value),
)
def test_greedy_generate_is_unchanged(model, drafter: str | None, arguments: dict[str, Any]) -> None:
    ours = SpeculativeGenerate(DRAFTERS[drafter](model), RejectionVerifier()) if drafter else SpeculativeGenerate()
    common = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD} | arguments
    plain = model.generate(**batch(), **common)
    if len(arguments) > 0 and arguments.get("num_return_sequences") != 1:
        assert not torch.equal(plain, model.generate(**batch(), max_new_tokens=12, pad_token_id=PAD)), (
            "it has no effect"
        )
    assert torch.equal(model.generate(**batch(), **common, custom_generate=ours), plain)
    assert torch.equal(model.generate(**batch(), **common, custom_generate=ours), plain)  # the engine is kept


def sampled(verifier: Verifier, *, processed: bool) -> tuple[float, bool]:
    """Chi-square p-value of 2000 outputs of three tokens, and whether the seed repeats the first 500."""
    model = tiny_model(vocab_size=5, scale=1.5, layers=2)
    prompt = torch.tensor([PROMPT] * 500)
    ours = SpeculativeGenerate(ModelDrafter(perturbed(model, 0.6), 2), verifier)
    processors = [NoRepeatNGramLogitsProcessor(2)] if processed else None
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


@pytest.mark.parametrize("processed", [False, True])
def test_sampled_generate_follows_the_target(processed: bool) -> None:
    """Seeded; a correct engine would fail with one seed in 100 000."""
    level, repeated = sampled(RejectionVerifier(), processed=processed)
    assert level > LEVEL
    assert repeated, "torch's seed repeats the output"


def test_a_biased_rule_is_rejected_through_generate() -> None:
    """With the same seed and number of outputs."""
    assert sampled(NoResidual(), processed=False)[0] < LEVEL


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


class Heard(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.put_: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.put_.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_is_fed_round_by_round(model) -> None:
    ours = SpeculativeGenerate(DRAFTERS["model_chain_iid"](model), RejectionVerifier())
    heard = Heard()
    prompt = torch.tensor([[1, 2, 3]])
    output = model.generate(prompt, max_new_tokens=9, custom_generate=ours, streamer=heard)
    assert heard.put_[0] == [1, 2, 3]  # by transformers itself
    assert [token for tokens in heard.put_[1:] for token in tokens] == output[0, 3:].tolist()
    assert len(heard.put_) == 1 + len(ours.completions[0].steps)
    assert heard.ended == 1
    # The next call has none, and does not find the old one.
    model.generate(prompt, max_new_tokens=9, custom_generate=ours)
    assert heard.ended == 1
    with pytest.raises(ValueError, match="a streamer follows one sequence, and the batch has 3"):
        model.generate(**batch(), max_new_tokens=4, custom_generate=ours, streamer=Heard(), pad_token_id=PAD)


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


# ---------------------------------------------------------------- stop strings


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one letter per token, but for a special token: 31 is the padding."""
    alphabet = "abcdefghijklmnopqrstuvwxyzABCD"
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<pad>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", clean_up_tokenization_spaces=False)


def stops_of(model) -> dict[str, list[str]]:
    """Stop strings that occur in the greedy outputs of ``batch``."""
    rows = model.generate(**batch(), max_new_tokens=12, pad_token_id=PAD).tolist()
    spelled = ["".join(letters().convert_ids_to_tokens(row)) for row in rows]
    tokens = [letters().convert_ids_to_tokens(row) for row in rows]
    assert len(spelled) == 3
    return {
        "inside": ["".join(tokens[0][9:11])],
        "several": ["".join(tokens[0][10:13]), "".join(tokens[1][8:10])],
        "from the prompt on": ["".join(tokens[1][4:7])],
        "never": ["zzzzzzz"],
    }


@pytest.mark.parametrize("drafter", [complete(None, strong=False), complete("model_chain_iid", strong=True)])
@pytest.mark.parametrize("case", ["inside", "several", "from the prompt on", "never"])
def test_stop_strings_end_a_row_where_they_do_in_transformers(model, case: str, drafter: str | None) -> None:
    stop = stops_of(model)[case]
    made = DRAFTERS[drafter](model) if drafter else None
    verifier = RejectionVerifier() if drafter else None
    common = {"max_new_tokens": 12, "pad_token_id": PAD, "eos_token_id": 29}
    plain = model.generate(**batch(), **common, stop_strings=stop, tokenizer=letters())
    whole = model.generate(**batch(), **common)
    assert torch.equal(plain, whole) == (case == "never")
    ours = SpeculativeGenerate(made, verifier, tokenizer=letters())
    named = model.generate(**batch(), **common, stop_strings=stop, tokenizer=letters(), custom_generate=ours)
    assert torch.equal(named, plain)
    # A criterion brings what it needs: no tokenizer here.
    ours = SpeculativeGenerate(DRAFTERS[drafter](model) if drafter else None, verifier, max_batch_size=2)
    criteria = StoppingCriteriaList([StopStringCriteria(letters(), stop)])
    assert torch.equal(model.generate(**batch(), **common, stopping_criteria=criteria, custom_generate=ours), plain)


def test_a_stop_string_that_is_a_special_token(model) -> None:
    prompt = torch.tensor([[1, 2, 3]])
    biased = {"sequence_bias": [[[30], 4.0]], "max_new_tokens": 40}
    plain = model.generate(prompt, **biased, stop_strings="</s>", tokenizer=letters())
    assert plain[0, -1] == 30 and plain.shape[1] < 43, "the special token comes, and ends the output"
    ours = SpeculativeGenerate(tokenizer=letters())
    assert torch.equal(model.generate(prompt, **biased, stop_strings="</s>", custom_generate=ours), plain)


def test_a_special_token_ends_the_engine_s_own_output_and_text(model) -> None:
    bias = SequenceBiasLogitsProcessor({(30,): 4.0})
    engine = Engine(Target(model, letters()), DRAFTERS["ngram"](model), RejectionVerifier(), max_length=64)
    sampling = SamplingParams(max_new_tokens=40, stop="</s>", logits_processor=bias)
    output = engine.generate([[1, 2, 3]], sampling)[0]
    assert output.finish_reason == "stop" and output.token_ids[-1] == 30 and 30 not in output.token_ids[:-1]
    assert output.text == "".join(letters().convert_ids_to_tokens(list(output.token_ids[:-1])))


def test_what_is_streamed_ends_with_the_stop_string(model) -> None:
    got: list[int] = []
    prompt = torch.tensor([[1, 2, 3]])
    stop = letters().convert_ids_to_tokens(model.generate(prompt, max_new_tokens=12)[0].tolist()[6:8])
    ours = SpeculativeGenerate(DRAFTERS["model_chain_iid"](model), RejectionVerifier(), tokenizer=letters())
    common = {"max_new_tokens": 12, "stop_strings": "".join(stop)}
    output = model.generate(
        prompt, **common, custom_generate=ours, on_tokens=lambda tokens: got.extend(tokens.tolist())
    )
    assert torch.equal(output, model.generate(prompt, **common, tokenizer=letters()))
    assert output[0, 3:].tolist() == got


# ---------------------------------------------------------------- the engine that is kept


class Counted(Engine):
    """Counts the engines that are made, and refuses long ones."""

    made = 0
    longest = 10**6

    def __init__(self, *args: Any, max_length: int, **kwargs: Any):
        if max_length > Counted.longest:
            raise ValueError("no room for so many tokens")
        super().__init__(*args, max_length=max_length, **kwargs)
        Counted.made += 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr(generate, "Engine", Counted)
    monkeypatch.setattr(Counted, "made", 0)
    return Counted


def test_a_conversation_needs_few_engines(model, counted: type[Counted]) -> None:
    """The length doubles: of 13, 26, ... up to 104 tokens, four engines (9 before), and the outputs are plain ones."""
    ours = SpeculativeGenerate(DRAFTERS["ngram"](model), RejectionVerifier())
    ids = torch.tensor([[1, 2, 3]])
    for turn in range(8):
        plain = model.generate(ids, max_new_tokens=10)
        assert torch.equal(model.generate(ids, max_new_tokens=10, custom_generate=ours), plain)
        ids = torch.cat([plain, torch.tensor([[turn, 5, 9]])], dim=1)
    assert counted.made == 4


def test_the_length_grows_up_to_the_model_s_positions(model, counted: type[Counted]) -> None:
    ours = SpeculativeGenerate()
    for length in (150, 200, 256):
        prompt = torch.ones((1, length - 2), dtype=torch.long)
        plain = model.generate(prompt, max_new_tokens=2)
        assert torch.equal(model.generate(prompt, max_new_tokens=2, custom_generate=ours), plain)
    assert counted.made == 2


def test_room_for_later_calls_is_no_reason_to_fail(model, counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "longest", 20)
    ours = SpeculativeGenerate()
    for length in (12, 18, 20):
        prompt = torch.ones((1, length - 2), dtype=torch.long)
        plain = model.generate(prompt, max_new_tokens=2)
        assert torch.equal(model.generate(prompt, max_new_tokens=2, custom_generate=ours), plain)
    with pytest.raises(ValueError, match="no room"):
        model.generate(torch.ones((1, 20), dtype=torch.long), max_new_tokens=2, custom_generate=ours)


# ---------------------------------------------------------------- what is refused


class Own(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:
        return torch.ones(len(input_ids), dtype=torch.bool)


class OwnEos(EosTokenCriteria):
    pass


def masked(*zeros: tuple[int, int]) -> torch.Tensor:
    mask = torch.ones((2, 4), dtype=torch.long)
    for place in zeros:
        mask[place] = 0
    return mask


WATERMARK = {"ngram_len": 2, "keys": [1], "sampling_table_size": 8, "sampling_table_seed": 0, "context_history_size": 4}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "right padding": ({"attention_mask": masked((1, 3))}, "row 1 of the attention mask has zeros behind"),
    "a hole": ({"attention_mask": masked((0, 0), (0, 2))}, "row 0 of the attention mask has zeros behind"),
    "no token": ({"attention_mask": masked(*((1, i) for i in range(4)))}, "row 1 of the attention mask is all zeros"),
    "beams": ({"num_beams": 2}, "num_beams=2"),
    "guidance": ({"guidance_scale": 2.0}, "runs the model itself at each step"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores: this engine returns"),
    "logits": ({"return_dict_in_generate": True, "output_logits": True}, "output_logits: this engine returns"),
    "attentions": ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions: this engine"),
    "states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states: this engine"),
    "positions": ({"position_ids": torch.arange(4)[None] + 1}, "row 0 of position_ids is not 0, 1, 2"),
    "time": ({"max_time": 1.0}, "MaxTimeCriteria"),
    "a criterion": ({"stopping_criteria": StoppingCriteriaList([Own()])}, "Own"),
    "another EOS criterion": ({"stopping_criteria": StoppingCriteriaList([OwnEos(3)])}, "OwnEos"),
    "a watermark": (
        {"logits_processor": [SynthIDTextWatermarkLogitsProcessor(**WATERMARK, device=torch.device("cpu"))]},
        "keeps a state from step to step",
    ),
    "lengths": ({"logits_processor": penalties(1, 2, 3)}, "prompt_ignore_length for 3 rows, and the batch has 2"),
    "no tokenizer": ({"stop_strings": "a"}, "need a tokenizer, and transformers does not pass its own"),
    "rows that nothing pads": (
        {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(letters(), "a")])},
        "set eos_token_id, or call generate once per prompt",
    ),
}


if not penalties(1):
    del REFUSED["lengths"]


@pytest.fixture
def _no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*args: object, **kwargs: object) -> None:
        raise AssertionError("an engine was made")

    monkeypatch.setattr(generate, "Engine", made)


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_before_any_work(model, case: str) -> None:
    arguments, message = REFUSED[case]
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    with pytest.raises(ValueError, match=message) as raised:
        model.generate(ids, **{"max_new_tokens": 3, **arguments}, custom_generate=SpeculativeGenerate())
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("_no_work")
def test_inputs_other_than_tokens_are_refused(model) -> None:
    ours = SpeculativeGenerate()
    ids = torch.tensor([[1, 2, 3, 4]])
    with pytest.raises(ValueError, match="inputs_embeds are not supported"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=3, custom_generate=ours)
    cache = model(ids[:, :3], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values holds 3 tokens"):
        model.generate(ids, past_key_values=cache, max_new_tokens=3, custom_generate=ours)
    gpt2 = tiny_model("gpt2", vocab_size=VOCAB)
    with pytest.raises(ValueError, match="generate got token_type_ids for the model's forward"):
        gpt2.generate(ids, token_type_ids=torch.zeros_like(ids), max_new_tokens=3, custom_generate=ours)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "mistral_sliding"])
def test_left_padding_in_other_models(architecture: str) -> None:
    model = tiny_model(architecture, vocab_size=VOCAB)
    ours = SpeculativeGenerate(DRAFTERS["ngram"](model), RejectionVerifier())
    common = {"max_new_tokens": 12, "pad_token_id": PAD, "no_repeat_ngram_size": 3}
    assert torch.equal(model.generate(**batch(), **common, custom_generate=ours), model.generate(**batch(), **common))


def test_an_empty_cache_and_the_usual_positions_change_nothing(model) -> None:
    inputs = batch()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    common = {"max_new_tokens": 5, "pad_token_id": PAD}
    output = model.generate(
        **inputs,
        **common,
        position_ids=positions,
        past_key_values=DynamicCache(),
        custom_generate=SpeculativeGenerate(),
    )
    assert torch.equal(output, model.generate(**inputs, **common))
    output = model.generate(**inputs, **common, cache_implementation="static", custom_generate=SpeculativeGenerate())
    assert torch.equal(output, model.generate(**inputs, **common))
