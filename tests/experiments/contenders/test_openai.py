"""transformers' generate beside our engine, and servers with OpenAI's endpoint, whose answers are made up here."""

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from transformers import AddedToken
from transformers.generation import candidate_generator

from experiments.contenders import openai
from experiments.contenders.base import OtherEngine
from experiments.contenders.hf import HfGenerate
from experiments.contenders.openai import KEY, OpenAIServer
from specdec import Engine, SamplingParams, Target
from tests.experiments.conftest import byte_tokenizer
from tests.models import tiny_model

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8], [3, 4, 3, 4, 3]]
SAMPLING = ("temperature", "top_p", "seed", "ignore_eos")
URL = "http://127.0.0.1:8000/v1"


class Server:
    """Answers like vLLM, or its ``owner``: llama.cpp's names tokens elsewhere, and SGLang's takes no ``top_k`` of 0."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch):
        self.engine, self.lock = Engine(target, max_length=128), Lock()
        self.models, self.owner, self.ignores = ["tiny"], "", set[str]()
        self.seen: list[dict[str, Any]] = []
        monkeypatch.setattr(openai.httpx, "Client", partial(httpx.Client, transport=httpx.MockTransport(self.answer)))

    def answer(self, request: httpx.Request) -> httpx.Response:
        if not str(request.url).startswith("http://127.0.0.1:8000/"):
            return httpx.HTTPTransport().handle_request(request)  # where nobody answers
        if request.method == "GET":
            own = {"meta": {"n_ctx": 40}} if self.owner == "llamacpp" else {}
            return httpx.Response(200, json={"data": [{"id": m, "owned_by": self.owner, **own} for m in self.models]})
        body = json.loads(request.content)
        with self.lock:
            self.seen.append(body | {"key": request.headers.get("Authorization")})
            if self.owner == "sglang" and body.get("top_k") == 0:
                return httpx.Response(400, json={"error": "no such parameter"})
            given = {name: body[name] for name in SAMPLING if name in body and name not in self.ignores}
            (done,) = self.engine.generate([body["prompt"]], SamplingParams(max_new_tokens=body["max_tokens"], **given))
        choice: dict[str, Any] = {"text": done.text, "finish_reason": done.finish_reason}
        tokens = list(done.token_ids)
        if request.url.path == "/completion" and self.owner == "llamacpp":
            return httpx.Response(200, json={"tokens": tokens if body.get("return_tokens") else []})
        if self.owner != "llamacpp" and body.get("return_token_ids"):
            choice["token_ids"] = tokens
        return httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": len(tokens)}})


@pytest.fixture
def server(target: Target, monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(target, monkeypatch)


def bound(target: Target, **options: Any) -> OpenAIServer:
    made = OpenAIServer(**{"base_url": URL} | options)
    made.bind(target, max_batch_size=3, max_length=128)
    return made


def test_fields_beyond_openais_are_sent_where_they_matter(target: Target, server: Server, monkeypatch: Any) -> None:
    monkeypatch.setenv(KEY, "secret")
    more = SamplingParams(temperature=0.5, top_k=3, min_p=0.1, stop=("x",), seed=3, max_new_tokens=2)
    bound(target).generate(PROMPTS[:1], [more])
    (body,) = server.seen
    sent = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "stop": ["x"], "max_tokens": 2, "prompt": PROMPTS[0]}
    assert body == body | sent and (body["model"], body["key"]) == ("tiny", "Bearer secret")
    done = bound(target, extra={"min_p": 0.0}).generate(PROMPTS[:1], [replace(more, top_k=0)])
    assert server.seen[-1]["min_p"] == 0.0, "what is given goes first"
    assert "top_k" not in server.seen[-1], "OpenAI's own server knows no such field"
    assert (done[0].prompt_ids, done[0].steps) == (tuple(PROMPTS[0]), ())


def test_known_servers_name_their_tokens_and_draw_by_the_law(target: Target, server: Server) -> None:
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True, min_p=0.1)
    expected = server.engine.generate(PROMPTS, sampling)
    for owner, sent in (
        ("vllm", {"return_token_ids": True, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.0}),
        ("sglang", {"return_token_ids": True, "min_p": 0.1}),
        ("llamacpp", {"samplers": ["temperature", "top_k", "top_p", "min_p"], "top_k": 0, "min_p": 0.1}),
    ):
        server.owner, server.seen = owner, []
        contender = bound(target)
        done = contender.generate(PROMPTS, [sampling] * 3)
        assert [(each.token_ids, each.finish_reason) for each in done] == [(e.token_ids, "length") for e in expected]
        assert all(sent.items() <= body.items() for body in server.seen) and contender.tells_tokens
        assert contender.max_length == (40 if owner == "llamacpp" else 128)


def test_text_alone_is_tokenized_again(target: Target, server: Server) -> None:
    # What a server that stops by itself knows of its output.
    texts = {len(PROMPTS[0]): ("ab", "stop"), len(PROMPTS[1]): ("abc", "length")}
    server.engine.generate = lambda prompts, _: [  # type: ignore[method-assign,assignment]
        SimpleNamespace(**dict(zip(("text", "finish_reason"), texts[len(prompts[0])], strict=True)), token_ids=())
    ]
    done = bound(target).generate(PROMPTS[:2], [SamplingParams(max_new_tokens=3)] * 2)
    letters = byte_tokenizer()("abc")["input_ids"]
    assert [each.token_ids for each in done] == [(*letters[:2], byte_tokenizer().eos_token_id), tuple(letters)]
    assert [(each.text, each.finish_reason) for each in done] == list(texts.values())


def test_every_failure_is_one_sentence(target: Target, server: Server, saved: Path) -> None:
    server.models, server.owner = ["a", "b"], "sglang"
    refused = bound(target, model="b", extra={"top_k": 0})
    assistant = HfGenerate(assistant=str(saved / "drafter"))
    for message, call in (
        ("extra has 'n': a request is answered by one output", lambda: bound(target, extra={"n": 2})),
        (r"'big': choose among \['a', 'b'\]", lambda: bound(target, model="big")),
        ("has 2 models: give model=…", lambda: bound(target)),
        ("no OpenAI-compatible server answers", lambda: bound(target, base_url="http://127.0.0.1:9/v1")),
        ("refused a request.*no such param", lambda: refused.generate(PROMPTS[:1], [SamplingParams()])),
        ("gave no answer", lambda: bound(target, model="b").generate([[]], [SamplingParams()])),
        ("another vocabulary", lambda: bound_hf(Target(tiny_model(vocab_size=99)), made=assistant)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def bound_hf(target: Target, size: int = 1, made: OtherEngine | None = None) -> OtherEngine:
    made = made or HfGenerate()
    made.bind(target, max_batch_size=size, max_length=128)
    return made


def plain(target: Target, sampling: SamplingParams) -> list[tuple[int, ...]]:
    engine = Engine(target, max_length=128)
    return [engine.generate([prompt], sampling)[0].token_ids for prompt in PROMPTS]


def test_a_ragged_batch_equals_our_plain_decoding_and_the_models_own_defaults_are_not_mixed_in(target: Target) -> None:
    config = target.model.generation_config
    config.repetition_penalty, config.do_sample = 3.0, True
    try:
        for more in ({"ignore_eos": True}, {"repetition_penalty": 1.5, "stop_token_ids": (17,)}):
            sampling = SamplingParams(max_new_tokens=20, **more)  # type: ignore[arg-type]
            done = bound_hf(target, 3).generate(PROMPTS, [sampling] * 3)
            assert [each.token_ids for each in done] == plain(target, sampling)
            for each in done:
                assert [step.accepted for step in each.steps] == [0] * len(each.token_ids)
                assert each.text == byte_tokenizer().decode(each.token_ids, skip_special_tokens=True)
        assert target.model.generation_config is config, "they come back"
    finally:
        config.repetition_penalty, config.do_sample = 1.0, False


@pytest.mark.parametrize(
    ("kind", "generator", "options"),
    [
        ("gemma4", "SinglePositionMultiTokenCandidateGenerator", {}),
        ("dflash", "DFlashTokenCandidateGenerator", {"speculation_type": "dflash"}),
        ("mtp", "MTPCandidateGenerator", {"use_mtp": True}),
    ],
)
def test_what_reads_the_targets_states_drafts_too(kind, generator, options, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    example = __import__("audit_transformers")
    torch.manual_seed(0)
    getattr(example, kind)(tmp_path)
    of, drafts = getattr(candidate_generator, generator), []
    given = of.get_candidates
    monkeypatch.setattr(of, "get_candidates", lambda *args, **named: drafts.append(given(*args, **named)) or drafts[-1])
    target = Target.from_pretrained(str(tmp_path), dtype="float32")
    assistant = None if kind == "mtp" else str(tmp_path / "assistant")
    made = HfGenerate(assistant=assistant, num_tokens=2 if kind == "gemma4" else None, dtype="float32", options=options)
    with pytest.raises(ValueError, match="transformers drafts at batch 1 only"):
        bound_hf(target, size=2, made=made)
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    done, plainly = (bound_hf(target, made=each).generate([PROMPTS[0]], [sampling])[0] for each in (made, HfGenerate()))
    assert done.token_ids == plainly.token_ids
    assert any(ids.shape[1] > len(PROMPTS[0]) + 1 and logits is not None for ids, logits in drafts)


def test_sampling_is_seeded_by_the_request_filtered_and_leaves_the_global_generator_alone(target: Target) -> None:
    contender = bound_hf(target)
    before = torch.get_rng_state()

    def draw(**more: int) -> tuple[int, ...]:
        sampling = SamplingParams(temperature=1, max_new_tokens=16, ignore_eos=True, **more)  # type: ignore[arg-type]
        return contender.generate([PROMPTS[0]], [sampling])[0].token_ids

    # 257 tokens and 16 draws: equal by chance never.
    drawn = [draw(seed=seed, stream=stream) for seed, stream in ((1, 1), (1, 1), (2, 1), (1, 2))]
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3
    assert torch.equal(before, torch.get_rng_state())
    # Top-k of 1 leaves one token: a filter that does not arrive would show.
    assert draw(top_k=1) == plain(target, SamplingParams(max_new_tokens=16, ignore_eos=True))[0]


def test_stop_strings_and_processors_arrive(target: Target) -> None:
    only = lambda ids, scores: scores.masked_fill(torch.arange(scores.shape[1]) != 66, -torch.inf)  # noqa: E731
    letter, tokenizer = byte_tokenizer().decode([66]), copy.deepcopy(byte_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(letter, special=True)]})
    special = Target(target.model, tokenizer)
    for model, stop, wanted in (
        (target, (), ((66,) * 6, letter * 6, "length")),
        (target, (letter * 2,), ((66, 66), "", "stop")),
        (special, (letter,), ((66,), "", "stop")),
    ):
        sampling = SamplingParams(max_new_tokens=6, logits_processor=only, stop=stop)
        done = bound_hf(model).generate([PROMPTS[0]], [sampling])[0]
        assert (done.token_ids, done.text, done.finish_reason) == wanted
