"""The table "On a GPU" of ``docs/costs.md``: what an 8B shape with random weights costs on one GPU.

On a processor it runs in the same way, for a rehearsal with ``shape=tiny``.
"""

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from drafters import EagleDrafter
from drafters.heads.eagle import Eagle3Head
from experiments.bench.play import time_rounds
from experiments.measuring.forwards import Forward, as_graph, fill, forward_batch, graphed, measure_forwards
from experiments.measuring.peaks import Peaks, measure_peaks, shortest
from experiments.measuring.rounds import now
from specdec import Drafter, Engine, ModelRunner, SamplingParams, Target
from specdec.drafting.builders import ExpansionTree
from specdec.physics.precision import Precision
from specdec.physics.reading import read_shape
from specdec.physics.work import prefill_work
from specdec.quantization import quantize
from specdec.quantization.base import QuantizedLinear
from specdec.tree_parts import common_sizes
from verifiers import RejectionVerifier

BOUNDS: dict[str, tuple[str, float, float]] = {
    "copy, TB/s": (">=", 2.6, 3.8),
    "product, TFLOP/s": (">=", 550, 550),
    "plain step, ms": ("<=", 5.8, 4.5),
    "9 nodes / one": ("<=", 1.05, 1.05),
    "60 nodes / one": ("<=", 1.15, 1.15),
    "stages not recorded": ("<=", 0, 0),
    "replayed rounds, lowest share": (">=", 0.8, 0.8),
    "round without draft and verify, ms": ("<=", 0.2, 0.2),
    "EAGLE-3 round, ms": ("<=", 8.5, 6.8),
    "eager plain round / recorded": (">=", 2, 2),
    "int4 products / full, 1 to 60 rows": ("<=", 0.6, 0.6),
    "int8 products / full, 1 to 60 rows": ("<=", 0.65, 0.65),
    "fp8 products / full, 1 to 60 rows": ("<=", 0.65, 0.65),
    "attention at the longest / copy's speed": (">=", 0.7, 0.7),
    "attention with fp8 keys / full": ("<=", 0.65, 0.65),
    "prompt of 2,048 / product's speed": (">=", 0.5, 0.5),
    "kernels of a plain verify per layer": ("<=", 15, 15),
    "products and attention, share of verify's kernels": (">=", 0.85, 0.85),
}
"""The figures, with the bounds of an H100 and of an H200: a tenth above what is published for one H100."""
GPUS = ("H100", "H200")
_COUNTED = r"attend_piece|merge_pieces|flash|fmha|attention|gemm|gemv|nvjet|cutlass|xmma|splitk|_product|^_sum$"
GREEDY = SamplingParams(ignore_eos=True, seed=0, max_new_tokens=1024)


_LARGE = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    },
    "llama-8b": {
        **_LARGE, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-70b": {
        **_LARGE, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
}  # fmt: skip
"""Llama shapes by name: a toy, Llama-3.1-8B and -70B."""


def llama_config(shape: str, **sizes: Any) -> LlamaConfig:
    """Return a configuration that ends nowhere; ``sizes`` replace fields of the shape."""
    return LlamaConfig(**{**SHAPES[shape], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **sizes})


@torch.inference_mode(False)
def random_target(shape: str, device: torch.device, dtype: torch.dtype, **sizes: Any) -> Target:
    """Return a model of a shape, made on the device: ones where there is a weight per channel, else small noise."""
    config = llama_config(shape, **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)  # pyright: ignore[reportArgumentType] (its decorator hides self)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        parameter.data.fill_(1.0) if parameter.ndim == 1 else parameter.data.normal_(std=0.02, generator=generator)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its frequencies are no weights
    return Target(model.eval().requires_grad_(False), name=f"random {shape}")


def measure(device: torch.device, dtype: torch.dtype, *, shape: str, context: int, seconds: float) -> pd.DataFrame:
    """Measure all figures, each for about so many seconds; one that fails is left out, and its error printed."""
    peaks = measure_peaks(device, dtype, seconds=min(2.0, seconds))
    found = {"copy, TB/s": peaks.copy / 1e12, "product, TFLOP/s": peaks.flops / 1e12}
    target = random_target(shape, device, dtype)
    parts: list[Callable[[], Iterator[tuple[str, float]]]] = [
        lambda: _steps(target, context, seconds),
        lambda: _rounds(target, context),
        lambda: _products(shape, device, dtype, seconds),
        lambda: _attention(random_target(shape, device, dtype, num_hidden_layers=2), peaks, seconds),
        lambda: _prefill(target, peaks),
        lambda: _kernels(target, context),
    ]
    for part in parts:
        try:
            found.update(part())
        except (RuntimeError, ValueError) as error:  # the others are to be measured, too
            print(f"left out: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        gc.collect()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    column = next((number for number, gpu in enumerate(GPUS) if gpu in name), None)
    rows = []
    for what, (sign, *bounds) in BOUNDS.items():
        if what in found:
            wanted = {gpu: f"{sign} {bound:g}" for gpu, bound in zip(GPUS, bounds, strict=True)}
            met = None
            if column is not None:
                met = found[what] <= bounds[column] if sign == "<=" else found[what] >= bounds[column]
            rows.append({"what": what, **wanted, "found": found[what], "met": met})
    return pd.DataFrame(rows)


def _seconds(runner: ModelRunner, points: Sequence[Forward], seconds: float) -> list[float]:
    return [timed.seconds for timed in measure_forwards(runner, points, seconds=seconds)]


def _steps(target: Target, context: int, seconds: float) -> Iterator[tuple[str, float]]:
    points = [Forward(batch=1, queries=nodes, context=context) for nodes in (1, 9, 60)]
    runner = ModelRunner(target.model, max_batch_size=1, max_length=context, max_nodes=60)
    one, *more = _seconds(runner, points, seconds)
    yield "plain step, ms", 1000 * one
    for point, taken in zip(points[1:], more, strict=True):
        yield f"{point.queries} nodes / one", taken / one


def _rounds(target: Target, context: int) -> Iterator[tuple[str, float]]:
    """Plain rounds, recorded and not, and those of EAGLE-3 with a random head and a tree of 59 nodes."""
    layers = None if (target.num_layers or 0) >= 8 else (0, 1, -1)
    head: Any = Eagle3Head.for_target(
        target.model, hidden_layers=layers, draft_ids=list(range(min(32_000, target.vocab_size)))
    )
    for name, parameter in head.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    head = head.to(target.device, target.dtype).eval().requires_grad_(False)
    eagle = EagleDrafter(head, ExpansionTree(nodes=59, depth=8, width=10))
    ways: list[tuple[Drafter | None, str]] = [(None, "rounds"), (eagle, "rounds"), (None, "off")]
    outside, shares, refused, taken = [], [], 0, []
    for drafter, recording in ways:
        rule, room = None if drafter is None else RejectionVerifier(), context + 1024
        options: dict[str, Any] = {"max_length": min(room, target.max_length), "recording": recording, "timing": True}
        with Engine(target, drafter, rule, **options) as engine:
            engine.warm_up(common_sizes(0 if drafter is None else drafter.max_nodes), sampling=GREEDY)
            engine.submit(_prompt(context, target), GREEDY)
            while not engine.step():
                pass
            before = engine.recording_counts
            figures, after = time_rounds(engine, 1, 40), engine.recording_counts
        taken.append(figures["round"])
        if recording == "rounds":
            outside.append(figures["round"] - figures["draft"] - figures["verify"])
            shares.append((after.replayed - before.replayed) / (after.rounds - before.rounds))
            refused += sum(map(len, after.refused.values()))
    yield "stages not recorded", refused
    yield "replayed rounds, lowest share", min(shares)
    yield "round without draft and verify, ms", 1000 * max(outside)
    yield "EAGLE-3 round, ms", 1000 * taken[1]
    yield "eager plain round / recorded", taken[2] / taken[0]


def _products(shape: str, device: torch.device, dtype: torch.dtype, seconds: float) -> Iterator[tuple[str, float]]:
    """All products of two layers, by the format of their weights."""
    full: dict[int, float] = {}
    for scheme in (None, "int4", "int8", "fp8"):
        model = random_target(shape, device, dtype, num_hidden_layers=2).model
        if scheme is not None:
            if scheme == "fp8" and device.type != "cuda":
                continue
            quantize(model, scheme, check=False)
        layers = [part for part in model.base_model.modules() if isinstance(part, nn.Linear | QuantizedLinear)]
        worst = 0.0
        for rows in (1, 9, 24, 60):
            given = [torch.randn(1, rows, layer.in_features, device=device).to(dtype) for layer in layers]

            def call(layers: Sequence[Any] = layers, given: Sequence[torch.Tensor] = given) -> None:
                for layer, inputs in zip(layers, given, strict=True):
                    layer(inputs)

            with torch.inference_mode():
                taken = shortest(graphed(call, device) or call, device, seconds / 16)
            worst = max(worst, taken / full.setdefault(rows, taken))
        if scheme is not None:
            yield f"{scheme} products / full, 1 to 60 rows", worst


def _attention(target: Target, peaks: Peaks, seconds: float) -> Iterator[tuple[str, float]]:
    """Attention alone: forwards of two layers behind a long context without those behind a short one."""
    rows, nodes, short = 8, 16, 128
    long = min(32_768, target.max_length - nodes)
    taken = []
    for keys in (None, "fp8"):
        seconds_of, size = {}, 0
        for context in (long, short):
            options: dict[str, Any] = {"max_batch_size": rows, "max_length": context, "max_nodes": nodes}
            runner = ModelRunner(target.model, **options, kv_cache=keys)
            point = Forward(batch=rows, queries=nodes, context=context)
            (seconds_of[context],), size = _seconds(runner, [point], seconds / 4), runner.cache.bytes_per_position
        taken.append(seconds_of[long] - seconds_of[short])
        if keys is None:
            yield "attention at the longest / copy's speed", size * rows * (long - short) / taken[0] / peaks.copy
    yield "attention with fp8 keys / full", taken[1] / taken[0]


def _prefill(target: Target, peaks: Peaks) -> Iterator[tuple[str, float]]:
    """A prompt as the engine takes it, in chunks, with the token that follows."""
    tokens = min(2048, target.max_length - 2)
    with Engine(target, max_length=tokens + 2) as engine:
        engine.warm_up(positions=tokens + 2)
        once = SamplingParams(max_new_tokens=1, ignore_eos=True)
        taken = shortest(lambda: engine.generate([_prompt(tokens, target)], once), target.device, 4.0)
    work = prefill_work(read_shape(target.model.config), Precision(), tokens=tokens, logits=0).total
    yield "prompt of 2,048 / product's speed", work.flops / taken / peaks.flops


def _kernels(target: Target, context: int) -> Iterator[tuple[str, float]]:
    """The kernels of a plain step that is replayed; on a processor, its operations."""
    runner = ModelRunner(target.model, max_batch_size=1, max_length=context, max_nodes=1)
    fill(runner)
    batch = forward_batch(Forward(batch=1, queries=1, context=context), runner.vocab_size, target.device)
    call = as_graph(runner, batch) or (lambda: runner.run(batch))
    on_gpu = target.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        call()
        now(target.device)
    kernels = [average for average in found.key_averages() if not on_gpu or average.device_type == DeviceType.CUDA]
    times = {kernel.key: kernel.self_device_time_total if on_gpu else kernel.self_cpu_time_total for kernel in kernels}
    counted = sum(taken for name, taken in times.items() if re.search(_COUNTED, name, re.IGNORECASE))
    yield "kernels of a plain verify per layer", sum(kernel.count for kernel in kernels) / (target.num_layers or 1)
    yield "products and attention, share of verify's kernels", counted / sum(times.values())


def _prompt(tokens: int, target: Target) -> list[int]:
    return [(7 * (place % 23) + 1) % target.vocab_size for place in range(tokens)]
