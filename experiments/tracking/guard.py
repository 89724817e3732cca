"""Calls of a tracking library that may fail or hang: the run goes on without it."""

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

logger = logging.getLogger(__name__)


class Guard:
    """Makes calls of one library, until one of them fails.

    All calls run in one thread, because some libraries keep a run by thread. A call that hangs cannot be ended: its
    thread is left behind, as a daemon that does not keep the process alive, and the next call gets a new one.
    ``timeout`` is the seconds that a call may take, unless it says otherwise.
    """

    def __init__(self, service: str, timeout: float):
        self.service, self.timeout, self.is_open = service, timeout, False
        self._calls: SimpleQueue[Callable[[], None]] | None = None

    def call(self, call: Callable[[], object], seconds: float | None = None) -> bool:
        """Make a call; returns whether it worked. The first failure is a warning, and ends all further calls."""
        if not self.is_open:
            return False
        failure = self.attempt(call, seconds)
        if failure is not None:
            self.is_open = False
            self.warn(f"{failure}. The run goes on without it; its results are in its folder.")
        return failure is None

    def warn(self, text: str) -> None:
        """Say something that does not end the calls."""
        logger.warning("%s: %s", self.service, text)

    def attempt(self, call: Callable[[], object], seconds: float | None = None) -> str | None:
        """Make a call that may fail or hang: returns None, or what went wrong."""
        outcome: SimpleQueue[str | None] = SimpleQueue()

        def body() -> None:
            try:
                call()
            except ImportError as error:
                outcome.put(f"not installed (pip install {self.service}): {error}")
            except BaseException as error:  # wandb raises SystemExit and KeyboardInterrupt of its own, too
                outcome.put(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(".: "))
            outcome.put(None)

        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=_work, args=(self._calls,), name=self.service, daemon=True).start()
        self._calls.put(body)
        limit = self.timeout if seconds is None else seconds
        try:
            return outcome.get(timeout=limit)
        except Empty:
            self._calls = None
            return f"no answer within {limit:g} s"


def _work(calls: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        calls.get()()
