"""Runs programs that a model wrote, each in a process of its own: with limits, and without network where possible.

This keeps accidents small: endless loops, memory, processes, files, output. It is no wall against a program that wants
to do harm: such a program can read what the user can read. Where that matters, run it inside a container or a virtual
machine.
"""

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_CHILD = Path(__file__).with_name("sandboxed.py")
_MOST_BYTES = 65536
"""How much of a child's answer is read."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: CPU time; it is stopped after twice as long on the clock, too.
        memory_mb: Address space, in MiB.
        guard: Refuse processes, sockets, and changes to files outside its folder in Python already.
    """

    seconds: int = 10
    memory_mb: int = 1024
    guard: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        passed: It came to its end without an error.
        error: What went wrong, in one sentence.
        no_network: It ran without network; None if it did not get so far.
    """

    passed: bool
    error: str | None
    no_network: bool | None


def run_all(programs: Sequence[str], limits: Limits, workers: int) -> Iterator[Outcome]:
    """The outcomes of programs, in order.

    Args:
        programs: Source code.
        limits: What each may use.
        workers: How many run at a time.

    Raises:
        ValueError: This system cannot limit what they do.
    """
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(lambda program: run(program, limits), programs)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C only those that run already come to their end


def run(program: str, limits: Limits) -> Outcome:
    """Run a program in a process of its own.

    Raises:
        ValueError: This system cannot limit what it does.
    """
    if sys.platform != "linux":
        raise ValueError(f"execute=true needs Linux, whose processes can be limited, and this is {sys.platform}")
    token = secrets.token_hex(16)
    job = {
        "program": program,
        "token": token,
        "seconds": limits.seconds,
        "memory": limits.memory_mb * 2**20,
        "guard": limits.guard,
    }
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
        # Nothing of the environment: it may hold passwords.
        environment = {"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # there can be no more
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            with child.stdin as given:
                given.write(json.dumps(job).encode())
            answer, in_time = _answer(child.stdout, time.monotonic() + 2 * limits.seconds)
        except BrokenPipeError:  # it died before it had read its job
            answer, in_time = b"", True
        finally:
            _end(child)
            child.stdout.close()
    return _outcome(answer, token, in_time=in_time, code=child.returncode, limits=limits)


def _answer(stream: IO[bytes], deadline: float) -> tuple[bytes, bool]:
    """What the child says until it ends or says too much, and whether that was in time."""
    answer = b""
    with selectors.DefaultSelector() as ready:
        ready.register(stream, selectors.EVENT_READ)
        while len(answer) < _MOST_BYTES:
            left = deadline - time.monotonic()
            if left <= 0 or not ready.select(left):
                return answer, False
            part = os.read(stream.fileno(), _MOST_BYTES)
            if not part:
                break
            answer += part
    return answer, True


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the child, and what it may have started."""
    try:
        # It leads a group of its own, and has not been waited for: the number cannot belong to anybody else.
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has not come to be a leader
    child.kill()
    child.wait()


def _outcome(answer: bytes, token: str, *, in_time: bool, code: int, limits: Limits) -> Outcome:
    facts: dict[str, object] = {}
    for line in answer.splitlines():
        try:
            facts |= json.loads(line)
        except (TypeError, ValueError):
            continue  # the program found the stream and wrote into it
    if "refused" in facts:
        raise ValueError(
            f"this system cannot limit what a program does ({facts['refused']}): grade the code on another, or in a "
            f"container"
        )
    no_network = bool(facts["no_network"]) if "no_network" in facts else None
    if facts.get("done") == token:
        error = facts.get("error")
        return Outcome(error is None, None if error is None else str(error), no_network)
    if not in_time or code == -signal.SIGXCPU:
        return Outcome(False, f"took more than {limits.seconds} s", no_network)
    if code < 0 and code != -signal.SIGKILL:
        return Outcome(False, f"ended by {signal.Signals(-code).name}", no_network)
    return Outcome(False, "ended before its tests had run", no_network)
