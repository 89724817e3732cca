"""Where quantized weights pay: ``rows=[1,4] dtype=float32 only=[layers] threads=1``.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from experiments.bench.models import chain_scores, forward_figures, llama_110m, set_threads, some_tokens
from experiments.bench.options import option, read_options
from experiments.bench.timing import in_turns, show, where
from specdec.execution.packing import PackedWeight, can_pack
from specdec.llama_shapes import SHAPES
from specdec.quantization import METHODS, dispatch, quantize
from specdec.quantization.speed import hardware, obstacle
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

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


@torch.inference_mode()
def layers_table(options: Options, dtype: torch.dtype) -> None:
    """Print a row per shape and number of rows."""
    names = [options.dtype, *(f"{kind}{scheme}" for scheme in options.schemes for kind in ("", "kernel of "))]
    found = []
    for out, width in LAYERS:
        generator = torch.Generator().manual_seed(0)
        count = max(1, _WEIGHTS // (out * width))
        weights = [torch.randn(out, width, generator=generator).to(dtype) for _ in range(count)]
        layers: list[Callable[[Tensor], Tensor]] = [partial(F.linear, weight=weight) for weight in weights]
        if can_pack(weights[0]):
            layers = [partial(PackedWeight(weight, [weight]), bias=None) for weight in weights]
        quantized = [[METHODS[scheme](weight, None) for weight in weights] for scheme in options.schemes]
        for rows in options.rows:
            inputs = torch.randn(rows, width, generator=generator).to(dtype)
            sides = [partial(products, inputs, layers)]
            for made in quantized:
                sides += [partial(products, inputs, made), partial(by_kernel, inputs, made)]
            least = [1000 * min(times) / count for times in in_turns(sides, options.repeats)]
            timed = {f"{name}, ms": f"{each:.3f}" for name, each in zip(names, least, strict=True)}
            ratios = {
                f"{scheme} / {options.dtype}": f"{least[1 + 2 * index] / least[0]:.2f}"
                for index, scheme in enumerate(options.schemes)
            }
            found.append({"layer (out x in)": f"{out} x {width}", "rows": str(rows), **timed, **ratios})
    show(f"One linear layer, {where()}, least of {options.repeats}", found)


def products(inputs: Tensor, layers: Sequence[Callable[[Tensor], Tensor] | nn.Module]) -> None:
    """Multiply by every layer."""
    for layer in layers:
        layer(inputs)


def by_kernel(inputs: Tensor, layers: Sequence[nn.Module]) -> None:
    """Multiply by the kernels, whatever the number of rows."""
    with patch.object(dispatch, "kernel_rows", lambda *arguments, **options: 1 << 30):
        products(inputs, layers)


def model_table(options: Options, dtype: torch.dtype) -> None:
    """Print a row per number of rows, and the bytes that one token reads."""
    if options.inflate is None:
        model, name = llama_110m().to(dtype), "a random 110M Llama"  # pyright: ignore
    else:
        target = Target.from_pretrained("bundled/target", dtype=dtype, device="cpu", inflate=options.inflate)
        model, name = target.model, target.name
    models = {options.dtype: model}
    models |= {scheme: quantize(copy.deepcopy(model), scheme, check=False) for scheme in options.schemes}
    runners = {each: _runner(found, options) for each, found in models.items()}
    errors = {each: rms_errors(found, options) for each, found in models.items()}
    table = []
    for index, rows in enumerate(options.rows):
        tokens = some_tokens(rows, runners[options.dtype].vocab_size)
        figures = forward_figures(runners, tokens, PREFIX, options.repeats, least=True)
        off = {f"RMS error, {each}": f"{found[index]:.4f}" for each, found in errors.items()}
        table.append({"rows": str(rows), **figures, **off})
    show(f"One verify forward of {name}, {where()}, least of {options.repeats}", table)
    for each, runner in runners.items():
        per, read = runner.bytes_per_weight, runner.weight_bytes()
        print(f"{each}: {per:.3f} bytes per weight for one token ({read / 1e6:.0f} MB)")


def _runner(model: PreTrainedModel, options: Options) -> ModelRunner:
    return ModelRunner(model, max_batch_size=1, max_length=PREFIX + 1, max_nodes=max(options.rows))


def rms_errors(model: PreTrainedModel, options: Options) -> list[float]:
    """Return how far logits are from float64's, in their standard deviations, for each number of rows."""
    runner, reference = (_runner(each, options) for each in (model, copy.deepcopy(model).double()))
    found = []
    for count in options.rows:
        tokens = some_tokens(count, runner.vocab_size)
        expected = chain_scores(reference, tokens, PREFIX)
        off = chain_scores(runner, tokens, PREFIX).double() - expected
        found.append(float(off.square().mean().sqrt() / expected.std()))
    return found


def main() -> None:
    """Measure and print."""
    options = read_options(Options, __doc__)
    set_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    for scheme in options.schemes:
        reason = obstacle(scheme, dtype, hardware(torch.device("cpu")))
        if reason is not None:
            raise SystemExit(f"schemes={scheme}: {reason}; leave it out")
    for name, make in {"layers": layers_table, "model": model_table}.items():
        if name in options.only:
            make(options, dtype)
