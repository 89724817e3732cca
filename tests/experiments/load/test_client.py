"""A server under load, played by a small one on this machine that fails in all the ways that servers do."""

import asyncio
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.commands.load import load
from experiments.contenders.openai import OpenAIServer
from experiments.load import counters
from experiments.load.client import UNKNOWN, Client
from experiments.load.driver import Driver, Overload
from experiments.load.figures import LATE, figures_of
from experiments.load.run import CLOSED, DONE, DROPPED, FAILED, OPEN, LoadRun
from experiments.load.texts import Asked
from experiments.load.workloads import Planned
from experiments.results.frame import Figures
from experiments.results.limits import Terms
from experiments.results.statistics import Bootstrap
from specdec.requests import SamplingParams
from tests.experiments.conftest import byte_tokenizer, composed

TOKENS = (70, 71, 72, 73, 74, 75, 76)
CHUNKS = ((70,), (71, 72, 73), (74, 75), (76,))
"""How the server delivers them: rounds of several tokens."""
METRICS = """# HELP vllm:spec_decode_num_drafts_total Rounds.
vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} ROUNDS
vllm:spec_decode_num_drafts_total{engine="1",model_name="tiny"} 1.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="another"} 1000.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} DRAFTED
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} ACCEPTED
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="0"} ACCEPTED
vllm:generation_tokens_total{engine="0",model_name="tiny"} GENERATED
vllm:external_prefix_cache_queries_total{engine="0",model_name="tiny"} 99.0
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 8e+01
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 20.0
"""


class Server:
    """OpenAI's completions over HTTP/1.1. What it does to a request stands in the request's first token.

    Attributes:
        gap: Seconds before every chunk.
        names: What it tells of tokens: ``token_ids``, ``logprobs``, ``usage`` (in every chunk), or ``text`` alone.
        open: Connections that are being answered.
    """

    NORMAL, ERROR_WITHIN, CUT, BUSY, NEVER, NO_JSON, ABORTED = range(1001, 1008)

    def __init__(self) -> None:
        self.gap, self.names, self.models, self.has_metrics = 0.001, "token_ids", ["tiny"], True
        self.bodies: list[dict[str, Any]] = []
        self.open, self.most_open = 0, 0
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._listen(0))
        self.port = self.server.sockets[0].getsockname()[1]
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _listen(self, port: int) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=4096)

    def vanish(self) -> None:
        """Close everything at once."""

        async def close() -> None:
            self.server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), self.loop).result()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET /v1/models"):
                self._whole(writer, 200, {"data": [{"id": name, "max_model_len": 50} for name in self.models]})
            elif head.startswith("GET /metrics"):
                done = len(self.bodies)
                values = {"ROUNDS": 2 * done, "DRAFTED": 8 * done, "ACCEPTED": 3 * done, "GENERATED": 7 * done}
                text = METRICS
                for name, value in values.items():
                    text = text.replace(name, str(float(value)))
                self._whole(writer, 200 if self.has_metrics else 404, text)
            else:
                length = next(int(line.split(": ")[1]) for line in head.split("\r\n") if "ontent-Length" in line)
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                try:
                    await self._answer(writer, reader, body)
                finally:
                    self.open -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _whole(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        text = (body if isinstance(body, str) else json.dumps(body)).encode()
        writer.write(
            b"HTTP/1.1 %d Said\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (status, len(text)) + text
        )

    async def _answer(self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader, body: dict[str, Any]) -> None:
        kind = body["prompt"][0]
        if kind == self.BUSY:
            self._whole(writer, 429, {"error": {"message": "the queue is full"}})
            return

        def send(event: Any) -> None:
            data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            # A proxy may cut a stream anywhere.
            for piece in (data[:9], data[9:]):
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))

        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        gone = asyncio.ensure_future(reader.read())
        count = 0
        for place, tokens in enumerate(CHUNKS):
            await asyncio.wait([gone], timeout=3600 if kind == self.NEVER else self.gap)
            if gone.done():
                return
            count += len(tokens)
            end = None if place < len(CHUNKS) - 1 else "abort" if kind == self.ABORTED else "length"
            choice: dict[str, Any] = {"index": 0, "text": bytes(tokens).decode(), "finish_reason": end}
            choice |= {"token_ids": tokens} if self.names == "token_ids" else {}
            choice |= {"logprobs": {"tokens": ["?"] * len(tokens)}} if self.names == "logprobs" else {}
            send({"choices": [choice], **({"usage": {"completion_tokens": count}} if self.names == "usage" else {})})
            if place == 1 and kind == self.ERROR_WITHIN:
                send({"error": {"message": "out of memory", "code": 500}})
            if place == 1 and kind == self.CUT:
                return
            if place == 1 and kind == self.NO_JSON:
                send("<html>")
        spec = {"num_spec_steps": 3, "num_draft_tokens": 9, "num_accepted_draft_tokens": 4}
        used = {"completion_tokens": len(TOKENS) + (self.names == "text")}
        send({"choices": [], "usage": used, "metrics": {"speculative_decoding": spec}})
        send("[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.vanish()
    made.loop.call_soon_threadsafe(made.loop.stop)
    made.thread.join()
    made.loop.close()


def bound(server: Server, **options: Any) -> OpenAIServer:
    made = OpenAIServer(base_url=server.url, **options)
    target: Any = SimpleNamespace(tokenizer=byte_tokenizer(), eos_token_ids=frozenset())
    made.bind(target, max_batch_size=8, max_length=64)
    return made


def in_time(found: Figures) -> list[str]:
    """The warnings but for the one that this machine was too busy to send in time."""
    return [each for each in found.warnings if not each.startswith("LATE")]


def requests_of(kinds: Sequence[int]) -> list[Asked]:
    planned = Planned(klass="a", pieces=((0, 3),), output_tokens=7)
    return [
        Asked(planned=planned, prompt_ids=[kind, 5, 6], sampling=SamplingParams(max_new_tokens=7)) for kind in kinds
    ]


def play(
    server: Server,
    kinds: Sequence[int],
    *,
    times: Any = None,
    loop: str = OPEN,
    users: int = 0,
    patience: float | None = None,
    **options: Any,
) -> LoadRun:
    asked = requests_of(kinds)
    with Client(bound(server, **options)) as client:
        driver = Driver(
            client,
            asked,
            np.zeros(len(asked)) if times is None else times,
            loop=loop,
            users=users,
            overload=Overload(patience=patience),
            in_process=False,
            wait=client.wait,
        )
        driver.run()
        return client.told(driver.result(method="server", rate=1.0))


@pytest.mark.parametrize("names", ["token_ids", "logprobs", "usage", "text"])
def test_tokens_are_the_servers_however_it_tells_them(server: Server, names: str) -> None:
    server.names, server.gap = names, 0.01
    run = play(server, [Server.NORMAL] * 3)
    # The text has one token less than the server says; the last chunk makes up for it.
    counts = [1, 3, 2, 2 if names == "text" else 1]
    for row in run.requests.itertuples():
        assert [count for _, count in row.emissions] == counts
        assert list(row.tokens) == (list(TOKENS) if names == "token_ids" else [UNKNOWN] * sum(counts))
        moments = [moment for moment, _ in row.emissions]
        assert row.arrived <= row.submitted and row.admitted <= moments[0] and moments == sorted(moments)
        assert moments[-1] - moments[0] > 2 * server.gap, "chunks have the times at which they came"
        assert (row.first_token, row.finished) == (moments[0], moments[-1])
    assert run.requests.outcome.eq(DONE).all() and run.facts["server"]["tokens"] == {
        "token_ids": "named", "logprobs": "counted", "usage": "counted", "text": "those of the text"
    }[names]  # fmt: skip
    sent = server.bodies[0]
    assert (
        sent["stream"] and sent["stream_options"] == {"include_usage": True} and sent["prompt"] == [Server.NORMAL, 5, 6]
    )


def test_speculation_is_what_the_server_counts(server: Server) -> None:
    terms, bootstrap = Terms(limits=None), Bootstrap(resamples=100, confidence=0.9, seed=0)
    play(server, [Server.NORMAL] * 2)  # counted before
    run = play(server, [Server.NORMAL] * 4)
    assert (run.totals.rounds, run.totals.drafted, run.totals.accepted) == (8, 32, 12)
    assert run.facts["server"]["acceptance_at"] == [1.5] and run.facts["server"]["tokens_per_round"] == 28 / 16
    found = figures_of(run, terms, bootstrap)
    assert found.mean_acceptance_length == 2.5 and found.wasted.rejected_nodes == 20
    assert not in_time(found), "Little's law holds for what the client saw"
    server.has_metrics = False
    run = play(server, [Server.NORMAL] * 4)
    assert (run.totals.rounds, run.totals.drafted, run.totals.accepted) == (12, 36, 16), "the answers' own figures"
    counted = counters.counted(re.sub("[A-Z]{6,}", "4", METRICS), "tiny")
    assert counted["rounds"] == 5 and counted["queried"] == 80, "engines are added up, models and other names are not"
    assert figures_of(run, terms, bootstrap).mean_acceptance_length == 1 + 16 / 12
    assert counters.facts(Counter())["tokens_per_round"] is None


def test_a_request_fails_alone_and_says_why(server: Server) -> None:
    kinds = [
        Server.NORMAL, Server.ERROR_WITHIN, Server.CUT, Server.BUSY, Server.NEVER, Server.NO_JSON, Server.ABORTED,
        Server.NORMAL,
    ]  # fmt: skip
    run = play(server, kinds, timeout=0.5)
    reasons = dict(zip(kinds[1:-1], run.requests.reason[1:-1], strict=True))
    assert list(run.requests.outcome) == [DONE, *[FAILED] * 6, DONE] and not any(run.requests.reason[[0, 7]])
    assert reasons[Server.ERROR_WITHIN] == "out of memory"
    assert reasons[Server.CUT] == "the connection broke before the end of the answer"
    assert reasons[Server.BUSY] == "HTTP 429 Said: the queue is full"
    assert reasons[Server.NEVER] == "there was no end within 0.5 s (timeout)"
    assert reasons[Server.NO_JSON].startswith("this is no answer in OpenAI's form")
    assert reasons[Server.ABORTED] == "the server ended the answer with 'abort'"
    assert list(run.requests.output_tokens) == [7, 4, 4, 0, 0, 4, 6, 7], "what had come stays counted, apart"
    said = in_time(figures_of(run, Terms(limits=None), Bootstrap(resamples=100, confidence=0.9, seed=0)))
    assert len(said) == 4 and said[3] == "3 requests failed for other reasons"


def test_dropped_requests_close_their_connections(server: Server) -> None:
    run = play(server, [Server.NORMAL, Server.NEVER, Server.NEVER], patience=0.2)
    assert list(run.requests.outcome) == [DONE, DROPPED, DROPPED]
    assert list(run.requests.reason) == ["", *["it had waited too long"] * 2]
    deadline = time.monotonic() + 5
    while server.open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.open, "the server saw that nobody waits any more"


def test_a_vanished_server_is_one_sentence(server: Server) -> None:
    server.gap = 0.5

    def vanish() -> None:
        while server.open < 3:
            time.sleep(0.01)
        server.vanish()

    threading.Thread(target=vanish).start()
    run = play(server, [Server.NORMAL] * 4, times=np.array([0.0, 0.0, 0.0, 1.0]))
    assert run.requests.outcome.eq(FAILED).all()
    assert set(run.requests.reason[:3]) == {"the connection broke before the end of the answer"}
    assert run.requests.reason[3] == f"no server answers at {server.url}"
    with pytest.raises(ValueError, match=f"no OpenAI-compatible server answers at {server.url}: start one"):
        play(server, [Server.NORMAL])


def test_closed_loops_and_many_connections(server: Server) -> None:
    server.gap = 0.05
    before = threading.active_count()
    cpu = time.process_time()
    run = play(server, [Server.NORMAL] * 12, times=np.zeros(12), loop=CLOSED, users=4)
    assert server.most_open == 4 and run.requests.outcome.eq(DONE).all()
    arrivals = run.requests.arrived.to_numpy()
    ends = run.requests.finished.to_numpy()
    assert all(np.abs(ends - later).min() < 1e-9 for later in arrivals[4:]), "a user comes after the answer"
    assert time.process_time() - cpu < 0.9 * run.seconds, "waiting takes no time of the processor"
    server.gap = 0.3
    run = play(server, [Server.NORMAL] * 1000)
    assert server.most_open == 1000 and run.requests.outcome.eq(DONE).all()
    assert int(run.requests.output_tokens.sum()) == 7000
    assert threading.active_count() <= before + 1, "no thread is left, and none belongs to a connection"


def test_the_command_plays_servers_beside_our_engine_and_instead_of_it(
    server: Server, saved: Path, tmp_path: Path, no_pictures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [f"target.name={saved / 'target'}", "threads=1", "bootstrap.resamples=100", "dataset.count=3", "requests=3"]
    small += [
        "rates=[100]",
        "workload.classes.chat.input=24",
        "workload.classes.chat.output=7",
        "warmup_prompts=1",
        "method=own",
    ]
    far = ["+contender@contenders.far=openai", f"contenders.far.base_url={server.url}"]
    plain, own, other = load(composed("load", *small, *far, "drafter=ngram", f"out={tmp_path / 'a'}"))
    assert [run.method for run in (plain, own, other)] == ["plain", "own", "far"]
    assert own.facts["outputs"]["equal"] == 3 and other.facts["outputs"]["compared"] == 3
    parted = other.facts["outputs"]
    assert parted["equal"] == 0 and parted["unexplained"] == 3, "what the small server says is no model's"
    assert len(server.bodies) == 4 and other.totals.rounds == 6, "the warm-up was sent, and is not counted"
    said = " ".join(capsys.readouterr().out.split())
    assert "own 3 of 3, far 0 of 3" in said and "3 WITHOUT such a reason" in said and "What servers say" in said
    (alone,) = load(composed("load", *small, "engine=openai", f"engine.base_url={server.url}", f"out={tmp_path / 'b'}"))
    assert (alone.method, alone.totals.accepted) == ("own", 9) and alone.requests.outcome.eq(DONE).all()
    assert list(alone.requests.arrived) == list(other.requests.arrived), "the same requests at the same moments"
    for words, wrong in (
        (["engine=openai", "+drafter@methods.a=ngram"], "methods=.*with a server as the engine, which has its own"),
        (
            ["engine=openai", "clock=virtual", "clock.costs=llama_8b_h100", "clock.traces=x"],
            "engine=openai with clock=virtual: a server's time is real",
        ),
        (
            ["+contender=hf_generate", "drafter=ngram"],
            "contenders.hf_generate answers only when all prompts of a call are done",
        ),
        (["+contender@contenders.plain=openai"], "contenders.plain: a method of ours is called plain"),
        (["engine=openai", "engine.base_url=http://127.0.0.1:9/v1"], "no OpenAI-compatible server answers at"),
    ):
        with pytest.raises(ValueError, match=wrong):
            load(composed("load", *small, *words, f"out={tmp_path / 'c'}"))


@pytest.mark.full
def test_the_generator_is_in_time(server: Server) -> None:
    server.gap = 0.02
    times = np.cumsum(np.random.default_rng(0).exponential(1 / 100, size=300))
    found = []
    for _ in range(3):  # a machine that is busy for a moment is so for both
        bare, begun = [], time.perf_counter()
        for moment in times:
            time.sleep(max(0.0, begun + moment - time.perf_counter()))
            bare.append(time.perf_counter() - begun - moment)
        # Where a thread that only sleeps is late, so is everybody.
        allowed = max(LATE, 3 * float(np.quantile(bare, 0.99)))
        found.append((play(server, [Server.NORMAL] * 300, times=times).late, allowed))
    late, allowed = min(found, key=lambda each: each[0] - each[1])
    assert late <= allowed, f"late by {1000 * late:.1f} ms, and {1000 * allowed:.1f} ms are allowed here"
