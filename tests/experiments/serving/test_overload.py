"""Too many requests, clients that leave or do not read, engines that fail, and the end of the server."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from experiments.serving.server import Server
from specdec import Engine, Step
from tests.experiments.serving.conftest import DEFAULTS, engine, metric, serving, wait_for

LONG = {"prompt": "abcabc", "max_tokens": 100, "ignore_eos": True}


class Gate:
    """Holds an engine's turns back until it is opened."""

    def __init__(self, engine: Engine):
        self.open, self.reached, self.turns = threading.Event(), threading.Event(), 0
        self._step = engine.step
        engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[Step]:
        self.reached.set()
        self.open.wait()
        self.turns += 1
        return self._step()


@contextmanager
def gated(recording: str = "auto", **options: Any) -> Iterator[tuple[Server, Gate, Engine, Callable[..., Any]]]:
    """A server whose engine waits, the gate that holds it, the engine, and a function that asks and does not wait."""
    made = engine(max_batch_size=1, recording=recording)
    gate = Gate(made)
    with ThreadPoolExecutor(8) as pool, serving(made, **options) as server:

        def ask(**body: Any) -> "Future[httpx.Response]":
            return pool.submit(lambda: httpx.post(f"{server.url}/v1/completions", json=LONG | body, timeout=60))

        yield server, gate, made, ask


def test_a_full_queue_says_when_to_come_again() -> None:
    with gated(queue=1) as (server, gate, _, ask):
        held = [ask(), ask()]
        wait_for(lambda: server.open == 2)
        refused = ask().result()
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert ask(n=3).result().status_code == 429  # before its body is understood
        gate.open.set()
        assert [each.result().status_code for each in held] == [200, 200]
        wait_for(lambda: server.open == 0)
        never = ask(n=3).result()
        assert never.status_code == 400 and "at most 2" in never.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_what_a_client_has_left_is_dropped(stream: bool) -> None:
    with gated() as (server, gate, made, ask):
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(LONG | {"stream": stream, "n": 2}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        connections = [socket.create_connection((host, int(port))) for _ in range(4)]
        for number, sent in enumerate((head + body, head + body, head + body, head + body[:1])):
            connections[number].sendall(sent)  # one runs and two wait, and half of a request is there
        wait_for(lambda: server.open == 7)
        for each in connections:
            each.close()
        wait_for(lambda: server.open == 0)
        gate.open.set()
        wait_for(lambda: made.unfinished == 0)
        assert gate.turns <= 2 and not server.calls
        assert metric(server, "request_success_total") == 6  # all of them aborts
        assert ask().result().status_code == 200


def test_a_failed_turn_ends_its_own_requests(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    failing: list[bool] = []
    with gated(recording="off") as (server, gate, made, ask):
        run = made.runner.run

        def fails_once(*arguments: Any) -> Any:
            if failing.pop() if failing else False:
                raise RuntimeError("a bad turn")
            return run(*arguments)

        monkeypatch.setattr(made.runner, "run", fails_once)
        first, second = ask(), ask(n=2)
        wait_for(lambda: server.open == 3 and gate.reached.is_set())  # the warm-up is over, too
        failing.append(True)
        gate.open.set()
        answers = sorted((first.result(), second.result()), key=lambda answer: answer.status_code)
        assert [each.status_code for each in answers] == [200, 500]
        failed = answers[1].json()["error"]
        assert failed["type"] == "server_error" and "a bad turn" in failed["message"]
        wait_for(lambda: server.open == made.unfinished == 0)
        assert ask().result().status_code == 200
    assert capsys.readouterr().err.count("a bad turn") == 1


@pytest.mark.parametrize("temperatures", [None, (0.0,), (1.0,)], ids=["as it is", "mutant: greedy", "mutant: sampled"])
def test_greedy_and_sampled_requests_come_to_a_warm_engine(temperatures: tuple[float, ...] | None, monkeypatch) -> None:
    made = engine(max_batch_size=1, recording="rounds")
    if temperatures is not None:
        kinds = [replace(DEFAULTS, temperature=each) for each in temperatures]
        monkeypatch.setattr(made, "warm_up", lambda **given: Engine.warm_up(made, sampling=kinds))
    with serving(made) as server:
        for temperature in (0, 1):
            body = {"prompt": "abcabc", "max_tokens": 8, "temperature": temperature}
            assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert (made.recording_counts.replayed_share == 1.0) == (temperatures is None)


def test_an_engine_that_cannot_go_on_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(recording="off")
    monkeypatch.setattr("experiments.serving.worker.MOST_ERRORS", 2)
    with serving(made) as server:
        assert httpx.post(f"{server.url}/v1/completions", json=LONG).status_code == 200
        for name in ("run", "run_together"):
            monkeypatch.setattr(made.runner, name, lambda *arguments: 1 / 0)
        for _ in range(2):
            answer = httpx.post(f"{server.url}/v1/completions", json=LONG | {"stream": True})
            assert answer.status_code == 500 and "ZeroDivisionError" in answer.json()["error"]["message"]
        wait_for(lambda: server.failure)
    assert server.failure is not None and "cannot go on" in server.failure


def test_stopping_lets_running_requests_end() -> None:
    with gated() as (server, gate, _, ask):
        held = [ask(), ask(stream=True)]
        wait_for(lambda: server.open == 2)
        server.stop()
        wait_for(lambda: server.draining)
        refused = ask().result()
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert httpx.get(f"{server.url}/health").status_code == 503
        gate.open.set()
        assert [each.result().status_code for each in held] == [200, 200]
        assert held[1].result().text.endswith("data: [DONE]\n\n")


def test_stopping_does_not_wait_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    with gated(drain=0.05) as (server, gate, _, ask):
        held = ask()
        wait_for(lambda: server.open == 1)
        server.stop()
        assert held.result().status_code == 503
        gate.open.set()
    assert "requests that did not end in drain=0.05 seconds: 1" in capsys.readouterr().err


def test_ports_are_refused_in_a_sentence() -> None:
    made = engine()
    taken = pytest.raises(ValueError, match=r"cannot listen at 127\.0\.0\.1, port \d+ .*give another port")
    with socket.create_server(("127.0.0.1", 0)) as other, taken:
        Server(made, DEFAULTS, name="tiny", port=other.getsockname()[1])


@pytest.mark.full
def test_the_command_ends_well_after_ctrl_c(saved: Path, tmp_path: Path) -> None:
    words = [f"target.name={saved / 'target'}", f"drafter.name={saved / 'drafter'}", "engine=paged", "threads=1"]
    words += ["port=0", "engine.max_length=200", f"hydra.run.dir={tmp_path}", "prefix=vllm", "engine.max_batch_size=1"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "experiments.serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None and run.stderr is not None
        try:
            url = run.stdout.readline().split(": ")[1].split("/v1")[0]
            body = LONG | {"stream": True, "n": 6, "max_tokens": 150}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                assert "vllm:num_requests_running" in httpx.get(f"{url}/metrics").text
                run.send_signal(signal.SIGINT)
                seen = [line for line in lines if line]
            assert seen[-1] == "data: [DONE]" and sum('"length"' in line for line in seen) == 6
            assert run.wait(timeout=30) == 0
            assert "stopping when all requests have ended" in run.stderr.read()
        finally:
            run.kill()
