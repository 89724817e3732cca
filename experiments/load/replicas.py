"""Engines behind one queue, which look like one engine to whoever asks: data parallelism."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from experiments.load.router import Router
from specdec.cache.pages import PageCounts, Paging
from specdec.engine.engine import Engine
from specdec.interfaces import Verifier
from specdec.requests import SamplingParams
from specdec.types import Step


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What replicas have in common.

    Attributes:
        max_batch_size: Requests that each decodes together.
        paging: How each divides its caches.
        max_nodes: Nodes of the largest drafts; 0 without a drafter.
    """

    max_batch_size: int
    max_length: int
    paging: Paging
    max_nodes: int
    verifier: Verifier | None

    @classmethod
    def of(cls, engine: Engine) -> "Sizes":
        """Return those of an engine."""
        return cls(
            max_batch_size=engine.max_batch_size,
            max_length=engine.max_length,
            paging=engine.paging,
            max_nodes=0 if engine.drafter is None else engine.drafter.max_nodes,
            verifier=engine.verifier,
        )


class Here:
    """An engine in this process as a replica, whose requests have the ids of whoever asks."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._own: dict[int, int] = {}  # the engine's ids by those of whoever asks
        self._given: dict[int, int] = {}  # and the other way round
        self.forget = engine.forget

    @property
    def unfinished(self) -> int:
        return self._engine.unfinished

    @property
    def page_counts(self) -> PageCounts:
        return self._engine.page_counts

    def submit(
        self, request: int, prompt: Sequence[int], sampling: SamplingParams, speculate: bool, arrived: float | None
    ) -> None:
        own = self._engine.submit(prompt, sampling, speculate=speculate, arrived=arrived)
        self._own[request], self._given[own] = own, request

    def step(self) -> list[Step]:
        steps = [replace(step, request=self._given[step.request]) for step in self._engine.step()]
        for step in steps:
            if step.finish_reason is not None:
                del self._given[self._own.pop(step.request)]
        return steps

    def abort(self, request: int) -> None:
        if request in self._own:
            own = self._own.pop(request)
            del self._given[own]
            self._engine.abort(own)


@contextmanager
def in_words() -> Iterator[None]:
    """Turn the errors of a connection into the one for a process that has ended."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise RuntimeError("Connection closed by peer") from error


class There:
    """An engine in another process as a replica."""

    def __init__(self, connection: Connection, number: int):
        self._connection, self._number = connection, number
        self._open: set[int] = set()

    @property
    def unfinished(self) -> int:
        return len(self._open)

    @property
    def page_counts(self) -> PageCounts:
        self._ask("counts")
        with in_words():
            while True:
                said = self._connection.recv()[1]
                if isinstance(said, PageCounts):
                    return said

    def submit(
        self, request: int, prompt: Sequence[int], sampling: SamplingParams, speculate: bool, arrived: float | None
    ) -> None:
        self._open.add(request)
        self._ask("submit", request, prompt, sampling, speculate, arrived)

    def step(self) -> list[Step]:
        """Return the steps that have come."""
        steps: list[Step] = []
        with in_words():
            while self._connection.poll():
                number, said = self._connection.recv()
                # Steps of requests that were dropped meanwhile are left out.
                steps += [step for step in said if number == self._number and step.request in self._open]
        self._open -= {step.request for step in steps if step.finish_reason is not None}
        return steps

    def abort(self, request: int) -> None:
        self._open.discard(request)
        self._ask("abort", request)

    def forget(self) -> None:
        self._ask("forget")

    def _ask(self, what: str, *values: Any) -> None:
        with in_words():
            self._connection.send((self._number, what, *values))


class Replicas:
    """Serves requests by replicas of one engine (``experiments.load.driver.Serving``).

    The random stream of a request is its number in this queue, so its output does not depend on who decodes it.

    Args:
        pause: Waits a moment until a replica has something to say; does nothing where their turns run in ``step``.
    """

    def __init__(
        self, replicas: Sequence[Here | There], sizes: Sizes, *, margin: int, pause: Callable[[], object] = lambda: None
    ):
        self._replicas, self._sizes, self._margin, self._pause = replicas, sizes, margin, pause
        self._places: dict[int, int] = {}
        self._ids = count()
        self.verifier = sizes.verifier
        self.drafter = sizes if sizes.max_nodes else None  # all that is asked of it here is how much it drafts
        self.max_batch_size, self.max_length = len(replicas) * sizes.max_batch_size, sizes.max_length
        pages = sizes.paging.pages
        self.paging = replace(sizes.paging, pages=None if pages is None else len(replicas) * pages)
        self._router = self._new_router()

    def _new_router(self) -> Router:
        sizes, paging = self._sizes, self._sizes.paging
        block = (paging.page_size or 16) if paging.shared else None
        held = paging.pages or sizes.max_batch_size * -(-sizes.max_length // (block or 1))
        return Router(len(self._replicas), block=block, margin=self._margin, remembered=held)

    @property
    def unfinished(self) -> int:
        """The number of requests that wait or run."""
        return sum(each.unfinished for each in self._replicas)

    @property
    def page_counts(self) -> PageCounts:
        """See ``Engine``: of all replicas together."""
        counts = [each.page_counts for each in self._replicas]
        return PageCounts(**{each.name: sum(getattr(own, each.name) for own in counts) for each in fields(PageCounts)})

    def submit(
        self, prompt: Any, sampling: SamplingParams, *, speculate: bool = True, arrived: float | None = None
    ) -> int:
        """Give a request, of token ids, to a replica, and return its id."""
        request = next(self._ids)
        place = self._places[request] = self._router.route(request, prompt, sampling.max_new_tokens)
        self._replicas[place].submit(request, prompt, sampling.seeded(request), speculate, arrived)
        return request

    def step(self) -> list[Step]:
        """Return what replicas have done since the last call; each that is in this process runs a turn."""
        self._pause()
        steps = [step for each in self._replicas if each.unfinished for step in each.step()]
        for step in steps:
            self._router.emitted(step.request, len(step.token_ids))
            if step.finish_reason is not None:
                self._gone(step.request)
        return steps

    def abort(self, request_id: int) -> None:
        """Drop a request; unknown and finished ids are ignored."""
        if request_id in self._places:
            self._replicas[self._gone(request_id)].abort(request_id)

    def stream(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], *, speculate: bool = True
    ) -> Iterator[Step]:
        """Yield the steps of prompts that every replica decodes, one replica after the other: a warm-up."""
        for each in self._replicas:
            for prompt, own in zip(prompts, sampling, strict=True):
                each.submit(next(self._ids), prompt, own, speculate, None)
            while each.unfinished:
                self._pause()
                yield from each.step()

    def forget(self) -> None:
        """Let later requests find nothing in the caches, and the router know nothing of what was decoded so far."""
        for each in self._replicas:
            each.forget()
        self._router = self._new_router()

    def _gone(self, request: int) -> int:
        self._router.ended(request)
        return self._places.pop(request)
