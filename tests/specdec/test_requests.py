"""What a user may ask for, and what they are told otherwise."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from specdec.requests import GREEDY_BELOW, Request, SamplingParams
from specdec.sampling import probs
from tests.forwards import slots_of


@pytest.mark.parametrize(
    ("wrong", "named", "remedy"),
    [
        ({"temperature": -0.1}, "temperature=-0.1", "give 0 (greedy) or a positive number"),
        ({"temperature": math.inf}, "temperature=inf", "give 0 (greedy) or a positive number"),
        ({"temperature": math.nan}, "temperature=nan", "give 0 (greedy) or a positive number"),
        ({"top_k": -1}, "top_k=-1", "give 0 (off) or a positive count"),
        ({"top_p": 0.0}, "top_p=0.0", "give a mass in (0, 1]"),
        ({"top_p": 1.01}, "top_p=1.01", "give a mass in (0, 1]"),
        ({"top_p": math.nan}, "top_p=nan", "give a mass in (0, 1]"),
        ({"min_p": -0.1}, "min_p=-0.1", "give a fraction in [0, 1]"),
        ({"min_p": 1.1}, "min_p=1.1", "give a fraction in [0, 1]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0", "give a positive number, 1 is off"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf", "give a positive number, 1 is off"),
        ({"max_new_tokens": 0}, "max_new_tokens=0", "give at least 1"),
        ({"n": 0}, "n=0", "give at least 1 sample per prompt"),
        ({"stop": ("end", "")}, "stop contains an empty string", "remove it"),
        ({"stop": ""}, "stop contains an empty string", "remove it"),
        ({"seed": 2**64}, "seed=18446744073709551616", "give a 64-bit integer"),
        ({"seed": -(2**63) - 1}, "seed=-9223372036854775809", "give a 64-bit integer"),
        ({"stream": 2**63}, "stream=9223372036854775808", "give a 64-bit integer"),
        ({"logits_processor": object()}, "logits_processor", "give callables"),
        ({"temperature": 1e39}, "temperature=1e+39", "give at most 3.4e38"),
        ({"temperature": 10**400}, "temperature=1000", "give a number that a float can hold"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty=1e-30", "give a number from 1e-20 to 1e20"),
        ({"repetition_penalty": 1e39}, "repetition_penalty=1e+39", "give a number from 1e-20 to 1e20"),
        ({"top_k": 2**63}, "top_k=9223372036854775808", "give a count below 2**63"),
    ],
)
def test_every_bad_parameter_gives_one_clear_sentence(wrong: dict[str, Any], named: str, remedy: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        SamplingParams(**wrong)
    message = str(raised.value)
    assert message.startswith(named), message
    assert remedy in message and "\n" not in message, message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": True}, "temperature=True: give a number"),
        ({"temperature": "0.7"}, "temperature='0.7': give a number"),
        ({"top_p": None}, "top_p=None: give a number"),
        ({"top_k": 1.5}, "top_k=1.5: give a whole number, without a decimal point"),
        ({"top_k": True}, "top_k=True: give a whole number, without a decimal point"),
        ({"top_k": np.bool_(True)}, "top_k=np.True_: give a whole number, without a decimal point"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0: give a whole number, without a decimal point"),
        ({"max_new_tokens": "8"}, "max_new_tokens='8': give a whole number, without a decimal point"),
        ({"n": None}, "n=None: give a whole number, without a decimal point"),
        ({"seed": 1.0}, "seed=1.0: give a 64-bit integer (signed) or None"),
        ({"stream": False}, "stream=False: give a 64-bit integer (signed) or None"),
        ({"ignore_eos": "no"}, "ignore_eos='no': give True or False"),
        ({"stop": (13,)}, "stop=(13,): give strings; tokens go into stop_token_ids"),
        ({"stop": 13}, "stop=13: give strings; tokens go into stop_token_ids"),
        ({"stop_token_ids": 13}, "stop_token_ids=13: give a sequence of token ids; strings go into stop"),
        ({"stop_token_ids": "13"}, "stop_token_ids='13': give a sequence of token ids; strings go into stop"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids=1.5: give whole numbers"),
    ],
)
def test_wrong_types_give_one_clear_sentence(wrong: dict[str, Any], message: str) -> None:
    """Asked of the class's own check, since the type checks of a test run would refuse some of these before it."""
    params = SamplingParams()
    for name, value in wrong.items():
        object.__setattr__(params, name, value)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        params.__post_init__()
    assert str(raised.value) == message


def test_numbers_of_numpy_are_taken_and_kept_as_python_s_own() -> None:
    params = SamplingParams()
    given = {"top_k": np.int64(3), "seed": np.uint8(7), "temperature": np.float32(0.5), "stop_token_ids": np.arange(2)}
    for name, value in given.items():
        object.__setattr__(params, name, value)
    params.__post_init__()
    assert params == SamplingParams(top_k=3, seed=7, temperature=0.5, stop_token_ids=(0, 1))
    assert (type(params.top_k), type(params.seed), type(params.temperature)) == (int, int, float)


def test_the_largest_numbers_still_give_a_distribution() -> None:
    """What is allowed at most does not overflow in float32: p is finite for logits as large as float16 has."""
    extremes = [
        SamplingParams(temperature=3.4028234e38),
        SamplingParams(temperature=GREEDY_BELOW, repetition_penalty=1e20),
        SamplingParams(temperature=GREEDY_BELOW, repetition_penalty=1e-20),
    ]
    logits = torch.tensor([[[65504.0, -65504.0, 1.0, 0.0]]])
    for params in extremes:
        state = slots_of([[0, 1]], vocab_size=4, params=[params]).sampling
        p = probs(logits, state, torch.tensor([[[0]]]))
        assert p.isfinite().all() and abs(float(p.sum()) - 1) < 1e-6, params


@pytest.mark.parametrize(
    "right",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 5.0, "top_k": 1, "top_p": 1.0, "min_p": 1.0, "repetition_penalty": 0.5},
        {"seed": None, "stream": 0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1, "stream": 2**63 - 1},
    ],
)
def test_the_edges_are_allowed(right: dict[str, Any]) -> None:
    params = SamplingParams(**right)
    assert all(getattr(params, name) == value for name, value in right.items())


def test_one_stop_string_may_stand_alone_and_lists_become_tuples() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_temperatures_near_zero_are_greedy() -> None:
    assert SamplingParams().greedy
    assert SamplingParams(temperature=GREEDY_BELOW / 2).greedy
    assert not SamplingParams(temperature=GREEDY_BELOW).greedy


def test_seeded_fills_in_what_is_missing_and_nothing_else() -> None:
    params = SamplingParams(temperature=0.5, seed=None)
    one, other = params.seeded(4), params.seeded(4)
    assert one.stream == 4 and one.temperature == 0.5
    assert one.seed is not None and one.seed != other.seed, "two fresh seeds agree with probability 2**-62"
    assert SamplingParams(seed=9, stream=2).seeded(4) == SamplingParams(seed=9, stream=2)


def test_remaining_counts_down() -> None:
    request = Request(
        id=0, prompt_ids=[1], sampling=SamplingParams(max_new_tokens=3), speculate=True, stop_ids=frozenset()
    )
    assert request.remaining == 3
    request.output_ids += [5, 6]
    assert request.remaining == 1
