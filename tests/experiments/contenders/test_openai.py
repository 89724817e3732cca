"""A server with OpenAI's endpoint, played by a small one on this machine that decodes with the same target."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.contenders.openai import KEY, OpenAIServer
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.experiments.answering import AnsweringHandler
from tests.experiments.conftest import byte_tokenizer

PROMPTS = [[5, 6, 7, 5, 6, 7], [9, 8], [3, 4, 3]]


@pytest.fixture(scope="module")
def target(saved: Path) -> Target:
    return Target.from_pretrained(str(saved / "target"), dtype="float32")


class Server(ThreadingHTTPServer):
    """Answers like vLLM: token ids where they are asked for."""

    def __init__(self, target: Target):
        super().__init__(("127.0.0.1", 0), Handler)
        self.engine = Engine(target, max_length=128)
        self.lock = threading.Lock()
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models = ["tiny"]
        self.refuse = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(AnsweringHandler, BaseHTTPRequestHandler):
    """Two endpoints."""

    server: Server

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            if self.server.refuse:
                self.answer(400, {"error": "no such parameter"})
                return
            sampling = SamplingParams(max_new_tokens=body["max_tokens"], ignore_eos=body.get("ignore_eos", False))
            done = self.server.engine.generate([body["prompt"]], sampling)[0]
        choice: dict[str, Any] = {"text": done.text, "finish_reason": done.finish_reason}
        if body.get("return_token_ids"):
            choice["token_ids"] = list(done.token_ids)
        self.answer(200, {"choices": [choice], "usage": {"completion_tokens": len(done.token_ids)}})


@pytest.fixture
def server(target: Target) -> Iterator[Server]:
    made = Server(target)
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def bound(target: Target, server: Server, **options: Any) -> OpenAIServer:
    made = OpenAIServer(base_url=server.url, **options)
    made.bind(target, max_batch_size=3, max_length=128)
    return made


def test_token_ids_are_the_servers_own(target: Target, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    more = SamplingParams(temperature=0.5, top_k=3, min_p=0.1, stop=("x",), seed=3, max_new_tokens=2)
    bound(target, server).generate(PROMPTS[:1], [more])
    sent = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "stop": ["x"], "max_tokens": 2, "prompt": PROMPTS[0]}
    assert sent.items() <= server.seen.pop().items(), "fields beyond OpenAI's are sent where they matter"
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True)
    expected = [done.token_ids for done in Engine(target, max_length=128, max_batch_size=3).generate(PROMPTS, sampling)]
    done = bound(target, server, extra={"return_token_ids": True}).generate(PROMPTS, [sampling] * 3)
    assert [each.token_ids for each in done] == expected
    assert [each.prompt_ids for each in done] == [tuple(prompt) for prompt in PROMPTS]
    assert {each.finish_reason for each in done} == {"length"}
    assert all(each.steps == () for each in done)
    assert set(server.keys) == {"Bearer secret"}
    assert {body["model"] for body in server.seen} == {"tiny"}
    assert all("top_k" not in body for body in server.seen)  # OpenAI's own server knows no such field


def test_text_alone_is_tokenized_again(target: Target, server: Server) -> None:
    # What a server that stops by itself knows of its output.
    server.engine.generate = lambda prompts, sampling: [  # type: ignore[method-assign,assignment]
        SimpleNamespace(text="ab", finish_reason="stop", token_ids=())
        if prompts[0] == PROMPTS[0]
        else SimpleNamespace(text="abc", finish_reason="length", token_ids=())
    ]
    done = bound(target, server).generate(PROMPTS[:2], [SamplingParams(max_new_tokens=3)] * 2)
    letters = byte_tokenizer()("abc")["input_ids"]
    eos = byte_tokenizer().eos_token_id
    assert [each.token_ids for each in done] == [(*letters[:2], eos), tuple(letters)]
    assert [(each.text, each.finish_reason) for each in done] == [("ab", "stop"), ("abc", "length")]


def test_every_failure_is_one_sentence(target: Target, server: Server) -> None:
    with pytest.raises(ValueError, match="localhost:8000"):
        OpenAIServer(base_url="localhost:8000")
    server.models, server.refuse = ["a", "b"], True
    for model, said in (("big", r"'big': choose among \['a', 'b'\]"), (None, r"has 2 models: give model=…")):
        with pytest.raises(ValueError, match=said):
            bound(target, server, model=model)
    with pytest.raises(RuntimeError, match=r"refused a request.*no such parameter"):
        bound(target, server, model="b").generate(PROMPTS[:1], [SamplingParams()])
    with pytest.raises(ValueError, match="no OpenAI-compatible server answers at"):
        OpenAIServer(base_url="http://127.0.0.1:9/v1").bind(target, max_batch_size=1, max_length=64)
