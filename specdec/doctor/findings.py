"""What was found out about this machine, and what specdec chooses because of it, as rows of a table."""

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from specdec import machine
from specdec.attention.native import faster_here
from specdec.execution.packing import can_pack, torch_rows
from specdec.kernels import obstacle
from specdec.machine import Cpu, choose_dtype, dtype_name
from specdec.native import DTYPES, SWITCH, native_library, recommended_threads

Rows = list[tuple[str, str]]

GIB = 2**30

NO_C = f"torch's kernels: a C compiler and AVX2 would make them faster ({SWITCH}=0 forbids it)"

OPTIONAL = {
    "hydra-core": "needed by experiments",
    "wandb": "for tracking experiments",
    "triton": "compiles kernels for GPUs",
    "kernels": "lets transformers load kernels from the hub",
}
"""Packages that the core runs without, and what they are for."""


def found(facts: Cpu | None = None) -> Rows:
    """Returns what this machine has: processor, memory, GPUs, versions."""
    facts = facts or machine.cpu()
    memory = psutil.virtual_memory()
    rows = [
        ("processor", facts.name),
        ("cores", f"{facts.physical_cores}, with {facts.logical_cores} hardware threads that this process may use"),
        ("quota", "none" if facts.quota is None else f"{facts.quota:g} cores' worth of time"),
        ("vector instructions", torch.backends.cpu.get_cpu_capability()),
        ("bfloat16", _arithmetic(machine.native_bfloat16(facts), facts, "bf16")),
        ("float16", _arithmetic(machine.native_float16(facts), facts, "fp16", "asimdhp")),
        ("oneDNN", _onednn(facts)),
        ("memory", f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB"),
    ]
    rows += [(f"GPU {index}", _gpu(index)) for index in range(torch.cuda.device_count())] or [("GPU", "none")]
    rows += [("python", platform.python_version())]
    rows += [(name, _version(name) or "not installed") for name in ("torch", "transformers")]
    rows += [(name, _version(name) or f"not installed ({purpose})") for name, purpose in OPTIONAL.items()]
    return rows


def chosen(device: torch.device, facts: Cpu | None = None, *, default_threads: int) -> Rows:
    """Returns what specdec does on a device because of it.

    Args:
        device: Where models will run.
        facts: The processor; None for this one.
        default_threads: How many threads torch would use by itself.
    """
    facts = facts or machine.cpu()
    rows = [("device", str(device))]
    for dtype in (torch.bfloat16, torch.float16):
        native = machine.is_native(dtype, device, facts)
        rows.append((f"dtype, {dtype_name(dtype)} model", choose_dtype(dtype, device, native=native).reason))
    threads = recommended_threads(facts)
    rows.append(("threads", f"{threads} (torch by itself: {default_threads})"))
    if device.type != "cpu":
        triton = obstacle(device)
        attention = f"grouped, because {triton}" if triton else "triton, or grouped for a model that its kernel fails"
        return [*rows, ("attention", attention), ("executor", "eager"), ("packed weights", "none: they are for CPUs")]
    packed = [d for d in (torch.float32, torch.bfloat16) if can_pack(torch.empty(1, dtype=d))]
    compiled = native_library() is not None
    rows += [
        ("attention", _by_dtype(faster_here) if compiled else "grouped, torch's products"),
        ("executor", "forwards of a shape that comes often are captured and replayed"),
        ("packed weights", ", ".join(map(dtype_name, packed)) or "none: this torch has no oneDNN"),
        ("float32, 16-bit checkpoint", "weights stay in 16 bits" if compiled else "weights take 32 bits"),
        ("products", _by_dtype(_products) if compiled else NO_C),
    ]
    return rows


def _by_dtype(choice: Callable[[torch.dtype], str]) -> str:
    choices = {dtype_name(dtype): choice(dtype) for dtype in DTYPES}
    alike = len(set(choices.values())) == 1
    return next(iter(choices.values())) if alike else ", ".join(f"{each} in {dtype}" for dtype, each in choices.items())


def _products(dtype: torch.dtype) -> str:
    rows = torch_rows(dtype)
    return f"this project's C, and from {rows} rows on torch's" if rows else "this project's C"


def _arithmetic(native: bool, facts: Cpu, *names: str) -> str:
    sets = sorted(feature for feature in facts.features if any(name in feature for name in names))
    if native:
        return f"native ({', '.join(sets)})"
    return f"not native: torch does not use {', '.join(sets)} here" if sets else "not native"


def _onednn(facts: Cpu) -> str:
    if not facts.onednn:
        return "none"
    return "yes" + (f", held to {facts.onednn_limit} by ONEDNN_MAX_CPU_ISA" if facts.onednn_limit else "")


def _gpu(index: int) -> str:
    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    native = machine.is_native(torch.bfloat16, torch.device("cuda", index))
    return (
        f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} GiB free of {total / GIB:.1f} GiB, "
        f"capability {major}.{minor}, bfloat16 {'native' if native else 'not native'}"
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
