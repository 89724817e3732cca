"""A process of another Python environment that answers requests, so that its packages need not fit ours."""

import json
import os
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_CAUSE = 300
"""Characters of a cause that a message quotes."""


class PeerError(RuntimeError):
    """The other process has ended, hangs, refuses a request or answers nonsense; says so in one sentence."""


class Process:
    """A program that is asked by lines of JSON, as ``workers/answer.py`` is.

    It runs in a session of its own, so Ctrl-C reaches this process alone. It ends with this object, at the end of
    Python, or after a failure.

    Args:
        name: What messages call it.
        log: Takes what it prints besides.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self.name, self._log = name, log
        self._socket, theirs = socket.socketpair()
        with theirs, log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        self._stop = weakref.finalize(self, _stop, self._process, self._socket)

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and return its answer.

        Args:
            timeout: The seconds until the process is given up and stopped.

        Raises:
            PeerError: There is no answer, or it is an error.
        """
        if not self._stop.alive:
            raise PeerError(f"{self.name} was stopped after an earlier failure")
        try:
            answer = json.loads(self._exchange(json.dumps(request).encode() + b"\n", timeout))
            if not isinstance(answer, dict):
                raise ValueError(f"{str(answer)[:_CAUSE]} is no object")
        except TimeoutError as error:
            self.stop()
            raise PeerError(
                f"{self.name} has not answered within {timeout:g} s and was stopped: give it a larger timeout"
            ) from error
        except OSError as error:
            raise PeerError(self._obituary()) from error
        except ValueError as error:
            self.stop()
            raise PeerError(f"{self.name} was stopped because it answers nonsense: {error}") from error
        except BaseException:  # Ctrl-C: its answer would be taken for that to the next request
            self.stop()
            raise
        if "error" in answer:
            raise PeerError(f"{self.name} failed: {' '.join(str(answer['error']).split())[:_CAUSE]}")
        return answer

    def stop(self) -> None:
        """End the process, and whatever it has started."""
        self._stop()

    def _exchange(self, line: bytes, timeout: float) -> bytes:
        end, answer = time.monotonic() + timeout, b""
        self._socket.settimeout(timeout)
        self._socket.sendall(line)
        while not answer.endswith(b"\n"):
            self._socket.settimeout(max(end - time.monotonic(), 1e-3))
            part = self._socket.recv(1 << 16)
            if not part:
                raise ConnectionError
            answer += part
        return answer

    def _obituary(self) -> str:
        with suppress(subprocess.TimeoutExpired):  # it may have closed its pipe a moment before its end
            self._process.wait(timeout=1.0)
        self.stop()
        code = self._process.returncode
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        said = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{self.name} has ended {how}" + (f": {said[-1].strip()[:_CAUSE]}" if said else "")


def _stop(process: "subprocess.Popen[bytes]", pipe: socket.socket) -> None:
    pipe.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
