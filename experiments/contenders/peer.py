"""Another engine in a process of its own Python environment, on the same weights, cores and threads as ours."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch

from experiments.contenders.base import OtherEngine, seed_of
from experiments.results.manifest import revision_of
from experiments.results.records import DECLARED, OTHERWISE
from specdec import bundled
from specdec.quantization import quantization_of
from specdec.requests import SamplingParams
from specdec.target.loading import load
from specdec.types import Completion

_CAUSE = 300
"""Characters of a cause that a message quotes."""


class PeerError(RuntimeError):
    """The other process has ended, hangs, refuses a request or answers nonsense; says so in one sentence."""


class Process:
    """A program that is asked by messages in JSON, as ``workers/answer.py`` is.

    It runs in a session of its own, so Ctrl-C reaches this process alone. It ends with this object, at the end of
    Python, or after a failure.

    Args:
        log: Takes what it prints besides.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self.name, self._log = name, log
        self._pipe, theirs = Pipe()
        with theirs, log.open("w") as errors:
            both: dict[str, Any] = {"stdin": theirs.fileno(), "stdout": theirs.fileno(), "stderr": errors}
            self._process = subprocess.Popen(command, **both, env=environment, start_new_session=True)
        # Ends the process, and whatever it has started.
        self.stop = weakref.finalize(self, _stop, self._process, self._pipe)

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
            self._pipe.send_bytes(json.dumps(request).encode())
            if not self._pipe.poll(timeout):
                raise TimeoutError
            answer = json.loads(self._pipe.recv_bytes())
            if not isinstance(answer, dict):
                raise ValueError(f"{str(answer)[:_CAUSE]} is no object")
        except TimeoutError as error:
            self.stop()
            raise PeerError(
                f"{self.name} has not answered within {timeout:g} s and was stopped: give it a larger timeout"
            ) from error
        except (OSError, EOFError) as error:
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

    def _obituary(self) -> str:
        with suppress(subprocess.TimeoutExpired):  # it may have closed its pipe a moment before its end
            self._process.wait(timeout=1.0)
        self.stop()
        code = self._process.returncode
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        said = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{self.name} has ended {how}" + (f": {said[-1].strip()[:_CAUSE]}" if said else "")


def _stop(process: "subprocess.Popen[Any]", pipe: Connection) -> None:
    pipe.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_ANSWER = Path(__file__).parent / "workers" / "answer.py"
_TRIED = 8
"""Tokens of the prompt and of the output that are tried before anything is measured."""


class Peer(OtherEngine):
    """An engine that is installed in another environment, because it needs other versions of our packages.

    Its process is started when its turn comes, may use the cores that this one may use, waits without using them, and
    ends with its turn. A call in which it fails, hangs or answers nonsense is a failed one, and the run goes on.

    Args:
        method: How it drafts; ``"plain"`` for not at all.
        draft: The small model or the head that drafts: a folder, a name on the hub, or ``bundled/…``; None for the
            bundled one.
        num_tokens: The number of tokens that are drafted per round; None for ``NUM_TOKENS`` of the method.
        name, inflate, adapter: The target's, as it was loaded. Its own files are read where it is what they say.
        kept: A folder that keeps models as this engine reads them, for later runs; None: only as long as it runs.
        python: The Python of its environment; None for what the environment variable ``VARIABLE`` says.
        start_timeout: Seconds that loading may take, compilation included.
        timeout: Seconds that one call may take.

    Attributes:
        NAME, WORKER: What it is called, and its module in ``workers``.
        VARIABLE, PACKAGES: Where its Python is looked for, and what has to be installed there.
        NUM_TOKENS: The methods that it has, and how many tokens each drafts if nothing is said.
        WRONG_DRAWS: What is wrong with outputs above temperature 0, by method. It is not measured so.
    """

    apart = True
    NAME: ClassVar[str]
    WORKER: str
    VARIABLE: ClassVar[str]
    PACKAGES: ClassVar[str]
    NUM_TOKENS: ClassVar[Mapping[str, int]]
    WRONG_DRAWS: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        *,
        method: str = "plain",
        draft: str | None = None,
        num_tokens: int | None = None,
        name: str | None = None,
        inflate: str | Mapping[str, int] | None = None,
        adapter: str | None = None,
        kept: str | None = None,
        python: str | None = None,
        start_timeout: float = 600.0,
        timeout: float = 300.0,
    ):
        if method not in self.NUM_TOKENS:
            raise ValueError(f"method={method!r}: {self.NAME} is measured with {', '.join(self.NUM_TOKENS)}")
        if num_tokens is not None and (num_tokens < 1 or method == "plain"):
            raise ValueError(f"num_tokens={num_tokens}: give at least 1, and a method that drafts")
        if draft is not None and method not in ("model", "eagle3"):
            raise ValueError(f"draft={draft!r}: method={method} drafts without a model: leave it out")
        self.draft = draft or ("bundled/eagle3" if method == "eagle3" else "bundled/drafter")
        self.method, self.num_tokens = method, num_tokens or self.NUM_TOKENS[method]
        self._name, self._changes, self._kept = name, {"inflate": inflate, "adapter": adapter}, kept
        self._python, self._start_timeout, self._timeout = python, start_timeout, timeout
        self._process: Any = None

    @abstractmethod
    def prepared(self, folder: Path) -> dict[str, Any]:
        """Write what is needed to a folder, and return what the worker is told: first of all its ``model``."""

    def source(self, folder: Path) -> Path:
        """The target in transformers' layout, in full precision: its own files, or what is written into the folder."""
        own = None if self._name is None or any(self._changes.values()) else own_files(self._name)
        if own is not None:
            return own
        model, scheme = self.target.model, quantization_of(self.target.model)
        if scheme is not None:
            if self._name is None:
                raise ValueError(f"{self.NAME} needs the weights that {self.target.name} was made of: give name=FOLDER")
            model = load(self._name, dtype="float32", device="cpu", **self._changes).model
        model.save_pretrained(folder)
        if self.target.tokenizer is not None:
            self.target.tokenizer.save_pretrained(folder)
        return folder

    def told(self, role: str, model: Path, folder: Path, stored: str = "") -> dict[str, str]:
        """A model's files for the worker, and the place for them as it reads them: below ``kept`` if they are kept."""
        if model.suffix == ".gguf":
            return {role: str(model)}
        place = folder / "read" / model.name
        if self._kept is not None and not model.is_relative_to(folder):
            place = Path(self._kept, f"{model.name}_{str(revision_of(str(model)))[-8:]}")
        place.mkdir(parents=True, exist_ok=True)
        return {role: str(model), f"{role}_kept": str(place / stored)}

    def environment(self, python: Path) -> dict[str, str]:
        """Environment variables besides those of this process, for its Python."""
        return {"OMP_NUM_THREADS": str(torch.get_num_threads())}

    def check(self) -> None:
        """Refuse what has no Python to start with, and a target that is not on a CPU."""
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
        self.chosen, model = python, self.target.model
        alike = self.target.dtype is torch.float32 and quantization_of(model) is None
        self.exactness = DECLARED if alike else OTHERWISE

    def start(self) -> None:
        """Start the process, load the target, and decode a few tokens. Raises ValueError: one of these fails."""
        self.failure = ""
        self.folder = folder = Path(tempfile.mkdtemp(prefix="specdec_"))
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        given = self.prepared(folder) | {"folder": str(folder), "threads": torch.get_num_threads()}
        given |= {name: getattr(self, name) for name in ("max_length", "max_batch_size", "num_tokens")}
        begin = time.perf_counter()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self.chosen), str(_ANSWER), self.WORKER]
        environment |= self.environment(self.chosen)
        self._process = Process(self.NAME, command, environment, folder / "log.txt")
        try:
            found = self._process.ask(given, self._start_timeout)
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

    def stop(self) -> None:
        """End the process, and remove what was written for it."""
        self._remove()
        if self._process is not None:
            self._process.stop()

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse to draw where draws are wrong."""
        if self.method in self.WRONG_DRAWS and not sampling.greedy:
            raise ValueError(
                f"{self.WRONG_DRAWS[self.method]}, so outputs at temperature={sampling.temperature:g} are not the "
                "target's: measure this contender at temperature 0, or with method=plain"
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
        if self.failure:
            raise PeerError(self.failure)
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
        began = time.perf_counter()
        answer = self._process.ask(asked, self._timeout)
        try:
            rows = answer["rows"]
            told = [(list(row["token_ids"]), list(row["rounds"])) for row in rows]
            moments = [[began, *row["moments"]] if row.get("moments") else [] for row in rows]
            if len(told) != len(prompts):
                raise ValueError(f"{len(told)} outputs for {len(prompts)} prompts")
            for (tokens, rounds), row in zip(told, rows, strict=True):
                ended = row.get("ended") or (tokens and tokens[-1] in ends)
                if len(tokens) != first.max_new_tokens and not ended:
                    raise ValueError(f"{len(tokens)} tokens of {first.max_new_tokens}, and none that ends an output")
                if rounds and (min(rounds) < 1 or not sum(rounds[:-1]) < len(tokens) <= sum(rounds)):
                    raise ValueError(f"{len(tokens)} tokens in rounds of {rounds}")
                if min(tokens) < 0 or max(tokens) >= self.target.vocab_size:
                    raise ValueError(f"tokens that the vocabulary of {self.target.vocab_size} has not")
        except (KeyError, TypeError, ValueError) as error:
            self._process.stop()
            raise PeerError(f"{self.NAME} was stopped because it answers nonsense: {error}") from error
        outputs, rounds = zip(*told, strict=True)
        return [self.completion(*each) for each in zip(prompts, sampling, outputs, rounds, moments, strict=True)]


def own_files(name: str) -> Path | None:
    """The folder of a model with weights in safetensors; None if a name is not that of one."""
    path = Path(bundled.resolve(name))
    return path if any(path.glob("*.safetensors")) else None


def files_of(name: str, folder: Path) -> Path:
    """A model in transformers' layout: its own folder, or what is written into the folder that is given."""
    if (own := own_files(name)) is not None:
        return own
    load(name, dtype="auto", device="cpu").model.save_pretrained(folder)
    return folder
