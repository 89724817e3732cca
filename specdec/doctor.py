"""This machine, and what specdec chooses for it, as one table: ``python -m specdec.doctor``.

The first call compiles the C and measures the choices, which takes some seconds; later processes find them.
"""

import platform
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from specdec.attention.native import faster_here
from specdec.dtypes import choose_dtype
from specdec.execution.packing import torch_rows
from specdec.kernels import obstacle
from specdec.machine import Cpu, cpu, dtype_name
from specdec.native import DTYPES, SWITCH, native_library, recommended_threads

PACKAGES = ("torch", "transformers", "triton", "kernels", "hydra-core", "wandb")
_NAMED = ("avx", "amx", "fma", "f16c", "bf16", "fp16", "asimd", "sve")


def table(facts: Cpu | None = None) -> dict[str, str]:
    """Return what there is and what is chosen, by name; of another processor, if its facts are given."""
    facts = facts or cpu()
    library, memory, dtypes = native_library(), psutil.virtual_memory(), (torch.bfloat16, torch.float16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limit = f"; oneDNN is held to {facts.onednn_limit} by ONEDNN_MAX_CPU_ISA" if facts.onednn_limit else ""
    quota = "" if facts.quota is None else f", of which a quota allows {facts.quota:g}"
    rows = {
        "processor": facts.name,
        "cores": f"{facts.physical_cores} with {facts.logical_cores} hardware threads{quota}",
        "threads": f"{recommended_threads(facts)} (torch by itself: {torch.get_num_threads()})",
        "instruction sets": " ".join(sorted(name for name in facts.features if name.startswith(_NAMED))) + limit,
        "memory": f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f} GiB",
        "GPUs": ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))) or "none",
        **{f"{dtype_name(dtype)} model on {device}": choose_dtype(dtype, device).reason for dtype in dtypes},
        "C": f"torch's kernels: no compiler, no AVX2, or {SWITCH}=0" if library is None else str(library._name),
        "Triton": obstacle(device) or "installed",
        "versions": ", ".join([f"Python {platform.python_version()}", *map(_version, PACKAGES)]),
    }
    for dtype in DTYPES if library is not None else ():
        own = "the C's, in tiles (AMX)" if library and dtype is torch.bfloat16 and library.tiles_from(0) else "the C's"
        first = torch_rows(dtype)
        rows[f"products in {dtype_name(dtype)}"] = own + (f", from {first} rows on torch's" if first else "")
        rows[f"attention in {dtype_name(dtype)}"] = faster_here(dtype)
    return rows


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


if __name__ == "__main__":
    print("\n".join(f"{name}: {value}" for name, value in table().items()))
