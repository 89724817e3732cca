"""The endpoint itself: paths, HTTP, and the life of a call from its body to its last event."""

import asyncio
import copy
import json
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from experiments.serving.answers import Call, Choice, Writer
from experiments.serving.fields import Asked, RequestError, understand
from experiments.serving.metrics import Metrics
from experiments.serving.worker import Worker
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.types import Step

BACKLOG = 16384
"""Connections that may wait to be accepted; the system may allow fewer."""


class Server:
    """An engine behind OpenAI's endpoints for completions and chats. One engine, one process; for research.

    Args:
        engine: The engine; nobody else may use it afterwards.
        defaults: What a request does not say; its seed and stream are not used.
        port: The port; 0 takes any that is free.
        queue: Requests that may wait on top of those that the engine decodes together.
        drain: Seconds that running requests are given when the server is stopped.
        max_body: Bytes that the body of a request may have.
        prefix: Stands before the names of all metrics: ``specdec``, or ``vllm`` for what looks for that.

    Raises:
        ValueError: The address cannot be listened at.
    """

    def __init__(
        self,
        engine: Engine,
        defaults: SamplingParams,
        *,
        name: str,
        host: str = "127.0.0.1",
        port: int = 8000,
        queue: int = 1024,
        drain: float = 30.0,
        max_body: int = 4 << 20,
        prefix: str = "specdec",
    ):
        self._engine, self._name, self._drain, self._max_body = engine, name, drain, max_body
        self._defaults, self._most = replace(defaults, n=1, stream=None), queue + engine.max_batch_size
        self._tokenizer = copy.deepcopy(engine.target.tokenizer)  # the engine's thread decodes with the other one
        self._writer = Writer(name, self._tokenizer)
        self._encoder = ThreadPoolExecutor(1, "tokenizer")
        # All of these belong to the event loop's thread.
        self.open = 0  # places that calls have taken
        self.calls: set[Call] = set()  # those that were handed to the engine
        self.draining = False  # whether new calls are refused, because the server is about to stop
        self.failure: str | None = None  # why the engine cannot go on
        self._idle = asyncio.Event()
        self.worker = Worker(
            engine,
            kinds=[replace(self._defaults, temperature=each) for each in (0.0, self._defaults.temperature or 1.0)],
            take=lambda steps: self._loop.call_soon_threadsafe(self._take, steps),
            refuse=lambda call, refusal: self._loop.call_soon_threadsafe(call.refuse, refusal),
            broken=lambda failure: self._loop.call_soon_threadsafe(self._broken, failure),
        )
        self._metrics = Metrics(prefix=prefix, model=name, state=self.worker.state)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ValueError(f"cannot listen at {host}, port {port} ({error.strerror}): give another port") from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"

    def run(self) -> None:
        """Serve until a signal, or ``stop``. Raises RuntimeError: the engine cannot go on."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every connection is a file
        paths = {"/health": self._health, "/v1/models": self._models, "/metrics": self._metrics_page}
        routes = [Route(path, answer, methods=["GET"]) for path, answer in paths.items()]
        for path, chat in (("/v1/completions", False), ("/v1/chat/completions", True)):
            routes.append(Route(path, _Completions(self, chat), methods=["POST"]))
        errors: dict[Any, Any] = {RequestError: _error, HTTPException: _error}
        app = Starlette(routes=routes, lifespan=self._life, exception_handlers=errors)
        config = uvicorn.Config(app, log_level="warning", access_log=False, backlog=BACKLOG, lifespan="on")
        self._http = _Http(config, self)
        self._http.run(sockets=[self._socket])
        if self.failure is not None:
            raise RuntimeError(self.failure)

    @asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self.worker.start()
        await self._loop.run_in_executor(None, self.worker.warm.wait)  # who connects before waits for an answer
        yield
        self.worker.stop()
        self._encoder.shutdown()

    # ---------------------------------------------------------------- the end

    def stop(self) -> None:
        """Refuse new calls, let those that run end, and then stop. May be called from any thread."""
        asyncio.run_coroutine_threadsafe(self._stop_when_idle(), self._loop)

    async def _stop_when_idle(self) -> None:
        self.draining = True
        try:
            if self.open:
                self._idle.clear()
                await asyncio.wait_for(self._idle.wait(), self._drain)
        except TimeoutError:
            print(f"requests that did not end in drain={self._drain:g} seconds: {self.open}", file=sys.stderr)
        self._end(RequestError("the server has stopped", status=503))

    def _broken(self, failure: str) -> None:
        self.failure, self.draining = failure, True
        self._end(RequestError(failure, status=500))

    def _end(self, refusal: RequestError) -> None:
        for call in self.calls:
            call.refuse(refusal)
        self._http.should_exit = True

    # ---------------------------------------------------------------- a call

    async def complete(self, request: Request, send: Send, *, chat: bool) -> None:
        """Answer a completion or a chat."""
        arrived, places = time.perf_counter(), 0
        try:
            try:
                places = self._enter(1)
            finally:  # a client reads no answer before it has sent everything
                body = await _body(request, self._max_body if places else 0)
            # Long texts are made tokens of beside the event loop.
            asked = await self._loop.run_in_executor(self._encoder, self._understand, body, chat)
            places = self._enter(len(asked.sampling), had=places)
            await self._answer(Call(asked, arrived), request, send)
        except ClientDisconnect:
            pass  # nobody is there to be answered
        finally:
            self.open -= places
            if not self.open:
                self._idle.set()

    def _enter(self, count: int, *, had: int = 0) -> int:
        """Take so many places for a call, which may have some already; returns how many it has then."""
        if self.draining and not had:
            raise RequestError("the server is about to stop", status=503)
        if self.open + count - had > self._most:
            raise RequestError(f"{self.open} requests are waiting or running already: come again later", status=429)
        self.open += count - had
        return count

    def _understand(self, body: bytes, chat: bool) -> Asked:
        try:
            parsed = json.loads(body)
            json.dumps(parsed, ensure_ascii=False).encode()  # halves of characters are refused
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is no JSON: {error}") from error
        return understand(parsed, self._tokenizer, self._defaults, chat=chat, most=self._most)

    async def _answer(self, call: Call, request: Request, send: Send) -> None:
        stream = call.asked.fields.stream
        watcher = asyncio.create_task(_watch(call, request.receive))
        self.calls.add(call)
        self.worker.put(call)
        try:
            await call.news.wait()
            while not stream and call.running and not call.gone:
                call.news.clear()
                await call.news.wait()
            if call.gone:
                return
            if call.refusal is not None:
                raise call.refusal
            if stream:
                await self._events(call, send)
            else:
                await JSONResponse(self._writer.whole(call))(request.scope, request.receive, send)
        finally:
            watcher.cancel()
            self.calls.discard(call)
            if call.refusal is None or call.refusal.status != 400:  # else the engine has none of them
                for choice in call.choices:
                    if choice.timestamps is None:
                        self.worker.put(choice)
                        self._metrics.aborted()

    async def _events(self, call: Call, send: Send) -> None:
        """Send rounds as they come; what has come while a client did not read is sent together."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        more = True
        while more and not call.gone:
            await call.news.wait()
            call.news.clear()
            pending, call.pending = call.pending, []
            more = call.running > 0 and call.refusal is None
            events = [self._writer.event(choice, step) for choice, step in pending if step.finish_reason != "error"]
            if call.refusal is not None:
                events.append(call.refusal.body)
            elif not more and call.asked.fields.stream_options.include_usage:
                events.append(self._writer.last_event(call))
            body = b"".join(b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode() for event in events)
            body += b"" if more else b"data: [DONE]\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": more})

    def _take(self, steps: Sequence[tuple[Choice, Step]]) -> None:
        self._metrics.turn(steps)
        for choice, step in steps:
            choice.take(step)
            choice.call.news.set()

    # ---------------------------------------------------------------- the other paths

    async def _health(self, request: Request) -> Response:
        return Response(status_code=503 if self.draining else 200)

    async def _models(self, request: Request) -> Response:
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "specdec"}
        model["max_model_len"] = self._engine.max_length
        return JSONResponse({"object": "list", "data": [model]})

    async def _metrics_page(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)


class _Completions:
    """The path of completions or of chats, as an ASGI application."""

    def __init__(self, server: Server, chat: bool):
        self._server, self._chat = server, chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._server.complete(Request(scope, receive), send, chat=self._chat)


class _Http(uvicorn.Server):
    """A first signal lets what runs end, a second one does not."""

    def __init__(self, config: uvicorn.Config, server: Server):
        super().__init__(config)
        self._server = server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._server.draining or sig not in (signal.SIGINT, signal.SIGTERM):
            super().handle_exit(sig, frame)
        else:
            print("stopping when all requests have ended; a second signal stops at once", file=sys.stderr)
            self._server.stop()


async def _watch(call: Call, receive: Receive) -> None:
    """Wait for the client to leave."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.gone = True
    call.news.set()


async def _body(request: Request, most: int) -> bytes:
    """Return the body of a request; one of more than ``most`` bytes is read, and refused unless ``most`` is 0."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            parts.append(part)
    if size > most > 0:
        raise RequestError(f"the body has {size} bytes: send at most {most}", status=413)
    return b"".join(parts)


async def _error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        there = "GET /health, /v1/models, /metrics, POST /v1/completions, /v1/chat/completions"
        error = RequestError(f"{request.method} {request.url.path}: there are {there}", status=error.status_code)
    assert isinstance(error, RequestError), "nothing else is registered"
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    return JSONResponse(error.body, error.status, headers)
