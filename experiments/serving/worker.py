"""The thread that owns the engine: it alone submits requests, runs turns and drops requests."""

import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from experiments.serving.answers import Call, Choice
from experiments.serving.fields import RequestError
from specdec.engine.engine import Engine
from specdec.engine.scheduler import View, Work
from specdec.origin import described, first_sentence
from specdec.requests import SamplingParams
from specdec.types import Step

MOST_ERRORS = 10
"""Turns in a row that may fail; then the engine cannot go on."""


class Worker(threading.Thread):
    """Plays the turns of an engine for as long as there are requests, and waits for some.

    Args:
        engine: The engine; nobody else may use it.
        kinds: Parameters of the kinds of requests that will come, for which the engine is warmed up.
        take: Called with the rounds of each turn.
        refuse: Called with a call of which the engine takes no request, and why.
        broken: Called with a sentence when the engine cannot go on.
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
        self.warm = threading.Event()  # set when calls can be taken, or never will be
        engine.on_turn = self._noted

    def _noted(self, view: View, work: Work) -> None:
        self._view = view

    def put(self, message: Call | Choice) -> None:
        """Have the requests of a call submitted, or one dropped. Like ``stop``, this is called from other threads."""
        self._inbox.put(message)

    def stop(self) -> None:
        """End the thread after the turn that it is in. What has not ended is dropped."""
        self._inbox.put(None)
        self.join()

    def run(self) -> None:
        """Play until ``stop``, or until the engine cannot go on."""
        engine, errors, owing = self._engine, 0, False
        try:
            engine.warm_up(sampling=self._kinds)
            self.warm.set()
            while True:
                while not self._inbox.empty() or not (engine.unfinished or owing):
                    message = self._inbox.get()
                    if message is None:
                        return
                    self._submit(message) if isinstance(message, Call) else self._drop(message)
                played = engine.unfinished > 0
                try:
                    steps = engine.step()
                except Exception as error:
                    print(f"a turn of the engine has failed: {described(error)}", file=sys.stderr)
                    errors, owing = errors + 1, True  # the next call returns the last steps of what ran
                    if errors == MOST_ERRORS:
                        raise
                    continue
                owing, errors = False, 0 if played else errors
                self._take([(self._live[step.request], step) for step in steps])
                for step in steps:
                    if step.finish_reason is not None:
                        del self._live[step.request]
        except Exception as error:
            self._broken(f"the engine cannot go on: {described(error)}")
        finally:
            self.warm.set()
            self._engine.close()

    def _submit(self, call: Call) -> None:
        try:
            for choice in call.choices:
                choice.id = self._engine.submit(choice.prompt, choice.sampling, arrived=call.arrived)
                self._live[choice.id] = choice
        except ValueError as error:
            self._drop(*call.choices)
            self._refuse(call, RequestError(first_sentence(error)))

    def _drop(self, *choices: Choice) -> None:
        for choice in choices:
            if self._live.pop(choice.id, None) is not None:
                self._engine.abort(choice.id)

    def state(self) -> dict[str, float]:
        """Return gauges and counters of the engine. Called from other threads, it may be a turn late."""
        view, live, counts, pages = self._view, dict(self._live), self._engine.page_counts, self._engine.paging.pages
        seen = () if view is None else (*view.waiting, *view.running)
        running = sum(request.slot >= 0 and request.id in live for request in seen)
        usage = running / self._engine.max_batch_size
        if view is not None and view.free_pages is not None and pages:
            usage = 1 - view.free_pages / pages
        return {
            "num_requests_running": running,
            "num_requests_waiting": len(live) - running,
            "kv_cache_usage_perc": usage,
            "prefix_cache_queries": counts.queried,
            "prefix_cache_hits": counts.reused,
            "num_preemptions": counts.preempted,
        }
