"""The endpoint as clients see it: the official one, and the bodies that load generators send."""

import json
import re
import threading
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from experiments.serving.fields import RequestError, understand
from experiments.serving.server import Server
from specdec import Engine, SamplingParams
from specdec.requests import Grammar
from tests.experiments.serving.conftest import DEFAULTS, engine, metric, serving, tokenizer, wait_for

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
IDS = [[5, 6, 7, 5, 6, 7], [9, 8]]
NAMES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total"),
    *("prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total"),
    *("request_success_total", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "spec_decode_num_drafts_total"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    "spec_decode_num_accepted_tokens_per_pos_total",
}
CHAT = [{"role": "user", "content": "abcabc"}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which has to end as such streams do."""
    with httpx.stream("POST", f"{server.url}/v1/{path}", json={"stream": True, **body}, timeout=60) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_greedy_completions_are_the_engines_token_for_token(client: openai.OpenAI, reference: Engine) -> None:
    expected = reference.generate(["abcabc", *IDS], GREEDY)
    more = {"ignore_eos": True, "return_token_ids": True}
    for prompt, own in (("abcabc", expected[:1]), (IDS[0], expected[1:2]), (IDS, expected[1:])):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0, extra_body=more)
        found = [(each.text, tuple(each.token_ids), each.finish_reason) for each in answer.choices]
        assert found == [(done.text, done.token_ids, "length") for done in own]
        assert answer.usage.completion_tokens == 24 * len(own)
        assert answer.usage.prompt_tokens == sum(len(done.prompt_ids) for done in own)


def test_a_seed_gives_the_engines_samples_streamed_and_not(client: openai.OpenAI, reference: Engine) -> None:
    """Samples and prompts have the streams that ``Engine.generate`` gives them; two of three samples differ.

    An end that is as good as certain waits for ``min_tokens``.
    """
    more = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.2, "stop_token_ids": [5]}
    shared = {"temperature": 0.8, "top_p": 0.9, "n": 3, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    ours = {"max_new_tokens": 12, "min_new_tokens": 4, "logit_bias": {5: 90, 7: -2.5}}
    sampling = SamplingParams(seed=7, **ours, **more, **shared)
    outputs = reference.generate(["ab", "cd"], sampling)
    expected = [(done.text, "stop") for done in outputs]
    assert {len(done.token_ids) for done in outputs} == {5} and len(set(expected[:3])) > 1
    ask = {"model": "tiny", "prompt": ["ab", "cd"], "max_tokens": 12, "seed": 7, **shared}
    ask |= {"logit_bias": {"5": 90, "7": -2.5}, "extra_body": more | {"min_tokens": 4}}
    assert [(each.text, each.finish_reason) for each in client.completions.create(**ask).choices] == expected
    texts = [""] * 6
    for event in client.completions.create(**ask, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [text for text, _ in expected]
    ask |= {"extra_body": more | {"min_tokens": 4, "stream_id": 5}, "prompt": "ab"}
    texts = [done.text for done in reference.generate(["ab"], replace(sampling, stream=5))]
    assert [each.text for each in client.completions.create(**ask).choices] == texts
    ask = {"model": "tiny", "prompt": "ab", "max_tokens": 12}
    first, second = (client.completions.create(**ask).choices[0].text for _ in range(2))
    assert first != second, "without a seed each request has a new one; equal by chance at most once in 2**12"


def test_chats_follow_the_template_and_stream_a_round_per_event(server, client, reference) -> None:
    (done,) = reference.generate([CHAT], GREEDY)
    ask = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 24, "temperature": 0}
    message = client.chat.completions.create(**ask, extra_body={"ignore_eos": True}).choices[0].message
    assert (message.role, message.content) == ("assistant", done.text)
    body = ask | {"ignore_eos": True, "return_token_ids": True}
    *rounds, last = events(server, "chat/completions", body | {"stream_options": {"include_usage": True}})
    choices, silent = [event["choices"][0] for event in rounds], [None] * (len(rounds) - 1)
    assert [len(choice["token_ids"]) for choice in choices] == [len(step.token_ids) for step in done.steps]
    assert "".join(choice["delta"]["content"] for choice in choices) == done.text
    assert [choice["delta"].get("role") for choice in choices] == ["assistant", *silent]
    assert [choice["finish_reason"] for choice in choices] == [*silent, "length"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 24
    assert {event["object"] for event in rounds} == {"chat.completion.chunk"}
    assert "usage" not in rounds[0] and len({event["id"] for event in [*rounds, last]}) == 1


def test_a_stop_string_ends_an_output(client: openai.OpenAI, reference: Engine) -> None:
    (done,) = reference.generate(["abcabc"], GREEDY)
    stop = [done.text[6:8], "never"]
    (expected,) = reference.generate(["abcabc"], SamplingParams(max_new_tokens=24, stop=stop))
    ask: dict[str, Any] = {"model": "tiny", "prompt": "abcabc", "max_tokens": 24, "temperature": 0, "stop": stop}
    answer = client.completions.create(**ask)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, "stop")
    assert answer.usage.completion_tokens == len(expected.token_ids) < 24
    streamed = [event.choices[0] for event in client.completions.create(**ask, stream=True)]
    assert "".join(each.text for each in streamed) == expected.text and streamed[-1].finish_reason == "stop"


def test_logprobs_are_the_models_own(client: openai.OpenAI, reference: Engine) -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_new_tokens=9, logprobs=2)
    (done,) = reference.generate(["abcabc"], params)
    ask: dict[str, Any] = {"model": "tiny", "prompt": "abcabc", "max_tokens": 9, "temperature": 0.7, "seed": 3}
    found = client.completions.create(**ask, logprobs=2).choices[0].logprobs
    np.testing.assert_allclose(np.array(found.token_logprobs, float), done.raw_logprobs, atol=1e-5)
    assert all(t in best and len(best) in (2, 3) for t, best in zip(found.tokens, found.top_logprobs, strict=True))
    streamed = [event.choices[0].logprobs for event in client.completions.create(**ask, logprobs=2, stream=True)]
    assert [value for each in streamed for value in each.token_logprobs] == found.token_logprobs
    (done,) = reference.generate([CHAT], params)
    chat = {name: value for name, value in ask.items() if name != "prompt"} | {"messages": CHAT, "logprobs": True}
    told = client.chat.completions.create(**chat, top_logprobs=2).choices[0].logprobs
    np.testing.assert_allclose([each.logprob for each in told.content], done.raw_logprobs, atol=1e-5)
    joined = bytes(byte for each in told.content for byte in each.bytes)  # pieces of characters have their own
    assert joined.decode(errors="replace") == reference.target.tokenizer.decode(done.token_ids)
    best = [[pair.logprob for pair in each.top_logprobs] for each in told.content]
    np.testing.assert_allclose(best, [[value for _, value in pairs] for pairs in done.top_logprobs], atol=1e-5)
    assert client.chat.completions.create(**chat).choices[0].logprobs.content[0].top_logprobs == []


def test_the_bodies_of_load_generators_are_understood(server: Server) -> None:
    """As vLLM's ``endpoint_request_func.py``, SGLang's ``bench_serving.py`` and GuideLLM's handlers send them."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    continuous = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    parts = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    vllm = {"model": "tiny", "prompt": "abc", "repetition_penalty": 1.0, "max_tokens": 5, "logprobs": None}
    sglang = {"model": "tiny", "temperature": 0.0, "max_tokens": 5, "stream": True, "ignore_eos": True}
    guide = {"model": "tiny", "prompt": "abc", "max_tokens": 5, "stop": None, "ignore_eos": True, **continuous}
    for path, body in (
        ("completions", vllm | usage | {"ignore_eos": True}),
        ("completions", vllm | usage | {"prompt": [5, 6, 7], "ignore_eos": True, "temperature": 0, "top_k": -1}),
        ("chat/completions", {"messages": parts, "max_completion_tokens": 5, "ignore_eos": True} | usage),
        ("completions", sglang | {"prompt": "abc", "best_of": 1}),
        ("chat/completions", sglang | {"messages": CHAT}),
        ("completions", guide),
    ):
        seen = events(server, path, body)
        tokens = seen[-1]["usage"]["completion_tokens"] if "stream_options" in body else 5
        assert tokens == 5, body
        assert [event["choices"][0]["finish_reason"] for event in seen if event["choices"]][-1] == "length"
        assert all(("usage" in event) == (body is guide) for event in seen[:-1]) or "stream_options" not in body


def test_paths_and_metrics_are_vllms(server: Server, client: openai.OpenAI, reference: Engine) -> None:
    def speculated() -> list[float]:
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return [metric(server, f"spec_decode_num_{name}_total") for name in names]

    before, (done,) = speculated(), reference.generate(["abcabc"], GREEDY)
    ask = {"prompt": "abcabc", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=ask).status_code == 200
    drafted = np.array([(1, step.proposed_depth, step.accepted) for step in done.steps if step.proposed_depth])
    assert np.subtract(speculated(), before).tolist() == drafted.sum(0).tolist() and drafted[:, 2].any()
    assert [model.id for model in client.models.list()] == ["tiny"]
    client.completions.create(model="tiny", prompt="abc", max_tokens=4, n=2)
    wait_for(lambda: metric(server, "num_requests_running") == metric(server, "num_requests_waiting") == 0)
    text = httpx.get(f"{server.url}/metrics").text
    assert set(re.findall(r"^# TYPE specdec:(\w+)", text, re.MULTILINE)) >= NAMES and 'model_name="tiny"' in text
    aborted = sum(float(line.split()[-1]) for line in text.splitlines() if 'finished_reason="abort"' in line)
    ended = metric(server, "request_success_total")
    assert ended == metric(server, "e2e_request_latency_seconds_count") + aborted
    for method, path in (("GET", "/v1/embeddings"), ("GET", "/v1/completions"), ("POST", "/health")):
        answer = httpx.request(method, server.url + path)
        assert answer.status_code in (404, 405) and "there are" in answer.json()["error"]["message"]


def test_errors_have_openais_form(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="abc", presence_penalty=2.5)
    assert refused.value.param == "presence_penalty" and "presence_penalty=2.5" in str(refused.value)
    url = f"{server.url}/v1/completions"
    for body in (b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"[" * 50_000):
        answer = httpx.post(url, content=body)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", body
    more: list[Any] = [{"max_tokens": 126}, {"adapter": "a"}, {"grammar": {"regex": "["}}, {"min_tokens": 13}]
    more += [{"logit_bias": {"99999": 1}}, {"prompt": [999]}, {"prompt": "a" * 200}, {"prompt": [[1], [999]]}]
    for ask in (*({"prompt": "abc"} | each for each in more), {"prompt": "a \ud800"}, {"\ud800": 1}):
        # What only the engine can tell, in a sentence without a type or a place of the server.
        answer = httpx.post(url, content=json.dumps(ask))
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and message and not re.search(r"Error|\.py|\(at ", message), message
    assert httpx.post(url, json={"prompt": "a" * 200_000}).status_code == 413
    assert server._engine.unfinished == 0 and server.open == 0
    assert client.completions.create(model="tiny", prompt="abc", max_tokens=2).choices[0].text is not None


def understood(chat: bool = False, **body: Any) -> Any:
    return understand(body, tokenizer(), DEFAULTS, chat=chat, most=8)


WRONG: dict[str, list[Any]] = {
    "temprature": [1],
    "temperature": ["hot", float("nan")],
    "max_tokens": [0, 2.5],
    "n": [0, 9, 2**70],
    "stop": [5, ["a", 1]],
    "echo": [True],
    "response_format": [{"type": "xml"}, "json", {"type": "json_schema", "json_schema": {}}],
    "grammar": ["[0-9]+", {"pattern": "a"}],
    "stream_options": [True, {"include": True}],
    "logprobs": [True, 21],
    "prompt": [[], {}, "", "\ud800", ["abc", 5], [[]], [True]],
    "messages": [CHAT],
}
WRONG_IN_CHATS: dict[str, list[Any]] = {
    "messages": [
        *([], "abc", ["abc"], [{"role": "user", "content": "\ud800"}], [{"role": "user"}]),
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}],
    ],
    "tools": [[5]],
    "chat_template_kwargs": ["mood"],
    "top_logprobs": [3],
    "logprobs": [1],
    "prompt": ["abc"],
}


@pytest.mark.parametrize(("asked", "wrong"), [({"prompt": "abc"}, WRONG), ({"messages": CHAT}, WRONG_IN_CHATS)])
def test_what_is_wrong_is_refused_by_name(asked: dict[str, Any], wrong: dict[str, list[Any]]) -> None:
    for field, value in ((field, value) for field, values in wrong.items() for value in values):
        with pytest.raises(RequestError) as refused:
            understood("messages" in asked, **asked | {field: value})
        assert refused.value.status == 400 and refused.value.param == field, value
        assert field in str(refused.value) or field in asked, "the sentence names it"


def test_the_chat_template_is_given_tools_calls_of_them_and_more() -> None:
    """Arguments become objects, and parts one text; what the template does not read would be ignored."""
    reads = tokenizer()
    reads.chat_template = (
        "{{ tools | tojson }}{{ mood }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments.x + 1 }}{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 2}'}}
    said = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None}]
    said += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "4"}]
    body = {"messages": said, "tools": [{"name": "f"}], "tool_choice": "auto", "chat_template_kwargs": {"mood": "!"}}
    (ids,) = understand(body, reads, DEFAULTS, chat=True, most=8).prompts
    assert reads.decode(ids) == '[{"name": "f"}]!<user>ab<assistant>3<tool>4'
    assert call["function"]["arguments"] == '{"x": 2}', "the client's own are left alone"
    for name in ("tools", "chat_template_kwargs"):
        with pytest.raises(RequestError, match=r"template does not read '(tools|mood)', so it would change nothing"):
            understood(chat=True, messages=CHAT, **{name: body[name]})


def test_a_response_format_is_a_grammar_and_fields_may_not_contradict_each_other() -> None:
    def grammar_of(**body: Any) -> Any:
        return understood(chat=True, messages=CHAT, **body).sampling[0].grammar

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert grammar_of(response_format=asked) == Grammar(json_schema=schema)
    assert grammar_of(response_format={"type": "json_object"}) == Grammar(json_schema={"type": "object"})
    assert grammar_of(response_format={"type": "text"}) is grammar_of() is None
    assert grammar_of(grammar={"regex": "a+"}) == Grammar(regex="a+")
    with pytest.raises(RequestError, match="leave one of them out"):
        grammar_of(grammar={"regex": "a+"}, response_format=asked)
    for message, wrong in (
        ("differ", {"max_tokens": 3, "max_completion_tokens": 4}),
        ("stream", {"n": 2, "stream_id": 2**63 - 1}),
    ):
        with pytest.raises(RequestError, match=message):
            understood(prompt="ab", **wrong)


def test_nobody_is_answered_before_the_engine_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    made, gate = engine(), threading.Event()
    monkeypatch.setattr(made, "warm_up", lambda **kinds: gate.wait())
    threading.Timer(0.5, gate.set).start()
    with serving(made):
        assert gate.is_set()
