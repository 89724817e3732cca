"""What a user may ask for, and what they are told otherwise."""

import math
from typing import Any

import pytest

from specdec.requests import GREEDY_BELOW, Request, SamplingParams


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
    ],
)
def test_every_bad_parameter_gives_one_clear_sentence(wrong: dict[str, Any], named: str, remedy: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        SamplingParams(**wrong)
    message = str(raised.value)
    assert message.startswith(named), message
    assert remedy in message and "\n" not in message, message


def test_tokens_among_the_stop_strings_are_refused() -> None:
    """By the class itself, or before it by the type checks that may be on in a test run."""
    wrong: Any = (13,)
    with pytest.raises((ValueError, TypeError), match=r"\bstop\b"):
        SamplingParams(stop=wrong)


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
