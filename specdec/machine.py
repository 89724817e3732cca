"""Finds out what this machine computes fast, from what it says about itself.

Facts about the processor are read once (``cpu``). Everything else is a small function of these facts. So a test, or a
reader, can ask about another machine: ``usable_cores(Cpu(physical_cores=32, quota=4.0))``.
"""

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from math import floor
from pathlib import Path

import psutil
import torch

# Instruction sets for a dtype, by Linux's names; conversions alone (AVX-NE-CONVERT, F16C) do not count: sums would be
# float32's. And those that ONEDNN_MAX_CPU_ISA may leave oneDNN, of the ones that have dot products of it.
_NATIVE = {
    torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"}),
    torch.float16: frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}
_LIMITS = {torch.bfloat16: "BF16|FP16|AMX.*", torch.float16: "FP16|AMX.*"}


@dataclass(frozen=True)
class Cpu:
    """The processor, as far as this process may use it.

    Attributes:
        name: The product.
        features: Instruction sets, by Linux's names.
        logical_cores: The number of hardware threads that the process may run on (its affinity).
        physical_cores: The number of cores that these belong to; on Apple's processors, of the fast ones.
        quota: Cores' worth of time that the process's control group may use; None if there is no limit.
        onednn: Whether this torch has oneDNN, whose kernels need no rearranged copy of a packed weight.
        onednn_limit: The instruction set that ``ONEDNN_MAX_CPU_ISA`` holds oneDNN to; empty for none.
        omp_threads: ``OMP_NUM_THREADS``, if the user has set it.
    """

    name: str = "unknown"
    features: frozenset[str] = frozenset()
    logical_cores: int = 1
    physical_cores: int = 1
    quota: float | None = None
    onednn: bool = True
    onednn_limit: str = ""
    omp_threads: int | None = None


@cache
def cpu() -> Cpu:
    """Returns the facts of this machine, read at the first call; of those that cannot be read, the most cautious."""
    affinity = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    return Cpu(
        name=_cpu_name(), features=_features(), physical_cores=_physical_cores(affinity), quota=cgroup_quota(),
        logical_cores=len(affinity) if affinity else psutil.cpu_count() or 1,
        onednn=torch.backends.mkldnn.is_available(),
        onednn_limit=(os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper(),
        omp_threads=_positive(os.environ.get("OMP_NUM_THREADS", "")),
    )  # fmt: skip


def is_native(dtype: torch.dtype, device: torch.device, facts: Cpu | None = None) -> bool:
    """Returns whether torch has a device's own arithmetic for a floating dtype; others than CPUs and CUDA devices have.

    Without it, torch widens bfloat16 to float32 before every product: many rows take eight times as long on AVX2.
    """
    if device.type == "cuda" and dtype is torch.bfloat16:
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or dtype not in _NATIVE:
        return True
    facts, sufficient = facts or cpu(), rf"ALL|DEFAULT|AVX512_CORE_({_LIMITS[dtype]})|AVX10.*"
    allowed = not facts.onednn_limit or re.fullmatch(sufficient, facts.onednn_limit) is not None
    return facts.onednn and allowed and bool(facts.features & _NATIVE[dtype])


def dtype_name(dtype: torch.dtype) -> str:
    """Returns ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def usable_cores(facts: Cpu | None = None) -> int:
    """Return the number of physical cores that the process may use in full, at least one.

    Two hardware threads of a core share its multipliers. Threads beyond a control group's quota are stopped for most of
    every period, and the others wait for them. torch's own default does not know of quotas.
    """
    facts = facts or cpu()
    return max(1, facts.physical_cores if facts.quota is None else min(facts.physical_cores, floor(facts.quota)))


def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Returns how many cores' worth of time the process's control groups allow; None without a limit.

    They are mounted at ``root``, and listed in a file in lines ``id:controllers:path``.
    """
    limits = []
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root if not controllers else next((p for p in (root / controllers, root / "cpu") if p.is_dir()), root)
        # In a container the path may be the host's. A missing group limits nothing, and the root is always read.
        group = Path(path.lstrip("/"))
        limits += [_limit(base / each) for each in (group, *group.parents)]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: Path) -> float | None:
    """Returns one control group's limit, from the files of version 2 (``cpu.max``) or version 1."""
    words = _text(group / "cpu.max").split()
    if not words:
        words = [_text(group / "cpu.cfs_quota_us").strip(), _text(group / "cpu.cfs_period_us").strip()]
    quota, period = (_positive(word) for word in words) if len(words) == 2 else (None, None)
    return quota / period if quota and period else None  # "max" and -1 mean that there is none


def _physical_cores(affinity: frozenset[int], root: Path = Path("/sys/devices/system/cpu")) -> int:
    siblings = {_text(root / f"cpu{number}" / "topology" / "thread_siblings_list").strip() for number in affinity}
    if siblings and "" not in siblings:
        return len(siblings)
    fast = _positive(_sysctl("hw.perflevel0.physicalcpu"))
    cores = fast or psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    return min(cores, len(affinity)) if affinity else cores


def _features() -> frozenset[str]:
    """Returns the instruction sets by Linux's names, from all sources of the system and of torch that there are."""
    found: set[str] = set()
    info = re.search(r"^(?:flags|Features)\s*:(.*)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    if info:
        found.update(info[1].split())
    if platform.system() == "Darwin":
        named = {"FEAT_BF16": "bf16", "FEAT_FP16": "asimdhp"}
        found.update(name for key, name in named.items() if _sysctl(f"hw.optional.arm.{key}") == "1")
        found.update(_sysctl("machdep.cpu.leaf7_features").lower().split())
    # Both are private to torch and may disappear, but Windows has no other source.
    for name in ("avx2", "avx512", "avx512_bf16"):
        supported = getattr(torch.cpu, f"_is_{name}_supported", None)
        if supported is not None and supported():
            found.add({"avx512": "avx512f"}.get(name, name))
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        found.update(name for name, value in capabilities().items() if value is True)
    return frozenset(found)


def _cpu_name() -> str:
    # platform.processor() is empty or just "x86_64" on Linux.
    info = re.search(r"^model name\s*:(.*)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return (info[1].strip() if info else _sysctl("machdep.cpu.brand_string")) or platform.processor() or "unknown"


def _sysctl(name: str) -> str:
    """Returns a system value of macOS; empty on other systems and for unknown names."""
    if platform.system() != "Darwin":
        return ""
    try:
        return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _text(path: Path) -> str:
    """Returns a file's text; empty if the file does not exist or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _positive(word: str) -> int | None:
    return int(word) if word.isdecimal() and int(word) > 0 else None
