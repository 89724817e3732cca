"""Rounds that any checkout of this project can play, timed; and a process that plays them in another checkout.

Run as a program, this file plays the cases on its input in the checkout that stands first on the path. So it uses
public names of the packages only, which every checkout has, and nothing of ``experiments``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

WARM = 8
"""Rounds before those that are timed: what comes often is captured in them."""
STAGES = ("draft", "verify", "accept", "commit")
DRAFTS = ("plain", "ngram", "chain", "tree", "medusa", "eagle3")
ANSWER = "timed "
"""What a line of the other process begins with that has figures."""


@dataclass(frozen=True)
class Case:
    """Requests to the bundled target, how it is loaded, and what drafts for it.

    Attributes:
        inflate: The shape whose cost the target has.
        nodes: Drafted nodes of a chain.
        rows: Requests at once.
        context: Tokens of a prompt.
    """

    drafts: str
    device: str = "cpu"
    dtype: str = "auto"
    quantization: str | None = None
    inflate: str | None = None
    nodes: int = 4
    rows: int = 1
    temperature: float = 0.0
    context: int = 128
    rounds: int = 40
    threads: int | None = None


def play(case: Case) -> dict[str, float]:
    """Return median seconds of a round and of its stages, and the mean number of tokens that a row emits in it."""
    import torch
    import transformers

    from specdec import SamplingParams

    transformers.utils.logging.disable_progress_bar()
    if case.threads is not None:
        torch.set_num_threads(case.threads)
    engine, prompts = _engine(case)
    sampling = SamplingParams(
        temperature=case.temperature, ignore_eos=True, seed=0, max_new_tokens=engine.max_length - case.context - 1
    )
    numbers = [engine.submit(prompt, sampling) for prompt in prompts]
    begun: set[int] = set()
    while len(begun) < case.rows:
        begun |= {step.request for step in engine.step()}
    figures = time_rounds(engine, case.rows, case.rounds)
    for number in numbers:
        engine.abort(number)
    return figures


def time_rounds(engine: Any, rows: int, rounds: int) -> dict[str, float]:
    """Return what ``play`` does of the requests that an engine runs; rounds with fewer rows are left out."""
    seconds: list[float] = []
    played: list[Any] = []
    for number in range(WARM + rounds):
        _wait(engine)
        start = time.perf_counter()
        steps = engine.step()
        _wait(engine)
        if number >= WARM and len(steps) == rows:
            seconds.append(time.perf_counter() - start)
            played += steps
    if not seconds:
        raise ValueError(f"no round of {rows} rows fits into max_length={engine.max_length}: give a shorter context")
    stages = {stage: statistics.median(step.seconds.get(stage, 0.0) for step in played) for stage in STAGES}
    tokens = statistics.mean(step.accepted + 1 for step in played)
    return {"round": statistics.median(seconds), **stages, "tokens": tokens}


def _wait(engine: Any) -> None:
    if engine.target.device.type == "cuda":
        import torch

        torch.cuda.synchronize(engine.target.device)


@lru_cache(maxsize=1)
def _engine(case: Case) -> tuple[Any, list[list[int]]]:
    """Return the engine of a case, which is kept for the next time, and its prompts."""
    from specdec import Engine
    from verifiers import RejectionVerifier

    target, drafter = _target(case.device, case.dtype, case.quantization, case.inflate), _drafter(case)
    text = Path(argparse.__file__).read_text(encoding="utf-8")  # the same in every checkout
    ids = target.tokenizer(text, verbose=False)["input_ids"]
    prompts = [ids[row * 300 : row * 300 + case.context] for row in range(case.rows)]
    rule = None if drafter is None else RejectionVerifier()
    room = min(target.max_length, case.context + 1024)
    if case.context + (WARM + case.rounds) * (case.nodes + 1) > room:
        raise ValueError(
            f"context={case.context} leaves no room for {WARM + case.rounds} rounds in {room} positions: give less, or "
            f"fewer rounds"
        )
    return Engine(target, drafter, rule, max_batch_size=case.rows, max_length=room, timing=True), prompts


@lru_cache(maxsize=1)
def _target(device: str, dtype: str, quantization: str | None, inflate: str | None) -> Any:
    from specdec import Target

    return Target.from_pretrained(
        "bundled/target", device=device, dtype=dtype, quantization=quantization, inflate=inflate
    )


def _drafter(case: Case) -> Any:
    import drafters

    if case.drafts == "plain":
        return None
    if case.drafts == "ngram":
        return drafters.NGramDrafter(max_draft_tokens=8, branches=1)
    if case.drafts == "medusa":
        return drafters.MedusaDrafter.from_pretrained("bundled/medusa")
    if case.drafts == "eagle3":
        return drafters.EagleDrafter.from_pretrained("bundled/eagle3", shape=case.nodes)
    tree = case.drafts == "tree"
    shape, sampling = ((2, 1, 1, 1, 1), "without_replacement") if tree else (case.nodes, "iid")
    return drafters.ModelDrafter.from_pretrained("bundled/drafter", shape=shape, sampling=sampling, device=case.device)


class Checkout:
    """A process that plays cases in a checkout."""

    def __init__(self, path: Path):
        self.path = path.resolve()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve())],
            cwd=self.path,
            env=os.environ | {"PYTHONPATH": str(self.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Checkout":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.__exit__(None, None, None)  # closes the pipes and waits

    def play(self, case: Case) -> Mapping[str, float]:
        """Return the figures of a case. Raises ValueError: the checkout cannot play it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(case)) + "\n")
        self._process.stdin.flush()
        for line in iter(self._process.stdout.readline, ""):
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise ValueError(f"{self.path} cannot play {case}: its message is above")


@contextmanager
def folder_of(revision: str, root: Path) -> Iterator[Path]:
    """Yield a folder with a checkout of a revision: itself, if it is one, or a worktree for as long as it is used."""
    if (Path(revision) / "specdec").is_dir():
        yield Path(revision)
        return
    found = _git(root, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    if found.returncode:
        raise ValueError(f"against={revision}: give a commit of {root}, or the folder of another checkout")
    with tempfile.TemporaryDirectory() as folder:
        added = _git(root, "worktree", "add", "--detach", folder, found.stdout.strip())
        if added.returncode:
            raise ValueError(f"against={revision}: {added.stderr.strip().splitlines()[-1]}")
        try:
            yield Path(folder)
        finally:
            _git(root, "worktree", "remove", "--force", folder)


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    for line in sys.stdin:
        print(ANSWER + json.dumps(play(Case(**json.loads(line)))), flush=True)
