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
from tests.experiments.conftest import byte_tokenizer

PROMPTS = [[5, 6, 7, 5, 6, 7], [9, 8], [3, 4, 3]]


@pytest.fixture(scope="module")
def target(saved: Path) -> Target:
    return Target.from_pretrained(str(saved / "target"), dtype="float32")


class Server(ThreadingHTTPServer):
    """Answers like vLLM: token ids where they are asked for.

    Attributes:
        owner: Whose it says it is: llama.cpp's names tokens at its own endpoint, or without parts of characters beside
            log-probabilities, and SGLang's takes no ``top_k`` of 0.
        parts: Tokens of an output that are parts of characters.
    """

    def __init__(self, target: Target):
        super().__init__(("127.0.0.1", 0), Handler)
        self.engine = Engine(target, max_length=128)
        self.lock = threading.Lock()
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models = ["tiny"]
        self.refuse = False
        self.owner = ""
        self.parts = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    """Two endpoints, which answer in JSON and keep silent."""

    server: Server

    def log_message(self, format: str, *args: object) -> None: ...

    def answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        own = {"meta": {"n_ctx": 40}} if self.server.owner == "llamacpp" else {}
        self.answer(200, {"data": [{"id": name, "owned_by": self.server.owner, **own} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            if self.server.refuse or (self.server.owner == "sglang" and body.get("top_k") == 0):
                self.answer(400, {"error": "no such parameter"})
                return
            sampling = SamplingParams(max_new_tokens=body["max_tokens"], ignore_eos=body.get("ignore_eos", False))
            done = self.server.engine.generate([body["prompt"]], sampling)[0]
        choice: dict[str, Any] = {"text": done.text, "finish_reason": done.finish_reason}
        tokens = list(done.token_ids)
        if self.path == "/completion" and self.server.owner == "llamacpp":
            self.answer(200, {"content": done.text, "tokens": tokens if body.get("return_tokens") else []})
            return
        if self.server.owner != "llamacpp" and body.get("return_token_ids"):
            choice["token_ids"] = tokens
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"content": [{"id": token} for token in tokens[self.server.parts :]]}
        if body.get("return_tokens_as_token_ids"):
            choice["logprobs"] = {"tokens": [f"token_id:{token}" for token in tokens]}
        self.answer(200, {"choices": [choice], "usage": {"completion_tokens": len(tokens)}})


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


@pytest.mark.parametrize(
    ("owner", "sent"),
    [
        ("vllm", {"return_token_ids": True, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.0}),
        ("sglang", {"return_token_ids": True, "min_p": 0.1}),
        ("llamacpp", {"samplers": ["temperature", "top_k", "top_p", "min_p"], "top_k": 0, "min_p": 0.1}),
        ("specdec", {"return_token_ids": True, "min_p": 0.1}),
    ],
)
def test_known_servers_name_their_tokens_and_draw_by_the_law(
    target: Target, server: Server, owner: str, sent: dict[str, Any]
) -> None:
    server.owner, sampling = owner, SamplingParams(max_new_tokens=9, ignore_eos=True, min_p=0.1)
    expected = server.engine.generate(PROMPTS, sampling)
    contender = bound(target, server)
    done = contender.generate(PROMPTS, [sampling] * 3)
    assert [each.token_ids for each in done] == [each.token_ids for each in expected] and contender.tells_tokens
    assert all(sent.items() <= body.items() for body in server.seen)
    assert contender.max_length == (40 if owner == "llamacpp" else 128)
    bound(target, server, extra={"min_p": 0.0}).generate(PROMPTS[:1], [sampling])
    assert server.seen[-1]["min_p"] == 0.0, "what is given goes first"


@pytest.mark.parametrize("extra", [{"logprobs": 1}, {"return_tokens_as_token_ids": True}])
def test_tokens_beside_their_log_probabilities_are_taken_if_none_is_missing(
    target: Target, server: Server, extra: dict[str, Any]
) -> None:
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True)
    contender = bound(target, server, extra=extra)
    done = contender.generate(PROMPTS[:1], [sampling])
    assert done[0].token_ids == server.engine.generate(PROMPTS[:1], sampling)[0].token_ids and contender.tells_tokens
    server.parts = 1
    contender.generate(PROMPTS[:1], [sampling])
    assert contender.tells_tokens == ("logprobs" not in extra)


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
    with pytest.raises(ValueError, match="extra has 'n': a request is answered by one output"):
        OpenAIServer(base_url=server.url, extra={"n": 2})
    server.models, server.refuse = ["a", "b"], True
    for model, said in (("big", r"'big': choose among \['a', 'b'\]"), (None, r"has 2 models: give model=…")):
        with pytest.raises(ValueError, match=said):
            bound(target, server, model=model)
    with pytest.raises(RuntimeError, match=r"refused a request.*no such parameter"):
        bound(target, server, model="b").generate(PROMPTS[:1], [SamplingParams()])
    with pytest.raises(ValueError, match="no OpenAI-compatible server answers at"):
        OpenAIServer(base_url="http://127.0.0.1:9/v1").bind(target, max_batch_size=1, max_length=64)
