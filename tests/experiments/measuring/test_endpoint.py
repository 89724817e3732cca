"""Servers scored twice: one whose two ways differ by known amounts, ones that do not say enough, and ours."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from experiments.contenders.openai import OpenAIServer
from experiments.measuring.endpoint import through_server
from experiments.parity import parity as run_parity
from experiments.results.frame import Figures
from tests.experiments.answering import AnsweringHandler
from tests.experiments.serving.conftest import engine, serving

VOCAB, TOKENS, TOP = 300, 6, 5
PROMPTS = [[5, 9, 2], [1, 1, 7], [30, 4, 10], [2, 60, 3]]
LAWS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(-1).double()


class Server(ThreadingHTTPServer):
    """A model that looks at the last token alone, behind OpenAI's endpoint.

    Attributes:
        change: Changes the law at a place of a text that comes in one piece, given the text up to there.
        lacks: What it does not say or do; without ``openai`` it is like llama.cpp's, without ``numbers`` like
            SGLang's, which calls tokens by their texts beside log-probabilities.
        left: Requests that it still answers.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.change: Callable[[Sequence[int], torch.Tensor], torch.Tensor] = lambda text, law: law
        self.lacks: set[str] = set()
        self.left = 1_000
        self.seen: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The first choice of the answer, as vLLM has it, less what is lacking."""
        text, logprobs = list(body["prompt"]), body.get("logprobs")
        places: list[dict[str, float] | None] = []
        whole = [None, *(self.change(text[:at], LAWS[text[at - 1]]) for at in range(1, len(text)))]
        if body.get("echo") and "openai" not in self.lacks:
            places = [None if law is None else self.likeliest(law, logprobs) for law in whole]
        tokens = []
        for _ in range(body["max_tokens"]):
            law = LAWS[(text + tokens)[-1]]
            if body.get("cache_prompt") is False:
                law = self.change(text, law)
            tokens.append(int(law.topk(2).indices[-1 if "temperature" in self.lacks else 0]))
            if logprobs is not None:
                places.append(self.likeliest(law, 1 if "alternatives" in self.lacks else logprobs))
        choice: dict[str, Any] = {"text": "", "finish_reason": "length"}
        if "logprobs" not in self.lacks:
            names = [f"token_id:{token}" if "ids" not in self.lacks else "?" for token in tokens]
            choice["logprobs"] = {"tokens": names, "top_logprobs": places}
            if "numbers" in self.lacks:
                texts = [at and {name[9:]: value for name, value in at.items()} for at in places]
                choice["logprobs"] = {"tokens": [name[9:] for name in names], "top_logprobs": texts}
        if "openai" in self.lacks and logprobs is not None:
            told = [[{"id": int(name[9:]), "logprob": value} for name, value in (at or {}).items()] for at in places]
            several = zip(tokens, told, strict=True)
            content = [{"id": token, "top_logprobs": most} for token, most in several]
            choice["logprobs"] = {"content": content[: -1 if "characters" in self.lacks else None]}
        elif "ids" not in self.lacks:
            choice["token_ids"] = tokens
        if (most := body.get("prompt_logprobs")) is not None and "prompt_logprobs" not in self.lacks:
            told = [{} if law is None else self.likeliest(law, most) for law in whole]
            ranked = [{name[9:]: {"logprob": value, "rank": 1} for name, value in place.items()} for place in told]
            choice["prompt_logprobs"] = [None, *ranked[1:]]
        return choice

    @staticmethod
    def likeliest(law: torch.Tensor, count: int) -> dict[str, float]:
        values, tokens = law.topk(count)
        return {f"token_id:{token}": value for token, value in zip(tokens.tolist(), values.tolist(), strict=True)}


class Handler(AnsweringHandler, BaseHTTPRequestHandler):
    """Its two paths."""

    server: Server

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "tiny", "max_model_len": 64}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        self.server.left -= 1
        refused = "prompts" in self.server.lacks and (body.get("echo") or "prompt_logprobs" in body)
        if self.server.left < 0:
            self.close_connection = True
        elif refused:
            self.answer(400, {"error": "no log-probabilities of prompts here"})
        else:
            usage = {"completion_tokens": body["max_tokens"]}
            self.answer(200, {"choices": [self.server.answer(body)], "usage": usage})


@pytest.fixture
def fake() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def rows(url: str, batches: Sequence[int] = (1, 2)) -> list[Figures]:
    server = OpenAIServer(base_url=url)
    server.max_length = 64
    server.check()
    return list(through_server(server, PROMPTS, tokens=TOKENS, batches=batches, alternatives=TOP))


def outputs() -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(TOKENS):
            text.append(int(LAWS[text[-1]].argmax()))
        found.append(text)
    return found


@pytest.mark.parametrize(
    "lacks",
    [set(), {"prompt_logprobs"}, {"prompt_logprobs", "numbers"}, {"prompt_logprobs", "openai"}],
    ids=["vllm", "echo", "sglang", "llama.cpp"],
)
def test_what_differs_is_counted_exactly(fake: Server, lacks: set[str]) -> None:
    fake.lacks = lacks
    # Groups of two prompts; in each: two at once against one alone, and both ways re-scored.
    assert [(row.batch, row.size) for row in rows(fake.url)] == [(2, 1), (1, 9), (2, 9)] * 2
    assert all(row.logits == row.lost == row.flips == 0 and row.parted == [None] * 2 for row in rows(fake.url))

    text = outputs()[1][: 3 + 4]  # the place of the fifth token of the second output
    law = LAWS[text[-1]]
    both, (more, less) = law.topk(2).indices, law.topk(2).values.tolist()

    def exchanged(seen: Sequence[int], law: torch.Tensor) -> torch.Tensor:
        return law if list(seen) != text else law.scatter(0, both, law[both.flip(0)])

    def one_bit_off(seen: Sequence[int], law: torch.Tensor) -> torch.Tensor:
        bits = law.clone().view(torch.int64)
        if list(seen) == text:
            bits[both[1]] ^= 1
        return bits.view(torch.float64)

    fake.change = exchanged
    whole, *_ = [row for row in rows(fake.url, [4]) if row.size > 1]
    assert whole.places == 4 * TOKENS and whole.logits == 2 / (4 * TOKENS * TOP)
    assert whole.largest == whole.flipped == pytest.approx(more - less)
    assert whole.flips == 1 and whole.parted == [None, 4, None, None]
    assert whole.lost == pytest.approx((exp(more) - exp(less)) / (4 * TOKENS))

    fake.change = one_bit_off
    whole, *_ = [row for row in rows(fake.url, [4]) if row.size > 1]
    assert whole.logits == 1 / (4 * TOKENS * TOP) and whole.flips == 0 and 0 < whole.largest < 1e-14

    fake.change = lambda seen, law: LAWS[seen[-2]] if len(seen) > 1 else law  # each place tells the one before
    assert all(row.logits > 0.9 for row in rows(fake.url, [4]) if row.size > 1)


def test_our_server_tells_zero_in_invariant_mode_and_rounding_otherwise() -> None:
    for invariant in (False, True):
        with serving(engine(invariant=invariant, max_length=64)) as server:
            found = rows(f"{server.url}/v1", [1])
        assert all(row.places == TOKENS and row.largest < 1e-4 and row.flips == 0 for row in found) and len(found) == 4
        assert not invariant or all(row.logits == row.lost == 0 for row in found)


@pytest.fixture
def words(saved: Path, tmp_path: Path, fake: Server) -> list[str]:
    given = ["+contender=openai", f"contenders.openai.base_url={fake.url}", f"target.name={saved / 'target'}"]
    sizes = ["dataset.count=4", "tokens=6", "prompt_tokens=8", "batch=[1,2]", "alternatives=5"]
    return [*given, *sizes, f"out={tmp_path / 'out'}"]


def test_the_command_keeps_what_was_gathered(
    configure: Callable[..., DictConfig],
    words: list[str],
    fake: Server,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = run_parity(configure("parity", *words))
    assert len(whole) == 6
    assert "The same log-probabilities however many tokens" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "out" / "parity.png").stat().st_size > 10_000
    monkeypatch.setattr("experiments.commands.parity.parity_plot", lambda rows, path, facts: path)
    for left, there in ((5, 1), (3, 1), (12, 4), (1_000, 6)):  # requests, of 8 per group of two prompts
        fake.left, again = left, [*words, f"out={tmp_path / 'again'}", f"resume={str(left != 5).lower()}"]
        assert run_parity(configure("parity", *again)) == whole[:there]
        file = json.loads((tmp_path / "again" / "parity.json").read_text())
        assert len(file["rows"]) == there and (there == 6 or "gave no answer" in file["left_out"][0])
    fake.left = 0
    assert run_parity(configure("parity", *again)) == whole  # nothing is left to ask
    fake.left, fake.lacks = 1_000, {"prompts"}
    (row,) = run_parity(configure("parity", *words, f"out={tmp_path / 'lacks'}"))
    assert row.size == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "tells no log-probabilities of a prompt" in said and "no log-probabilities of prompts here" in said


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("logprobs", "returns no log-probabilities of what it generates"),
        ("ids", "does not return the ids of all tokens"),
        ("openai characters", "does not return the ids of all tokens"),
        ("alternatives", "does not tell of two tokens at every place"),
        ("temperature", "does not take the likeliest token at temperature=0"),
    ],
)
def test_a_server_that_does_not_say_enough_is_one_sentence(
    configure: Callable[..., DictConfig], words: list[str], fake: Server, lacks: str, said: str
) -> None:
    fake.lacks = set(lacks.split())
    with pytest.raises(ValueError, match=f"nothing was measured: openai .*{said}"):
        run_parity(configure("parity", *words))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("contenders.openai.base_url=http://127.0.0.1:9/v1", "no OpenAI-compatible server answers at"),
        ("tokens=56", "has 63 positions"),
        ("alternatives=1", "alternatives"),
        ("+contender=hf_generate", "contenders.hf_generate is no server"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(
    configure: Callable[..., DictConfig], words: list[str], fake: Server, wrong: str, said: str
) -> None:
    given = [word for word in words if not (wrong.startswith("+contender") and "openai" in word)]
    with pytest.raises(ValueError, match=said):
        run_parity(configure("parity", *given, wrong))
    assert not fake.seen
