"""Vocabularies that do not line up: several ends of text, padded logits, and a drafter of another width."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafters.model import ModelDrafter
from specdec import Engine, SamplingParams, Target
from specdec.checks.reference import reference_decode
from tests.architectures import tiny
from tests.components import DRAFTERS, STRONGEST
from tests.models import tiny_model
from tests.test_distribution import LEVEL, NO_RESIDUAL, VOCAB, p_value
from tests.verifiers.cases import complete
from verifiers.rejection import RejectionVerifier

pytestmark = pytest.mark.usefixtures("untried")
ONE_OF_EACH_KIND = [
    complete(name, strong=name in ("ngram", STRONGEST["rejection"]))
    for name in (
        None,
        "ngram",
        "medusa",
        "eagle3_chain_iid",
        "block_markov_tree",
        "model_expansion",
        STRONGEST["rejection"],
    )
]
PROMPTS = ([1, 2, 3, 1, 2], [7], [9, 8] * 5)


def decode(model, drafter, prompts=PROMPTS, *, tokenizer=None, **sampling: object):
    """Completions of a new engine; plain decoding without a drafter."""
    rule = RejectionVerifier() if drafter else None
    engine = Engine(Target(model, tokenizer), drafter, rule, max_batch_size=2, max_length=64)
    return engine.generate(list(prompts), SamplingParams(max_new_tokens=20, **sampling))  # type: ignore[arg-type]


# ---------------------------------------------------------------- several ends of text


@pytest.mark.parametrize("drafter", ONE_OF_EACH_KIND)
def test_whichever_end_of_text_comes_first_ends_the_output(drafter: str | None) -> None:
    model = tiny_model()
    whole = [reference_decode(model, prompt, SamplingParams(max_new_tokens=20)) for prompt in PROMPTS]
    ends = [max(set(output), key=output.index) for output in whole]  # the token that is new latest in each output
    expected = [output[: min(output.index(end) for end in ends if end in output) + 1] for output in whole]
    assert len(set(ends)) > 1 and {output[-1] for output in expected} <= set(ends)
    model.generation_config.eos_token_id = ends
    made = DRAFTERS[drafter](model) if drafter else None
    outputs = decode(model, made)
    assert [list(output.token_ids) for output in outputs] == expected
    assert {output.finish_reason for output in outputs} == {"stop"}


# ---------------------------------------------------------------- logits wider than the tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """56 tokens, where the models have 64 logits."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[33:89]
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("drafter", ["medusa", "model_tree_without_replacement"])
def test_padded_logits_may_be_drawn_and_have_no_text(tokenizer, drafter: str) -> None:
    model = tiny_model()
    made = DRAFTERS[drafter](model)
    outputs = decode(model, made, ["Cat", "DOG"], tokenizer=tokenizer, temperature=3.0)
    drawn = [token for output in outputs for token in output.token_ids]
    assert len(tokenizer) <= max(drawn) < 64, "nothing of the padding was drawn"
    for output in outputs:
        assert output.finish_reason == "length"
        assert output.text == tokenizer.decode([token for token in output.token_ids if token < len(tokenizer)])


@pytest.mark.parametrize("drafter", ONE_OF_EACH_KIND)
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


# ---------------------------------------------------------------- a drafter of another width


def resized(model, width: int):
    """A drafter much like the model, whose logits are ``width`` wide."""
    twin = tiny_model("llama", vocab_size=width, scale=1.5, layers=2)
    common = min(width, VOCAB)
    rows = {name: value for name, value in model.state_dict().items() if value.shape[:1] == (VOCAB,)}
    state = {name: value for name, value in model.state_dict().items() if name not in rows}
    twin.load_state_dict(state, strict=False)
    for name, value in rows.items():
        twin.get_parameter(name).data[:common] = value[:common] + 0.3 * torch.randn_like(value[:common])
    return twin


@pytest.mark.parametrize(
    ("width", "shape"),
    [complete(VOCAB - 2, [2, 2], strong=True), complete(VOCAB + 3, 3, strong=False)],
    ids=["narrower", "wider"],
)
def test_a_drafter_of_another_width_is_lossless(width: int, shape: object) -> None:
    model = tiny_model("llama", vocab_size=VOCAB, scale=1.5, layers=2)
    drafter = ModelDrafter(resized(model, width), shape, sampling="iid")  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=1.0)
    assert p_value(model, drafter, RejectionVerifier(), sampling) > LEVEL
    # Mutant: a rejected draft is followed by a token from p, not from the residual.
    assert p_value(model, drafter, NO_RESIDUAL, sampling) < LEVEL
    prompts = [[1, 2, 1, 2], [4], [3] * 6]
    expected = [reference_decode(model, prompt, SamplingParams(max_new_tokens=20)) for prompt in prompts]
    assert [list(output.token_ids) for output in decode(model, drafter, prompts)] == expected
