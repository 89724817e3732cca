"""A server with OpenAI's completions endpoint, which the driver plays requests against as if it were an engine."""

import asyncio
import itertools
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from experiments.contenders.openai import OpenAIServer
from experiments.load import counters
from experiments.load.run import LoadRun
from experiments.load.streams import RefusedError, Streams, message
from specdec.requests import SamplingParams
from specdec.types import Step

UNKNOWN = -1
"""Stands for a token that is counted, and not known."""
_ENDS = ("stop", "length")
_CLOSING = 5.0


@dataclass
class _Answer:
    """The part of one answer that has come."""

    request: int
    sent: float = float("nan")
    chunks: int = 0
    tokens: int = 0
    named: bool = True
    end: Step | None = None  # the last step, until the server has said how many tokens there were
    total: int | None = None


class Client:
    """Sends every request at once, on a connection of its own, and reads what is streamed.

    This happens in a thread with an event loop, so ``submit``, ``step`` and ``abort`` return at once. A ``Step`` is a
    chunk with the time at which it came; its ``elapsed`` counts from when the request had left this process. A chunk is
    usually what one round brought, but a busy server joins several, so what was drafted and accepted is read from the
    server's own counters (``told``).

    The tokens of a chunk are those that the server names (``token_ids``), or counts (``logprobs.tokens``, or ``usage``
    in every chunk), or else those of its text. The last chunk gets as many as the answer's final ``usage`` leaves over.
    Tokens without a name are ``UNKNOWN``.
    """

    drafter = None

    def __init__(self, server: OpenAIServer):
        self._server = server
        self.max_length = server.max_length
        self._ids = itertools.count()
        self._open: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # belongs to the loop's thread
        self._steps: deque[Step] = deque()
        self._news = threading.Event()
        self._of_answers: Counter[str] = Counter()
        self._tokens_are = "named"

    def __enter__(self) -> "Client":
        """Begin a run: the server has to be there, and its counters are read.

        Raises:
            ValueError: No server answers, or it does not have the model.
        """
        self._server.check()
        self._streams = Streams(self._server.url("completions"), self._server.headers)
        self._before = self._counted()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="client of a server", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for request in list(self._open):
            self.abort(request)
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        """Let what was dropped close its connections."""
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if others:
            await asyncio.wait(others, timeout=_CLOSING)

    @property
    def unfinished(self) -> int:
        """The number of requests whose end ``step`` has not returned yet."""
        return len(self._open)

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, *, speculate: bool = True, arrived: float | None = None
    ) -> int:
        """Send a request, and return its id. Whether a server speculates is its own setting."""
        request = next(self._ids)
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        body = streamed | self._server.body(prompt, sampling)
        self._open.add(request)
        self._loop.call_soon_threadsafe(self._start, request, body)
        return request

    def _start(self, request: int, body: Mapping[str, Any]) -> None:
        task = self._tasks[request] = self._loop.create_task(self._play(_Answer(request), body))
        task.add_done_callback(lambda _: self._tasks.pop(request))

    def wait(self, seconds: float) -> None:
        """Wait for news, at most so many seconds."""
        self._news.wait(seconds)

    def step(self) -> list[Step]:
        """Return what has come since the last call."""
        self._news.clear()
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        for step in steps:
            if step.finish_reason is not None:
                self._open.discard(step.request)
        return steps

    def abort(self, request_id: int) -> None:
        """Drop a request by closing its connection."""
        self._open.discard(request_id)
        self._loop.call_soon_threadsafe(self._drop, request_id)

    def _drop(self, request: int) -> None:
        if request in self._tasks:
            self._tasks[request].cancel()

    def stream(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], *, speculate: bool = True
    ) -> Iterator[Step]:
        """Yield the steps of prompts that are sent together.

        Raises:
            ValueError: The server refuses one, or breaks off.
        """
        for prompt, own in zip(prompts, sampling, strict=True):
            self.submit(prompt, own)
        while self.unfinished:
            self.wait(self._server.timeout)
            for step in self.step():
                if step.error is not None:
                    raise ValueError(f"the server at {self._server.address} cannot serve the prompts: {step.error}")
                yield step

    def forget(self) -> None:
        """Count from here on. A server keeps what it has cached."""
        self._of_answers.clear()
        self._before = self._counted()

    def told(self, run: LoadRun) -> LoadRun:
        """Return a run with what the server says about it."""
        after = self._counted()
        counted = Counter({name: value - self._before[name] for name, value in after.items()})
        if not counted["rounds"]:
            counted.update(self._of_answers)
        facts = {"address": self._server.address, "tokens": self._tokens_are, **counters.facts(counted)}
        return replace(run, totals=counters.totals(counted), facts={**run.facts, "server": facts})

    def _counted(self) -> Counter[str]:
        """Return the server's counters; none where it has no ``/metrics``."""
        return counters.counted(self._server.metrics(), self._server.model)

    async def _play(self, answer: _Answer, body: Mapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._server.timeout):
                await self._read(answer, json.dumps(body).encode())
            if answer.end is None:
                raise EOFError("the stream ended before the answer")
            step = answer.end
            if answer.total is not None and not answer.named:
                step = replace(step, token_ids=(UNKNOWN,) * max(0, answer.total - answer.tokens + len(step.token_ids)))
            self._tell(step)
        except Exception as error:  # whatever happens to a request is that request's failure
            self._tell(self._step(answer, time.perf_counter(), error=self._reason(error)))

    async def _read(self, answer: _Answer, body: bytes) -> None:
        def sent() -> None:
            answer.sent = time.perf_counter()

        async with aclosing(self._streams.post(body, sent)) as events:
            async for moment, data in events:
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise RefusedError(message(data))
                if event.get("usage") is not None:
                    answer.total = int(event["usage"]["completion_tokens"])
                self._of_answers.update(counters.counted_by(event))
                for choice in event.get("choices", ()):
                    self._take(answer, choice, moment)

    def _take(self, answer: _Answer, choice: Mapping[str, Any], moment: float) -> None:
        tokens, end = self._tokens(answer, choice), choice.get("finish_reason")
        answer.tokens += len(tokens)
        if end is not None and end not in _ENDS:
            raise RefusedError(f"the server ended the answer with {end!r}")
        if end is not None:
            answer.end = self._step(answer, moment, tokens, choice.get("text", ""), end)
        elif tokens:
            self._tell(self._step(answer, moment, tokens, choice.get("text", "")))

    def _tokens(self, answer: _Answer, choice: Mapping[str, Any]) -> tuple[int, ...]:
        named = choice.get("token_ids")
        if named is not None:
            return tuple(named)
        answer.named, text = False, choice.get("text")
        told = (choice.get("logprobs") or {}).get("tokens")
        if told is not None:
            self._tokens_are = "counted"
            return (UNKNOWN,) * len(told)
        if answer.total is not None:
            self._tokens_are = "counted"
            return (UNKNOWN,) * (answer.total - answer.tokens)
        if text:
            self._tokens_are = "those of the text"
        return (UNKNOWN,) * len(self._server.tokenize(text)) if text else ()

    def _step(
        self,
        answer: _Answer,
        moment: float,
        tokens: tuple[int, ...] = (),
        text: str = "",
        end: str | None = None,
        error: str | None = None,
    ) -> Step:
        answer.chunks += 1
        return Step(
            request=answer.request,
            round=answer.chunks - 1,
            token_ids=tokens,
            text=text,
            elapsed=moment - answer.sent,
            visible=moment,
            finish_reason="error" if error is not None else end,
            error=error,
        )

    def _tell(self, step: Step) -> None:
        self._steps.append(step)
        self._news.set()

    def _reason(self, error: Exception) -> str:
        """Return what went wrong in one sentence, which is the same for all that fail alike."""
        if isinstance(error, RefusedError):
            return str(error)
        if isinstance(error, TimeoutError):
            return f"there was no end within {self._server.timeout:g} s (timeout)"
        if isinstance(error, ConnectionRefusedError):
            return f"no server answers at {self._server.address}"
        if isinstance(error, EOFError | OSError):
            return "the connection broke before the end of the answer"
        return f"this is no answer in OpenAI's form ({type(error).__name__}: {error})"
