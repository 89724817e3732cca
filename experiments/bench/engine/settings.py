"""The command line, and the sizes that it stands for on a device."""

from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.bench.models import BUNDLED, SHAPES
from experiments.bench.options import option
from specdec.engine.recording import RECORDING
from specdec.quantization import METHODS

SHARES = {"steps": 0.4, "weights": 0.18, "rounds": 0.2, "synthetic": 0.1, "peers": 0.08, "memory": 0.04}
"""The sections, in their order, and how the time is divided; what one does not need is left for the others."""
SECTIONS = tuple(SHARES)
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_MODELS = ("auto", BUNDLED, *SHAPES)


@dataclass(frozen=True)
class Options:
    """The command line."""

    only: tuple[str, ...] = option(SECTIONS, "sections to measure", choices=SECTIONS)
    model: str = option(
        "auto",
        f"{', '.join(SHAPES)}: random weights; bundled: the trained one; auto: 110m on a CPU, llama-8b on a GPU",
        choices=_MODELS,
    )
    dtype: str = option("auto", "auto: bfloat16 where the device has it, else float32", choices=_DTYPES)
    quantization: str | None = option(None, "weights of the model in fewer bits", choices=tuple(METHODS))
    device: str = option("auto", "cpu, cuda, or auto for a GPU if there is one")
    nodes: tuple[int, ...] | None = option(
        None, "nodes per row of a forward, root included: 1 is a plain step", least=1
    )
    batch: tuple[int, ...] | None = option(None, "rows; the first is what most sections use", least=1)
    context: tuple[int, ...] | None = option(None, "tokens in the cache per row; the first is used most", least=1)
    schemes: tuple[str, ...] = option(tuple(METHODS), "quantizations to compare", choices=tuple(METHODS))
    tokens: int = option(64, "output tokens of a request", least=2)
    repeats: int = option(5, "how often a step is timed, and requests are decoded", least=1)
    accept: float = option(0.8, "probability that a synthetic draft is right", least=0)
    depth: int = option(4, "tokens per draft", least=1)
    seconds: int = option(420, "time for everything; grids are cut to it, and it is said where", least=1)
    recordings: tuple[str, ...] = option(
        ("off", "decisions", "rounds"), "ways of recording rounds to compare", choices=RECORDING[1:]
    )
    invariant: bool = option(True, "measure the invariant executor, too")
    threads: int | None = option(None, "CPU threads; null: one per core", least=1)
    out: Path = option(Path("outputs/engine"), "folder for results.json and the pictures")


@dataclass(frozen=True)
class Grid:
    """The sizes of steps: nodes per row (1 among them), rows, and tokens in the cache of every row."""

    nodes: tuple[int, ...]
    batch: tuple[int, ...]
    context: tuple[int, ...]

    @classmethod
    def of(cls, options: Options, device: torch.device, positions: int) -> "Grid":
        """Return the sizes that were asked for, or those that a device has time for.

        Raises:
            ValueError: A size that was asked for is beyond the model's ``positions``.
        """
        fast = device.type == "cuda"
        nodes = options.nodes or ((1, 2, 4, 8, 16, 32, 64, 128, 256) if fast else (1, 2, 5, 9, 16, 32, 64))
        batch = options.batch or ((1, 8, 32, 64) if fast else (1, 4, 8))
        context = options.context or ((1024, 128, 8192, 32768) if fast else (512, 128, 2048))
        room = positions - max(nodes)
        if options.context and max(context) > room:
            raise ValueError(
                f"context={max(context)} and nodes={max(nodes)} are beyond the model's {positions} positions: "
                f"give a context of at most {room}"
            )
        # A short model has no long contexts.
        return cls(tuple(dict.fromkeys((1, *nodes))), batch, tuple(c for c in context if c <= room) or (room // 2,))
