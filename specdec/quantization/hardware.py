"""Says which schemes a device has kernels for, from what it says about itself."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from specdec.machine import dtype_name

_CPU_DTYPES = (torch.float32, torch.bfloat16)
_CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8_FROM = (8, 9)


@dataclass(frozen=True)
class Hardware:
    """What kernels on quantized weights depend on.

    Attributes:
        device: The kind of device, by torch's name.
        capability: The compute capability of a CUDA device; None for others.
        triton: Whether Triton is installed.
        operators: Names of torch's kernels that this build has.
    """

    device: str
    capability: tuple[int, int] | None = None
    triton: bool = False
    operators: frozenset[str] = frozenset({"_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu"})


def hardware(device: torch.device) -> Hardware:
    """Returns the facts of a device of this machine."""
    names = Hardware("").operators
    return Hardware(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        triton=has_triton(),
        operators=frozenset(name for name in names if hasattr(torch, name)),
    )


@cache
def has_triton() -> bool:
    """Returns whether Triton is installed."""
    return find_spec("triton") is not None


def obstacle(name: str, dtype: torch.dtype, facts: Hardware) -> str | None:
    """Returns why a device cannot run a scheme fast, as a clause; None if it has a kernel for it.

    Args:
        name: ``"int8"``, ``"int4"`` (also with ``_compact``) or ``"fp8"``; others are not judged.
        dtype: The activations'.
        facts: The device's.
    """
    scheme = name.removesuffix("_compact")
    if scheme not in ("int8", "int4", "fp8") or facts.device == "meta":
        return None
    if scheme == "fp8":
        if facts.capability is None:
            needs = "fp8 weights need a GPU that computes with them (CUDA, capability 8.9)"
            return f"{needs}, and this is a {facts.device} device"
        if facts.capability < _FP8_FROM:
            have = ".".join(map(str, facts.capability))
            return f"fp8 weights need a GPU of compute capability 8.9, and this one has {have}"
    if facts.device == "cuda":
        if not facts.triton:
            return "its kernel on a GPU is written in Triton, which is not installed (pip install triton)"
        return None if dtype in _CUDA_DTYPES else f"there is no kernel for it in {dtype_name(dtype)}"
    if facts.device != "cpu":
        return f"there is no kernel for it on {facts.device} devices"
    if dtype not in _CPU_DTYPES:
        return f"on a CPU there is no kernel for it in {dtype_name(dtype)}, only in float32 and bfloat16"
    operator = "_weight_int8pack_mm" if scheme == "int8" else "_weight_int4pack_mm_for_cpu"
    return None if operator in facts.operators else f"this build of torch has no {operator}"
