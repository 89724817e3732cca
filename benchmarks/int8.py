"""Where int8 pays: ``python -m benchmarks.int8 rows=[1,2,4] repeats=20 threads=2 inflate=1b``.

Times one verify forward of a random 110M Llama over a short prefix, for different numbers of rows (tokens): in
bfloat16, and in int8 in three ways, which are ``int8`` as it is, its kernel alone however many rows there are, and
``int8_compact``, which keeps no second copy of the weights for many rows. For each number of rows the four take turns,
round after round; the table shows medians over the rounds, and medians of the rounds' ratios to bfloat16. ``inflate``
takes the bundled target at a larger shape instead of random weights.

The last columns show how far the logits are from those of the same weights in float32 (for int8: of scale x integer),
in standard deviations of the logits. An int8 path that computed something else would stand out beside bfloat16's
rounding.
"""

import copy
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.options import option, read_options
from benchmarks.speed import llama_110m
from experiments.reporting import terminal
from experiments.reporting.table import Column, Table
from specdec.batch import ForwardBatch
from specdec.inflate import SHAPES
from specdec.modeling.runner import ModelRunner
from specdec.modeling.target import Target
from specdec.quantization import int8, quantize
from specdec.quantization.base import weights_read
from specdec.tree import DraftTree, TreeShape

PREFIX = 32
"""Tokens in the cache: few, so that the weights are what is measured."""


class Side:
    """One way to run a forward, and its times.

    Args:
        name: Shown.
        model: What to run.
        rows: Tokens at most.
        kernel_rows: For how many rows the int8 kernel is used in this side's forwards.
    """

    def __init__(self, name: str, model: PreTrainedModel, rows: int, kernel_rows: int = int8.KERNEL_ROWS):
        self.name, self.model, self.kernel_rows = name, model, kernel_rows
        self.runner = ModelRunner(model, max_batch_size=1, max_length=PREFIX + 1, max_nodes=rows)
        self.times: dict[int, list[float]] = {}

    def forward(self, tree: DraftTree) -> torch.Tensor:
        """Logits of one verify forward, timed."""
        with kernel_up_to(self.kernel_rows):
            start = time.perf_counter()
            logits = self.runner.run(
                ForwardBatch.of_tree(tree, host_slots=np.zeros(1, dtype=np.int64), host_lengths=np.array([PREFIX]))
            ).scores
            seconds = time.perf_counter() - start
        self.times.setdefault(tree.tokens.shape[1], []).append(1000 * seconds)
        return logits


@contextmanager
def kernel_up_to(rows: int) -> Iterator[None]:
    """Use the int8 kernel for up to this many rows."""
    before = int8.KERNEL_ROWS
    int8.KERNEL_ROWS = rows
    try:
        yield
    finally:
        int8.KERNEL_ROWS = before


def chain(rows: int, vocab: int) -> DraftTree:
    """A root and a chain behind it."""
    tokens = torch.randint(0, vocab, (1, rows), generator=torch.Generator().manual_seed(rows))
    return DraftTree.root_only(tokens[:, 0]) if rows == 1 else DraftTree.from_shape(TreeShape.chain(rows - 1), tokens)


@dataclass(frozen=True)
class Options:
    """The command line."""

    rows: tuple[int, ...] = option((1, 2, 4, 6, 8, 9, 12, 16), "tokens per forward", least=1)
    repeats: int = option(20, "forwards that are timed, of each kind", least=1)
    threads: int | None = option(None, "CPU threads; null: torch's choice", least=1)
    inflate: str | None = option(None, "the bundled target at this shape; null: random weights", choices=tuple(SHAPES))


def main() -> None:
    """Measure and print one table."""
    arguments = read_options(Options, __doc__)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.inflate is None:
        model, name = llama_110m(), "a random 110M Llama"
    else:
        target = Target.from_pretrained("bundled/target", dtype="bfloat16", device="cpu", inflate=arguments.inflate)
        model, name = target.model, target.name
    most, vocab = max(arguments.rows), Target(model).vocab_size
    quantized = quantize(copy.deepcopy(model), "int8")
    sides = [
        Side("bf16", model, most),
        Side("int8", quantized, most),
        Side("kernel alone", quantized, most, kernel_rows=most),
        Side("int8_compact", quantize(copy.deepcopy(model), "int8_compact"), most),
    ]
    # The same weights without rounding: bfloat16's in float32, and int8's products in float32, without rounded copies.
    exact = {
        "bf16": Side("", copy.deepcopy(model).float(), most),
        "int8": Side("", copy.deepcopy(sides[3].model).float(), most),
    }
    headings = ["rows", *(f"{side.name}, ms" for side in sides), *(f"{side.name} / bf16" for side in sides[1:])]
    table = Table(
        [Column(heading) for heading in [*headings, *(f"RMS error, {name}" for name in exact)]],
        f"One verify forward of {name} ({model.num_parameters() / 1e6:.0f}M parameters), torch "
        f"{torch.__version__}, {torch.get_num_threads()} threads, median of {arguments.repeats}",
    )
    for rows in arguments.rows:
        tree = chain(rows, vocab)
        errors = []
        for side, reference in zip(sides, exact.values(), strict=False):
            expected = reference.forward(tree)
            error = (side.forward(tree).float() - expected).pow(2).mean().sqrt() / expected.std()
            errors.append(error.item())
        for side in sides:
            side.forward(tree)
            side.times[rows].clear()
        for repeat in range(arguments.repeats):
            # Another order each time: who comes after whom matters for what is in the caches.
            for index in range(len(sides)):
                sides[(index + repeat) % len(sides)].forward(tree)
        bf16 = sides[0].times[rows]
        ratios = [statistics.median(b / a for a, b in zip(bf16, side.times[rows], strict=True)) for side in sides[1:]]
        table.add(
            str(rows),
            *[f"{statistics.median(side.times[rows]):.1f}" for side in sides],
            *[f"{ratio:.2f}" for ratio in ratios],
            *[f"{error:.4f}" for error in errors],
        )
    console = terminal.console()
    console.print(terminal.render(table))
    for side in (sides[0], sides[1]):
        read = weights_read(side.model)
        console.print(
            f"{side.name}: {read.bytes / read.weights:.3f} bytes per weight for one token ({read.bytes / 1e6:.0f} MB)"
        )


if __name__ == "__main__":
    main()
