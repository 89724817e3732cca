"""Calls of a tracking library that may fail or hang: the run goes on without it."""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Guard:
    """Makes calls of one library, until one of them fails.

    Args:
        service: The library's name, for warnings.
        install: What to install if it is missing.
        timeout: Seconds that a call may take, unless it says otherwise.
    """

    def __init__(self, service: str, install: str, timeout: float):
        self.service = service
        self.timeout = timeout
        self._install = install
        self._open = False

    @property
    def is_open(self) -> bool:
        """Whether calls are made."""
        return self._open

    def open(self) -> None:
        """Make calls from now on."""
        self._open = True

    def close(self) -> None:
        """Make no further calls."""
        self._open = False

    def call(self, call: Callable[[], object], seconds: float | None = None) -> bool:
        """Make a call; returns whether it worked. The first failure is a warning, and ends all further calls."""
        if not self._open:
            return False
        failure = self.attempt(call, seconds)
        if failure is not None:
            self._open = False
            logger.warning("%s: %s. The run goes on without it; its results are in its folder.", self.service, failure)
        return failure is None

    def warn(self, text: str) -> None:
        """Say something that does not end the calls."""
        logger.warning("%s: %s", self.service, text)

    def attempt(self, call: Callable[[], object], seconds: float | None = None) -> str | None:
        """Make a call that may fail or hang: returns None, or what went wrong.

        The call runs in a thread, because a call that hangs cannot be ended. It is left behind; the thread is a daemon
        and does not keep the process alive.
        """
        failures: list[str] = []

        def body() -> None:
            try:
                call()
            except ImportError as error:
                failures.append(f"not installed (pip install {self._install}): {error}")
            except BaseException as error:  # wandb raises SystemExit and KeyboardInterrupt of its own, too
                failures.append(f"{type(error).__name__}: {_one_line(error)}".rstrip(".: "))

        limit = self.timeout if seconds is None else seconds
        thread = threading.Thread(target=body, name=self.service, daemon=True)
        thread.start()
        thread.join(limit)
        if thread.is_alive():
            return f"no answer within {limit:g} s"
        return failures[0] if failures else None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]} …"
