"""What a user may ask for, and what they are told otherwise."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from specdec.requests import GREEDY_BELOW, SamplingParams
from specdec.sampling import probs
from tests.forwards import slots_of

WRONG: dict[str, list[Any]] = {
    "temperature": [-0.1, math.inf, math.nan, 1e39, 10**400, True, "0.7"],
    "top_k": [-1, 2**63, 1.5, True, np.bool_(True)],
    "top_p": [0.0, 1.01, math.nan, None],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0.0, math.inf, 1e-30, 1e39],
    "max_new_tokens": [0, 2.0, "8"],
    "n": [0, None],
    "stop": [("end", ""), "", (13,), 13],
    "stop_token_ids": [13, "13", [1.5]],
    "seed": [2**64, -(2**63) - 1, 1.0],
    "stream": [2**63, False],
    "ignore_eos": ["no"],
    "logits_processor": [object()],
}


def checked(**given: Any) -> SamplingParams:
    """Parameters after the class's own check: the type checks of a test run would refuse some of them before it."""
    params = SamplingParams()
    for name, value in given.items():
        object.__setattr__(params, name, value)
    params.__post_init__()
    return params


@pytest.mark.parametrize("name", WRONG)
def test_every_bad_parameter_gives_one_sentence_that_names_it(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ValueError, match=rf"^{name}\b.*(give|remove)") as raised:
            checked(**{name: value})
        assert "\n" not in str(raised.value)


def test_numbers_of_numpy_are_taken_and_kept_as_python_s_own() -> None:
    params = checked(top_k=np.int64(3), seed=np.uint8(7), temperature=np.float32(0.5), stop_token_ids=np.arange(2))
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


def test_the_edges_are_allowed() -> None:
    for right in (
        {"temperature": 5.0, "top_k": 1, "top_p": 1.0, "min_p": 1.0, "repetition_penalty": 0.5},
        {"temperature": 0.0, "seed": None, "stream": 0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1, "stream": 2**63 - 1},
    ):
        params = SamplingParams(**right)
        assert all(getattr(params, name) == value for name, value in right.items())


def test_one_stop_string_may_stand_alone_and_lists_become_tuples() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))


def test_temperatures_near_zero_are_greedy() -> None:
    assert SamplingParams().greedy and SamplingParams(temperature=GREEDY_BELOW / 2).greedy
    assert not SamplingParams(temperature=GREEDY_BELOW).greedy


def test_seeded_fills_in_what_is_missing_and_nothing_else() -> None:
    params = SamplingParams(temperature=0.5, seed=None)
    one, other = params.seeded(4), params.seeded(4)
    assert one.stream == 4 and one.temperature == 0.5
    assert one.seed is not None and one.seed != other.seed, "two fresh seeds agree with probability 2**-62"
    assert SamplingParams(seed=9, stream=2).seeded(4) == SamplingParams(seed=9, stream=2)
