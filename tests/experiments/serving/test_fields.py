"""Which fields a request may have."""

from typing import Any

import pytest

from experiments.serving.fields import NEUTRAL, RequestError, understand
from specdec.requests import Grammar
from tests.experiments.serving.conftest import DEFAULTS, tokenizer

TOKENIZER = tokenizer()
CHAT = [{"role": "user", "content": "abc"}]

WRONG: dict[str, list[Any]] = {
    **{name: [0.5, -1] for name in ("presence_penalty", "frequency_penalty")},
    **{name: [True] for name in ("echo", "use_beam_search", "include_stop_str_in_output")},
    **{name: [{}, {"regex": "a*"}] for name in ("guided_json", "structured_outputs")},
    "logit_bias": [{"5": 10}],
    "response_format": [{"type": "json_schema"}, {"type": "xml"}, "json", {"type": "json_schema", "json_schema": {}}],
    "grammar": ["[0-9]+", {"pattern": "a"}, {"regex": ""}],
    "tools": [[{"type": "function"}]],
    "min_tokens": [5],
    "prompt_logprobs": [1],
    "temprature": [1],
    "temperature": ["hot", -1, float("nan"), float("inf"), True],
    "top_p": [0, 1.5],
    "top_k": [-2, 1.5],
    "min_p": [2],
    "repetition_penalty": [0],
    "max_tokens": [0, "many", 2.5],
    "n": [0, 1.5, 9, 2**70],
    "seed": ["x", 2**64],
    "stop": [5, [""], ["a", 1]],
    "ignore_eos": [1],
    "stream_options": [True, {"include": True}, {"include_usage": 1}],
    "logprobs": [-1, True, 21],
    "top_logprobs": [1],
    "priority": ["high"],
    "stream_id": [0.5, 2**64],
    "prompt": [[], {}, 5, "", "\ud800", ["abc", 5], [[]], [True], [["a"]]],
    "messages": [CHAT],
}
WRONG_IN_CHATS: dict[str, list[Any]] = {
    "messages": [
        *([], "abc", ["abc"], [{"role": "user", "content": "\ud800"}], [{"role": "user"}]),
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
    "top_logprobs": [3],
    "logprobs": [1],
    "prompt": ["abc"],
}


@pytest.mark.parametrize(
    ("field", "chat"), [*((field, False) for field in WRONG), *((field, True) for field in WRONG_IN_CHATS)]
)
def test_what_is_wrong_is_refused_by_name(field: str, chat: bool) -> None:
    asked: dict[str, Any] = {"messages": CHAT} if chat else {"prompt": "abc"}
    for value in (WRONG_IN_CHATS if chat else WRONG)[field]:
        with pytest.raises(RequestError) as refused:
            understand(asked | {field: value}, TOKENIZER, DEFAULTS, chat=chat, most=8)
        assert refused.value.status == 400 and refused.value.param == field, value
        assert field in str(refused.value) or field == ("messages" if chat else "prompt"), "the sentence names it"


def test_what_changes_nothing_is_accepted() -> None:
    body: dict[str, Any] = {name: values[0] for name, values in NEUTRAL.items() if values}
    body |= {"prompt": "abc", "model": "other", "metadata": {"a": "b"}, "user": "me", "best_of": 1, "logprobs": None}
    asked = understand(body, TOKENIZER, DEFAULTS, chat=False, most=8)
    plain = understand({"prompt": "abc", "user": "me"}, TOKENIZER, DEFAULTS, chat=False, most=8)
    off = understand({"prompt": "abc", "top_k": -1, "user": "me"}, TOKENIZER, DEFAULTS, chat=False, most=8)
    assert all((each.prompts, each.sampling) == (plain.prompts, plain.sampling) for each in (asked, off))


def test_a_response_format_is_a_grammar() -> None:
    def grammar_of(**body: Any) -> Any:
        (sampling,) = understand({"messages": CHAT, **body}, TOKENIZER, DEFAULTS, chat=True, most=8).sampling
        return sampling.grammar

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert grammar_of(response_format=asked) == Grammar(json_schema=schema)
    assert grammar_of(response_format={"type": "json_object"}) == Grammar(json_schema={"type": "object"})
    assert grammar_of(response_format={"type": "text"}) is grammar_of() is None
    assert grammar_of(grammar={"regex": "a+"}) == Grammar(regex="a+")
    with pytest.raises(RequestError, match="leave one of them out"):
        grammar_of(grammar={"regex": "a+"}, response_format=asked)


def test_every_choice_has_a_stream_of_its_own() -> None:
    body = {"prompt": ["ab", [5, 6]], "n": 2, "max_tokens": 3, "seed": 4, "priority": 2}
    asked = understand(body, TOKENIZER, DEFAULTS, chat=False, most=8)
    assert [(each.stream, each.seed, each.n) for each in asked.sampling] == [(k, 4, 1) for k in range(4)]
    assert {(each.temperature, each.max_new_tokens, each.priority) for each in asked.sampling} == {(1.0, 3, 2)}
    assert len(asked.prompts) == 2 and asked.prompts[1] == [5, 6]
    named = understand(body | {"stream_id": 9, "prompt": "ab"}, TOKENIZER, DEFAULTS, chat=False, most=8)
    assert [each.stream for each in named.sampling] == [9, 9 + (1 << 40)]
    with pytest.raises(RequestError, match="differ"):
        understand(body | {"max_completion_tokens": 4}, TOKENIZER, DEFAULTS, chat=False, most=8)
    with pytest.raises(RequestError, match="stream"):
        understand(body | {"prompt": "ab", "stream_id": 2**63 - 1}, TOKENIZER, DEFAULTS, chat=False, most=8)
    with pytest.raises(RequestError, match="at most 8"):
        understand({"prompt": ["a"] * 9}, TOKENIZER, DEFAULTS, chat=False, most=8)
