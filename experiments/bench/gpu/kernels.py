"""The kernels that the stages of a round run on the device: how often, how long, and what they are for."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from experiments.bench.timing import runs_wrapped
from specdec.engine.engine import Engine

KINDS = {
    "attention": r"attend_piece|merge_pieces|flash|fmha|attention",
    "products": r"gemm|gemv|nvjet|cutlass|xmma|splitk|_product|^_sum$|int4mm|int8mm|aten::(mm|bmm|addmm)\b",
    "sorts": r"sort|radix|topk|scan|cumsum",
    "the rest": "",
}
"""By kind: what the names of its kernels have in them; the first that fits counts."""
_ROUNDS = 12
"""Within so many rounds every stage comes."""


class Kernel(NamedTuple):
    """All runs of one kernel, with their seconds together."""

    name: str
    kind: str
    runs: int
    seconds: float


def kind_of(name: str) -> str:
    """Return what a kernel is for, by its name."""
    return next(kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))


def profiled(call: Callable[[], Any], device: torch.device) -> tuple[Any, list[Kernel]]:
    """Return a call's result and its kernels, the longest first; on a CPU operations of torch stand for them.

    There are none where the driver lets nobody look.
    """
    # Torch sets these where it captures graphs itself: to begin tracing again under graphs may end the process.
    os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        result = call()
        if on_gpu:
            torch.cuda.synchronize(device)
    kernels = []
    for each in found.key_averages():
        if each.device_type == DeviceType.CUDA if on_gpu else each.key.startswith("aten::"):
            micros = each.self_device_time_total if on_gpu else each.self_cpu_time_total
            kernels.append(Kernel(each.key, kind_of(each.key), each.count, micros / 1e6))
    return result, sorted(kernels, key=lambda kernel: -kernel.seconds)


def kernels_by_stage(engine: Engine) -> dict[str, list[Kernel]]:
    """Play rounds of requests that run, and return the kernels of one replay of every recorded stage."""
    recordings = engine._rounds.recordings
    assert recordings is not None, "rounds of this engine are recorded"
    found: dict[str, list[Kernel]] = {}

    def looking(run: Callable[..., Any]) -> Callable[..., Any]:
        def look(name: str, *arguments: Any, **options: Any) -> Any:
            if name in found:
                return run(name, *arguments, **options)
            before = recordings.replays
            result, kernels = profiled(lambda: run(name, *arguments, **options), engine.target.device)
            if recordings.replays > before:
                found[name] = kernels
            return result

        return look

    with runs_wrapped([recordings], looking):
        for _ in range(_ROUNDS):
            engine.step()
    return found


def shares(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Return the share of every kind in the time of all kernels."""
    whole = sum(kernel.seconds for kernel in kernels) or 1.0
    return {kind: sum(each.seconds for each in kernels if each.kind == kind) / whole for kind in KINDS}
