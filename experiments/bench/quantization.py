"""Where quantized weights pay: ``python -m experiments.bench quantization rows=[1,4] only=[layers] threads=1``.

Two tables. ``layers``: milliseconds of one linear layer by its shape and the number of rows, in full precision (on
packed weights where the engine packs them), in each scheme as it is, and by each scheme's kernel alone. That shows up
to how many rows the kernel wins (``kernel_rows`` in ``specdec/quantization/dispatch.py``). There are as many layers of
a shape as memory traffic needs, so that no weights are found in the caches.

``model``: one verify forward of a random 110M Llama over a short prefix, by the number of rows: milliseconds, and the
ratio to full precision. ``inflate`` takes the bundled target at a larger shape instead of random weights. The errors
are those of the logits against the same numbers in float64, in standard deviations of the logits: a path that computed
something else would stand out beside full precision's rounding.

All sides take turns. A time is the least of its runs, because other programs only ever add to it.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from experiments.bench.options import option, read_options
from experiments.bench.speed import llama_110m
from experiments.reporting import terminal
from experiments.reporting.table import Column, Table
from specdec.execution.packing import PackedWeight, can_pack
from specdec.forward import ForwardBatch
from specdec.llama_shapes import SHAPES
from specdec.quantization import METHODS, dispatch, quantize
from specdec.quantization.dispatch import DispatchedLinear
from specdec.quantization.hardware import hardware, obstacle
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from specdec.tree import DraftTree, TreeShape

PREFIX = 32
"""Tokens in the cache: few, so that the weights are what is measured."""
LAYERS = ((768, 768), (2048, 768), (768, 2048), (32000, 768), (8192, 2048))
"""Output and input widths: those of the 110M Llama, and one of a large model."""
_WEIGHTS = 16_000_000  # of all layers of a shape together: four times a large cache in eight bits


@dataclass(frozen=True)
class Options:
    """The command line."""

    rows: tuple[int, ...] = option((1, 4, 8, 16, 64), "rows (tokens) per product or forward", least=1)
    schemes: tuple[str, ...] = option(("int8", "int4"), "quantizations", choices=tuple(METHODS))
    dtype: str = option("bfloat16", "of the activations", choices=("bfloat16", "float32"))
    repeats: int = option(10, "runs that are timed, of each kind", least=1)
    threads: int | None = option(None, "CPU threads; null: torch's choice", least=1)
    inflate: str | None = option(None, "the bundled target at this shape; null: random weights", choices=tuple(SHAPES))
    only: tuple[str, ...] = option(("layers", "model"), "tables to measure", choices=("layers", "model"))


@contextmanager
def kernels_only() -> Iterator[None]:
    """Use the kernels for any number of rows."""
    before = dispatch.kernel_rows
    dispatch.kernel_rows = lambda *arguments, **options: 1 << 30
    try:
        yield
    finally:
        dispatch.kernel_rows = before


def least_times(sides: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """The least milliseconds of each side, which take turns."""
    least = [float("inf")] * len(sides)
    for repeat in range(repeats + 1):
        for step in range(len(sides)):
            index = (step + repeat) % len(sides)  # who comes after whom matters for what is in the caches
            start = time.perf_counter()
            sides[index]()
            if repeat:
                least[index] = min(least[index], 1000 * (time.perf_counter() - start))
    return least


@torch.inference_mode()
def layers_table(options: Options, dtype: torch.dtype) -> Table:
    """One row per shape and number of rows."""
    names = [f"{kind}{scheme}" for scheme in options.schemes for kind in ("", "kernel of ")]
    headings = ["layer (out x in)", "rows", f"{options.dtype}, ms", *(f"{name}, ms" for name in names)]
    ratios = [f"{scheme} / {options.dtype}" for scheme in options.schemes]
    table = Table([Column(heading) for heading in [*headings, *ratios]], f"One linear layer, {described(options)}")
    for out, width in LAYERS:
        generator = torch.Generator().manual_seed(0)
        count = max(1, _WEIGHTS // (out * width))
        weights = [torch.randn(out, width, generator=generator).to(dtype) for _ in range(count)]
        packed = [PackedWeight(weight, [weight]) for weight in weights] if can_pack(weights[0]) else []
        quantized = {scheme: [METHODS[scheme](weight, None) for weight in weights] for scheme in options.schemes}
        for rows in options.rows:
            inputs = torch.randn(rows, width, generator=generator).to(dtype)
            sides: list[Callable[[], object]] = [lambda x=inputs, w=weights, p=packed: full(x, w, p)]
            for scheme in options.schemes:
                made = quantized[scheme]
                sides += [lambda x=inputs, y=made: [layer(x) for layer in y], lambda x=inputs, y=made: by_kernel(x, y)]
            least = [each / count for each in least_times(sides, options.repeats)]
            own = [least[1 + 2 * index] / least[0] for index in range(len(options.schemes))]
            table.add(f"{out} x {width}", str(rows), *(f"{each:.3f}" for each in least), *(f"{r:.2f}" for r in own))
    return table


def full(inputs: Tensor, weights: Sequence[Tensor], packed: Sequence[PackedWeight]) -> list[Tensor]:
    """Full precision's products."""
    return [each(inputs, None) for each in packed] if packed else [F.linear(inputs, weight) for weight in weights]


def by_kernel(inputs: Tensor, layers: Sequence[torch.nn.Module]) -> None:
    """The kernels' products, whatever the number of rows."""
    with kernels_only():
        for layer in layers:
            assert isinstance(layer, DispatchedLinear)
            layer(inputs)


class Side:
    """A model to run forwards of.

    Args:
        model: What to run.
        rows: Tokens at most.
    """

    def __init__(self, model: PreTrainedModel, rows: int):
        self.model = model
        self.runner = ModelRunner(model, max_batch_size=1, max_length=PREFIX + 1, max_nodes=rows)

    def forward(self, tree: DraftTree) -> Tensor:
        """Logits of one verify forward."""
        lengths = np.array([PREFIX])
        batch = ForwardBatch.of_tree(tree, host_slots=np.zeros(1, dtype=np.int64), host_lengths=lengths)
        return self.runner.run(batch).scores


def chain(rows: int, vocab: int) -> DraftTree:
    """A root and a chain behind it."""
    tokens = torch.randint(0, vocab, (1, rows), generator=torch.Generator().manual_seed(rows))
    return DraftTree.root_only(tokens[:, 0]) if rows == 1 else DraftTree.from_shape(TreeShape.chain(rows - 1), tokens)


def model_table(options: Options, dtype: torch.dtype) -> tuple[Table, list[str]]:
    """One row per number of rows; and lines about the bytes that one token reads."""
    if options.inflate is None:
        model, name = llama_110m().to(dtype), "a random 110M Llama"
    else:
        target = Target.from_pretrained("bundled/target", dtype=dtype, device="cpu", inflate=options.inflate)
        model, name = target.model, target.name
    most, vocab = max(options.rows), Target(model).vocab_size
    models = {options.dtype: model}
    for scheme in options.schemes:
        models[scheme] = quantize(copy.deepcopy(model), scheme, check=False)
    sides = {each: Side(found, most) for each, found in models.items()}
    headings = ["rows", *(f"{each}, ms" for each in sides), *(f"{s} / {options.dtype}" for s in options.schemes)]
    title = f"One verify forward of {name}, {described(options)}"
    table = Table([Column(heading) for heading in [*headings, *(f"RMS error, {each}" for each in sides)]], title)
    errors = {each: rms_errors(side, options.rows, vocab, most) for each, side in sides.items()}
    for index, rows in enumerate(options.rows):
        tree = chain(rows, vocab)
        for side in sides.values():
            for _ in range(25):  # the engine captures a forward that came so often
                side.forward(tree)
        least = least_times([lambda s=side, t=tree: s.forward(t) for side in sides.values()], options.repeats)
        table.add(
            str(rows),
            *(f"{each:.1f}" for each in least),
            *(f"{each / least[0]:.2f}" for each in least[1:]),
            *(f"{each[index]:.4f}" for each in errors.values()),
        )
    lines = []
    for each, side in sides.items():
        per, read = side.runner.bytes_per_weight, side.runner.weight_bytes()
        lines.append(f"{each}: {per:.3f} bytes per weight for one token ({read / 1e6:.0f} MB)")
    return table, lines


def rms_errors(side: Side, rows: Sequence[int], vocab: int, most: int) -> list[float]:
    """How far logits are from float64's, in their standard deviations, for each number of rows."""
    reference = Side(copy.deepcopy(side.model).double(), most)
    found = []
    for count in rows:
        tree = chain(count, vocab)
        expected = reference.forward(tree)
        found.append(float((side.forward(tree).double() - expected).square().mean().sqrt() / expected.std()))
    return found


def described(options: Options) -> str:
    """What the figures depend on, for the tables' titles."""
    machine = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{machine}, {torch.get_num_threads()} threads, least of {options.repeats}"


def main() -> None:
    """Measure and print."""
    options = read_options(Options, __doc__)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    for scheme in options.schemes:
        reason = obstacle(scheme, dtype, hardware(torch.device("cpu")))
        if reason is not None:
            raise SystemExit(f"schemes={scheme}: {reason}; leave it out")
    console = terminal.console()
    if "layers" in options.only:
        console.print(terminal.render(layers_table(options, dtype)))
    if "model" in options.only:
        table, lines = model_table(options, dtype)
        console.print(terminal.render(table))
        for line in lines:
            console.print(line)


if __name__ == "__main__":
    main()
