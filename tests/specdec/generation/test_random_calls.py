"""Random calls of ``generate``: with the engine inside, the same tokens in the same form as transformers' own loop.

Calls are greedy, or drawn from the one token that ``top_k=1`` leaves, so that nothing of them is left to chance.
"""

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
)

from drafters import NGramDrafter
from specdec.generation import SpeculativeGenerate
from tests.components import DRAFTERS
from tests.specdec.generation.calls import PAD, VOCAB
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

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
        [[NoRepeatNGramLogitsProcessor(2)], [TopKLogitsWarper(5), RepetitionPenaltyLogitsProcessor(2.5)]]
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
    """The arguments of one call."""
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
    limits = {"min_new_tokens": arguments["max_new_tokens"], "min_length": width + arguments["max_new_tokens"]}
    return arguments | {name: min(arguments[name], most) for name, most in limits.items() if name in arguments}


@pytest.mark.parametrize("drafter", [complete("ngram", strong=False), complete("model_tree_iid", strong=True)])
@given(arguments=calls())
@settings(max_examples=CALLS, suppress_health_check=list(HealthCheck))
def test_random_calls_return_what_transformers_own_loop_does(model, drafter: str, arguments: dict[str, Any]) -> None:
    made = NGramDrafter() if drafter == "ngram" else DRAFTERS[drafter](model)
    try:
        wanted = model.generate(**arguments)
    except ValueError:  # options that contradict each other, which transformers refuses
        reject()
    found = model.generate(**arguments, custom_generate=SpeculativeGenerate(made, RejectionVerifier()))
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)
