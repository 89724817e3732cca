"""The thread that owns the engine: it alone submits requests, runs turns and drops requests."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from experiments.serving.answers import Call, Choice
from experiments.serving.fields import RequestError
from specdec.engine.engine import Engine
from specdec.engine.scheduler import View, Work
from specdec.origin import described
from specdec.requests import SamplingParams
from specdec.types import Step

MOST_ERRORS = 10
"""Turns in a row that may fail; then the engine cannot go on."""


class Worker(threading.Thread):
    """Plays the turns of an engine for as long as there are requests, and waits for some.

    Args:
        engine: The engine; nobody else may use it.
        kinds: Parameters of the kinds of requests that will come, for which the engine is warmed up.
        take: Is given the rounds of each turn.
        refuse: Is told that the engine takes none of a call's requests, and why.
        broken: Is told in one sentence that the engine cannot go on.

    Attributes:
        turns: The number of turns so far.
        engine_seconds: The seconds that they took.
        serving_seconds: The seconds between turns, those without a request left out.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        kinds: Sequence[SamplingParams],
        take: Callable[[Sequence[tuple[Choice, Step]]], object],
        refuse: Callable[[Call, RequestError], object],
        broken: Callable[[str], object],
    ):
        super().__init__(name="engine", daemon=True)
        self._engine, self._kinds, self._take, self._refuse, self._broken = engine, kinds, take, refuse, broken
        self._inbox: SimpleQueue[Call | Choice | None] = SimpleQueue()
        self._live: dict[int, Choice] = {}
        self._view: View | None = None
        self.turns, self.engine_seconds, self.serving_seconds = 0, 0.0, 0.0
        engine.on_turn = self._noted

    def _noted(self, view: View, work: Work) -> None:
        self._view = view

    def submit(self, call: Call) -> None:
        """Have the requests of a call submitted. Like ``drop`` and ``stop``, this is called from other threads."""
        self._inbox.put(call)

    def drop(self, choice: Choice) -> None:
        """Have a request dropped."""
        self._inbox.put(choice)

    def stop(self) -> None:
        """End the thread after the turn that it is in. What has not ended is dropped."""
        self._inbox.put(None)
        self.join()

    def run(self) -> None:
        """Play until ``stop``, or until the engine cannot go on."""
        engine, errors, owing, ended = self._engine, 0, False, 0.0
        try:
            engine.warm_up(sampling=self._kinds)
            while True:
                while not self._inbox.empty() or not (engine.unfinished or owing):
                    ended = ended if engine.unfinished else 0.0
                    if not self._read():
                        return
                played, begin = engine.unfinished > 0, time.perf_counter()
                self.serving_seconds += begin - ended if ended else 0.0
                try:
                    steps = engine.step()
                except Exception as error:
                    print(f"a turn of the engine has failed: {described(error)}", file=sys.stderr)
                    errors, owing = errors + 1, True  # the next call returns the last steps of what ran
                    if errors == MOST_ERRORS:
                        raise
                    continue
                ended, owing, errors = time.perf_counter(), False, 0 if played else errors
                self.turns, self.engine_seconds = self.turns + 1, self.engine_seconds + ended - begin
                self._take([(self._of(step), step) for step in steps])
        except Exception as error:
            self._broken(f"the engine cannot go on: {described(error)}")
        finally:
            self._engine.close()

    def _of(self, step: Step) -> Choice:
        return self._live[step.request] if step.finish_reason is None else self._live.pop(step.request)

    def _read(self) -> bool:
        """Do what the next message says; returns whether the thread goes on."""
        message = self._inbox.get()
        if message is None:
            return False
        if isinstance(message, Choice):
            if self._live.pop(message.id, None) is not None:
                self._engine.abort(message.id)
            return True
        ids: list[int] = []
        try:
            for choice in message.choices:
                choice.id = self._engine.submit(choice.prompt, choice.sampling, arrived=message.arrived)
                self._live[choice.id] = choice
                ids.append(choice.id)
        except ValueError as error:
            for identity in ids:
                self._engine.abort(self._live.pop(identity).id)
            self._refuse(message, RequestError(described(error)))
        return True

    def state(self) -> dict[str, float]:
        """Return gauges and counters of the engine. Called from other threads, it may be a turn late."""
        view, live, counts = self._view, dict(self._live), self._engine.page_counts
        seen = () if view is None else (*view.waiting, *view.running)
        running = sum(request.slot >= 0 and request.id in live for request in seen)
        usage = running / self._engine.max_batch_size
        pages = self._engine.paging.pages
        if view is not None and view.free_pages is not None and pages:
            usage = 1 - view.free_pages / pages
        return {
            "num_requests_running": running,
            "num_requests_waiting": len(live) - running,
            "kv_cache_usage_perc": usage,
            "prefix_cache_queries": counts.queried,
            "prefix_cache_hits": counts.reused,
            "num_preemptions": counts.preempted,
            "engine_turns": self.turns,
            "engine_seconds": self.engine_seconds,
            "serving_seconds": self.serving_seconds,
        }
