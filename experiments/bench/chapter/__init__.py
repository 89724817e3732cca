"""The chapter "Why decoding is slow and what speculation buys": ``python -m experiments.bench chapter``.

Writes docs/why-decoding-is-slow.md from its template, and its pictures. Every number is computed by specdec.physics.
The roof of "this machine" is in experiments/bench/chapter/machine.yaml; ``measure=true`` measures yours into it first.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.bench.options import option


@dataclass(frozen=True)
class Options:
    """The command line."""

    measure: bool = option(False, "measure this machine first, which should be idle")
    page: Path = option(Path("docs/why-decoding-is-slow.md"), "the page")
    images: Path = option(Path("docs/images"), "folder of the pictures")
