"""Which fields a request may have."""

from typing import Any

import pytest

from experiments.serving.fields import NEUTRAL, RequestError, understand
from tests.experiments.serving.conftest import DEFAULTS, tokenizer

CHAT = [{"role": "user", "content": "abc"}]

WRONG: list[tuple[str, Any]] = [
    ("presence_penalty", 0.5),
    ("frequency_penalty", -1),
    ("logit_bias", {"5": 10}),
    ("best_of", 2),
    ("echo", True),
    ("suffix", "end"),
    ("response_format", {"type": "json_object"}),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("guided_json", {}),
    ("structured_outputs", {"regex": "a*"}),
    ("typical_p", 0.9),
    ("min_tokens", 5),
    ("use_beam_search", True),
    ("prompt_logprobs", 1),
    ("temprature", 1),
    ("temperature", "hot"),
    ("temperature", -1),
    ("temperature", float("nan")),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("max_tokens", 0),
    ("max_tokens", "many"),
    ("max_completion_tokens", -1),
    ("n", 0),
    ("n", 1.5),
    ("seed", "x"),
    ("seed", 2**64),
    ("stop", 5),
    ("stop", [""]),
    ("stop", ["a", 1]),
    ("stop_token_ids", "abc"),
    ("ignore_eos", 1),
    ("stream", "yes"),
    ("stream_options", True),
    ("stream_options", {"include": True}),
    ("stream_options", {"include_usage": 1}),
    ("logprobs", -1),
    ("logprobs", True),
    ("logprobs", 21),
    ("top_logprobs", 1),
    ("return_token_ids", "yes"),
    ("priority", "high"),
    ("user", 5),
    ("stream_id", 0.5),
    ("prompt", []),
    ("prompt", {}),
    ("prompt", 5),
    ("prompt", ""),
    ("prompt", ["abc", 5]),
    ("prompt", [[]]),
    ("prompt", [True]),
    ("prompt", [["a"]]),
    ("messages", CHAT),
]
WRONG_IN_CHATS: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", "abc"),
    ("messages", ["abc"]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": None}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("top_logprobs", 3),
    ("logprobs", 1),
    ("prompt", "abc"),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_what_is_wrong_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        understand({"prompt": "abc", field: value}, tokenizer(), DEFAULTS, chat=False)
    assert refused.value.status == 400 and refused.value.param == field
    assert field in str(refused.value) or field == "prompt", "the sentence names it"


@pytest.mark.parametrize(("field", "value"), WRONG_IN_CHATS)
def test_what_is_wrong_in_a_chat_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        understand({"messages": CHAT, field: value}, tokenizer(), DEFAULTS, chat=True)
    assert refused.value.param == field


def test_what_changes_nothing_is_accepted() -> None:
    body: dict[str, Any] = {name: values[0] for name, values in NEUTRAL.items() if values}
    body |= {"prompt": "abc", "model": "other", "metadata": {"a": "b"}, "user": "me", "best_of": 1, "logprobs": None}
    asked = understand(body, tokenizer(), DEFAULTS, chat=False)
    plain = understand({"prompt": "abc", "user": "me"}, tokenizer(), DEFAULTS, chat=False)
    assert asked == plain
    assert understand({"prompt": "abc", "top_k": -1, "user": "me"}, tokenizer(), DEFAULTS, chat=False) == plain


def test_every_choice_has_a_stream_of_its_own() -> None:
    body = {"prompt": ["ab", [5, 6]], "n": 2, "max_tokens": 3, "seed": 4, "priority": 2}
    asked = understand(body, tokenizer(), DEFAULTS, chat=False)
    assert [(each.stream, each.seed, each.n) for each in asked.sampling] == [(k, 4, 1) for k in range(4)]
    assert {(each.temperature, each.max_new_tokens, each.priority) for each in asked.sampling} == {(1.0, 3, 2)}
    assert len(asked.prompts) == 2 and asked.prompts[1] == [5, 6]
    named = understand(body | {"stream_id": 9, "prompt": "ab"}, tokenizer(), DEFAULTS, chat=False)
    assert [each.stream for each in named.sampling] == [9, 9 + (1 << 40)]
    with pytest.raises(RequestError, match="differ"):
        understand(body | {"max_completion_tokens": 4}, tokenizer(), DEFAULTS, chat=False)
