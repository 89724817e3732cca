"""Compiles kernels for a GPU that is not there, with the arguments that real launches give them.

In a process of its own, because Triton must not have been told to interpret.
"""

from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from specdec.kernels import attention
from tests.attention import Case

_HALF: dict[str, Any] = {"lengths": (40,), "dtype": torch.bfloat16}
_LLAMA: dict[str, Any] = {**_HALF, "head_dim": 128, "kv_heads": 8, "groups": 4}
MODELS = {
    "Llama-3.1-8B, decoding": Case(nodes=1, shape="chain", **_LLAMA),
    "Llama-3.1-8B, 16 nodes": Case(nodes=16, **_LLAMA),
    "Llama-3.1-8B, 256 nodes": Case(nodes=256, **_LLAMA),
    "Llama-3.1-8B, prefill": Case(nodes=512, shape="chain", **_LLAMA),
    "Gemma-2-9B": Case(nodes=16, head_dim=256, kv_heads=8, groups=2, softcap=50.0, window=4096, **_HALF),
    "gpt-oss-20b": Case(nodes=16, head_dim=64, kv_heads=8, groups=8, sinks=True, window=128, **_HALF),
    "DeepSeek-V2-Lite": Case(nodes=16, head_dim=192, value_dim=128, kv_heads=16, groups=1, **_HALF),
    "DeepSeek-V3, latent": Case(nodes=8, head_dim=576, value_dim=512, kv_heads=1, groups=128, **_HALF),
    "in float32": Case(nodes=16, lengths=(40,), head_dim=128, kv_heads=2, groups=4),
}
"""Shapes of models that decode on a GPU, besides the small ones of ``CASES``."""

SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory of one program, by compute capability."""


def compile_for(capability: int) -> list[Any]:
    """Make every later launch compile for a GPU and do no more; returns a list to which the kernels are added."""
    target = GPUTarget("cuda", capability, 32)
    kernels: list[Any] = []
    triton.runtime.driver.set_active(
        SimpleNamespace(  # type: ignore[arg-type]
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    JITFunction.run = compiled  # type: ignore[method-assign]
    attention.shared_memory = lambda device: SHARED[capability]
    attention.processors = lambda device: 132
    return kernels
