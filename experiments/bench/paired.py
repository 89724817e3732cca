"""Workloads that any checkout of this project can play, and a process of its own that plays them.

Run as a program, this file plays what it is asked on its input, in the checkout that stands first on the path. It uses
the public names only, which every checkout has.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Workload:
    """Requests to the bundled target: with how it is inflated, what drafts, rows, temperature.

    Attributes:
        bar: The least speedup over plain decoding on two CPU cores; None where there is none.
    """

    method: str
    inflate: str | None = None
    temperature: float = 0.0
    rows: int = 1
    bar: float | None = None


PLAYED = "played\n"
"""The line that says that a workload was played."""
_TREE = "small model, tree [2, 1, 1, 1, 1]"
WORKLOADS = {
    f"{each.method}, {each.inflate or 'bundled'}, T={each.temperature:g}, {each.rows} rows": each
    for each in (
        Workload("plain"),
        Workload("n-gram"),
        Workload("small model, chain of 4"),
        Workload("Medusa"),
        Workload("plain", "110m"),
        Workload("n-gram", "110m"),
        Workload("small model, chain of 4", "110m", bar=1.8),
        Workload("small model, chain of 4", "110m", 1.0, bar=1.4),
        Workload(_TREE, "110m", bar=1.8),
        Workload(_TREE, "110m", 1.0, bar=1.4),
        Workload("Medusa", "110m"),
        Workload("small model, chain of 4", "110m", rows=8),
    )
}


class Player:
    """The engine of a workload, on a device."""

    def __init__(self, workload: Workload, device: str):
        from specdec import Engine, SamplingParams
        from verifiers import RejectionVerifier

        drafter = _drafter(workload.method, device)
        rule, rows = (None if drafter is None else RejectionVerifier()), workload.rows
        target = _target(workload.inflate, device)
        self._engine = Engine(target, drafter, rule, max_batch_size=rows, max_length=1024)
        self._sampling = SamplingParams(max_new_tokens=96, temperature=workload.temperature, ignore_eos=True)
        code = Path(argparse.__file__).read_text(encoding="utf-8")  # the same text for every checkout
        self._prompts = [code[1000 * row : 1000 * row + 400] for row in range(rows)]

    def play(self, *, speculate: bool = True) -> None:
        """Decode the workload's requests once."""
        self._engine.generate(self._prompts, self._sampling, speculate=speculate)


@cache
def _target(inflate: str | None, device: str) -> Any:
    from specdec import Target

    return Target.from_pretrained("bundled/target", device=device, inflate=inflate)


def _drafter(method: str, device: str) -> Any:
    from drafters import MedusaDrafter, ModelDrafter, NGramDrafter

    if method == "plain":
        return None
    if method == "n-gram":
        return NGramDrafter(max_draft_tokens=8, branches=1)
    if method == "Medusa":
        return MedusaDrafter.from_pretrained("bundled/medusa")
    shape, sampling = ((2, 1, 1, 1, 1), "without_replacement") if method == _TREE else (4, "iid")
    return ModelDrafter.from_pretrained("bundled/drafter", shape=shape, sampling=sampling, device=device)


class Checkout:
    """A process that plays workloads in a checkout."""

    def __init__(self, path: Path, device: str):
        if not (path / "specdec").is_dir():
            raise ValueError(f"against={path}: there is no checkout of this project, with a folder specdec")
        self.path = path.resolve()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve()), device],
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
        self._process.wait()

    def play(self, workload: str) -> None:
        """Play a workload once. Raises ValueError: the checkout cannot play it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(workload + "\n")
        self._process.stdin.flush()
        if PLAYED not in iter(self._process.stdout.readline, ""):
            raise ValueError(f"{self.path} cannot play {workload!r}: its message is above")


def _serve(device: str) -> None:
    player = cache(lambda name: Player(WORKLOADS[name], device))
    for line in sys.stdin:
        player(line.strip()).play()
        print(PLAYED, end="", flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
