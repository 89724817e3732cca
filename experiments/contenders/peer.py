"""Another engine in a process of its own Python environment, on the same weights, cores and threads as ours."""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from experiments.contenders.base import OtherEngine, seed_of
from specdec.requests import SamplingParams
from specdec.target.loading import load
from specdec.types import Completion

_CAUSE = 300
"""Characters of a cause that a message quotes."""


class PeerError(RuntimeError):
    """The other process has ended, hangs, refuses a request or answers nonsense; says so in one sentence."""


class Process:
    """A program that is asked by lines of JSON, as ``workers/answer.py`` is.

    It runs in a session of its own, so Ctrl-C reaches this process alone. It ends with this object, at the end of
    Python, or after a failure.

    Args:
        log: Takes what it prints besides.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self.name, self._log = name, log
        self._socket, theirs = socket.socketpair()
        with theirs, log.open("w") as errors:
            pipe = theirs.fileno()
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, env=environment, start_new_session=True
            )
        # Ends the process, and whatever it has started.
        self.stop = weakref.finalize(self, _stop, self._process, self._socket)

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and return its answer.

        Args:
            timeout: The seconds until the process is given up and stopped.

        Raises:
            PeerError: There is no answer, or it is an error.
        """
        if not self.stop.alive:
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


_ANSWER = Path(__file__).parent / "workers" / "answer.py"
_TRIED = 8
"""Tokens of the prompt and of the output that are tried before anything is measured."""


class Peer(OtherEngine):
    """An engine that is installed in another environment, because it needs other versions of our packages.

    Its process is started with the run, may use the cores that this one may use, waits without using them, and ends
    with the run. A call in which it fails, hangs or answers nonsense is a failed one, and the run goes on.

    Args:
        method: How it drafts; ``"plain"`` for not at all.
        num_tokens: The number of tokens that are drafted per round; None for ``NUM_TOKENS`` of the method.
        python: The Python of its environment; None for what the environment variable ``VARIABLE`` says.
        start_timeout: Seconds that loading may take, compilation included.
        timeout: Seconds that one call may take.

    Attributes:
        NAME, WORKER: What it is called, and its module in ``workers``.
        VARIABLE, PACKAGES: Where its Python is looked for, and what has to be installed there.
        NUM_TOKENS: The methods that it has, and how many tokens each drafts if nothing is said.
    """

    NAME: ClassVar[str]
    WORKER: str
    VARIABLE: ClassVar[str]
    PACKAGES: ClassVar[str]
    NUM_TOKENS: ClassVar[Mapping[str, int]]

    def __init__(
        self,
        *,
        method: str = "plain",
        num_tokens: int | None = None,
        python: str | None = None,
        start_timeout: float = 600.0,
        timeout: float = 300.0,
    ):
        if method not in self.NUM_TOKENS:
            raise ValueError(f"method={method!r}: {self.NAME} is measured with {', '.join(self.NUM_TOKENS)}")
        if num_tokens is not None and (num_tokens < 1 or method == "plain"):
            raise ValueError(f"num_tokens={num_tokens}: give at least 1, and a method that drafts")
        self.method, self.num_tokens = method, num_tokens or self.NUM_TOKENS[method]
        self._python, self._start_timeout, self._timeout = python, start_timeout, timeout

    @abstractmethod
    def prepared(self, folder: Path) -> dict[str, Any]:
        """Write the target to a folder, and return what the worker is told besides."""

    def environment(self, python: Path) -> dict[str, str]:
        """Environment variables besides those of this process, for its Python."""
        return {"OMP_NUM_THREADS": str(torch.get_num_threads())}

    def check(self) -> None:
        """Start the process, load the target, and decode a few tokens."""
        chosen = self._python or os.environ.get(self.VARIABLE)
        python = Path(chosen or "")
        if not (python.is_file() and os.access(python, os.X_OK)):
            raise ValueError(
                f"{self.NAME} runs in an environment of its own, and {chosen!r} is no Python of one: create it with "
                f"`python3 -m venv DIR && DIR/bin/pip install {self.PACKAGES}`, and give python=DIR/bin/python "
                f"or the environment variable {self.VARIABLE}=DIR/bin/python"
            )
        if self.target.device.type != "cpu":
            raise ValueError(f"{self.NAME} is measured on CPUs, and the target is on {self.target.device}")
        self.folder = folder = Path(tempfile.mkdtemp(prefix="specdec_"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        given = self.prepared(folder) | {"model": str(folder), "threads": torch.get_num_threads()}
        given |= {name: getattr(self, name) for name in ("max_length", "max_batch_size", "num_tokens")}
        begin = time.perf_counter()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(python), str(_ANSWER), self.WORKER]
        self._process = Process(self.NAME, command, environment | self.environment(python), folder / "log.txt")
        try:
            found = self._process.ask(given, self._start_timeout)
            self._wrong_draws = str(found.get("wrong_draws", ""))
            self.about = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
            sampling = SamplingParams(max_new_tokens=_TRIED, ignore_eos=True)
            self._ask([[1] * _TRIED], [sampling])
            # The threads that decode are there now, and each may be bound to cores of its own.
            found = {"threads": found.get("threads")} | self._process.ask({}, self._timeout)
            ours = {"threads": torch.get_num_threads(), "cores": [sorted(os.sched_getaffinity(0))]}
            if found != ours:
                raise PeerError(f"{self.NAME} does not run on our threads and cores, which are {ours}: it has {found}")
        except PeerError as error:
            self._process.stop()
            raise ValueError(str(error)) from error
        self.start_seconds = time.perf_counter() - begin

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse to draw at a temperature where the worker says that draws are wrong."""
        if self._wrong_draws and not sampling.greedy:
            raise ValueError(
                f"{self._wrong_draws}, so its outputs at temperature={sampling.temperature:g} are not the target's: "
                "measure this contender at temperature 0, with method=plain, or with patched=true"
            )

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], *, speculate: bool = True
    ) -> list[Completion]:
        """Decode prompts in one call. All share their sampling but for streams."""
        first = sampling[0]
        if first.stop or first.logits_processor is not None or first.grammar is not None:
            given = "no texts, processors or grammars"
            raise ValueError(f"{self.NAME} is given tokens that end an output, {given}: leave them out")
        try:
            return self._ask(prompts, sampling)
        except PeerError as error:
            failed = Completion(prompt_ids=(), token_ids=(), text="", finish_reason="error", steps=(), error=str(error))
            return [replace(failed, prompt_ids=tuple(prompt)) for prompt in prompts]

    def _ask(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[Completion]:
        first = sampling[0]
        ends = self.ends(first)
        drawn = {"temperature": 0.0}
        if not first.greedy:
            drawn = {name: getattr(first, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        asked = {
            "prompts": [list(prompt) for prompt in prompts],
            "seeds": [seed_of([each]) & 0x7FFFFFFF for each in sampling],
            "max_new_tokens": first.max_new_tokens,
            "ends": sorted(ends),
            "sampling": drawn | {"repetition_penalty": first.repetition_penalty},
        }
        answer = self._process.ask(asked, self._timeout)
        try:
            told = [(list(row["token_ids"]), list(row["rounds"])) for row in answer["rows"]]
            if len(told) != len(prompts):
                raise ValueError(f"{len(told)} outputs for {len(prompts)} prompts")
            for tokens, rounds in told:
                if len(tokens) != first.max_new_tokens and not (tokens and tokens[-1] in ends):
                    raise ValueError(f"{len(tokens)} tokens of {first.max_new_tokens}, and none that ends an output")
                if rounds and (min(rounds) < 1 or not sum(rounds[:-1]) < len(tokens) <= sum(rounds)):
                    raise ValueError(f"{len(tokens)} tokens in rounds of {rounds}")
                if min(tokens) < 0 or max(tokens) >= self.target.vocab_size:
                    raise ValueError(f"tokens that the vocabulary of {self.target.vocab_size} has not")
        except (KeyError, TypeError, ValueError) as error:
            self._process.stop()
            raise PeerError(f"{self.NAME} was stopped because it answers nonsense: {error}") from error
        return [self.completion(*each) for each in zip(prompts, sampling, *zip(*told, strict=True), strict=True)]


def write_float32(model: PreTrainedModel | str, folder: Path) -> str:
    """Write a model, or that of a name, in float32, for a worker that stores it at another precision."""
    loaded = load(model, dtype="float32", device="cpu").model if isinstance(model, str) else model
    loaded.save_pretrained(folder, state_dict={name: part.float() for name, part in loaded.state_dict().items()})
    return str(folder)
