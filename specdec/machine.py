"""Finds out what this machine computes fast, from what it says about itself.

Facts about the processor are read once (``cpu``). Everything else is a small function of these facts. So a test, or a
reader, can ask about another machine: ``native_bfloat16(Cpu(features=frozenset({"avx2"})))``.
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

# Names as Linux prints them. Conversions alone (AVX-NE-CONVERT, F16C) do not count: sums would still be float32's.
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
_FLOAT16 = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})

# The instruction sets that ONEDNN_MAX_CPU_ISA may leave oneDNN, of those that have dot products of bfloat16.
_ONEDNN_BFLOAT16 = re.compile(r"ALL|DEFAULT|AVX512_CORE_(BF16|FP16|AMX.*)|AVX10.*")
_ONEDNN_FLOAT16 = re.compile(r"ALL|DEFAULT|AVX512_CORE_(FP16|AMX.*)|AVX10.*")


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


@dataclass(frozen=True)
class DtypeChoice:
    """A dtype, and why it is that one: ``auto: float32, …``, for the heading of a table."""

    dtype: torch.dtype
    reason: str


@cache
def cpu() -> Cpu:
    """Returns the facts of this machine, read at the first call; of those that cannot be read, the most cautious."""
    affinity = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    return Cpu(
        name=_cpu_name(),
        features=_features(),
        logical_cores=len(affinity) if affinity else psutil.cpu_count() or 1,
        physical_cores=_physical_cores(affinity),
        quota=cgroup_quota(),
        onednn=torch.backends.mkldnn.is_available(),
        onednn_limit=(os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper(),
        omp_threads=_positive(os.environ.get("OMP_NUM_THREADS", "")),
    )


def native_bfloat16(facts: Cpu | None = None) -> bool:
    """Returns whether the CPU multiplies bfloat16 itself, and torch has kernels that use this.

    Otherwise bfloat16 is widened to float32 before every product and rounded after it. This costs more than the saved
    memory traffic brings: on an AVX2 processor a 110M Llama decodes 19.6 tokens/s in bfloat16 and 28.1 in float32.
    """
    return _native(facts or cpu(), _BFLOAT16, _ONEDNN_BFLOAT16)


def native_float16(facts: Cpu | None = None) -> bool:
    """Returns whether the CPU multiplies float16 itself, and torch has kernels that use this."""
    return _native(facts or cpu(), _FLOAT16, _ONEDNN_FLOAT16)


def _native(facts: Cpu, features: frozenset[str], sufficient: re.Pattern[str]) -> bool:
    allowed = not facts.onednn_limit or sufficient.fullmatch(facts.onednn_limit) is not None
    return facts.onednn and allowed and bool(facts.features & features)


def is_native(dtype: torch.dtype, device: torch.device, facts: Cpu | None = None) -> bool:
    """Returns whether a device has native arithmetic for a floating dtype; others than CPUs and CUDA devices have."""
    if device.type == "cuda" and dtype is torch.bfloat16:
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        return (native_bfloat16 if dtype is torch.bfloat16 else native_float16)(facts)
    return True


def choose_dtype(checkpoint: torch.dtype, device: torch.device, *, native: bool | None = None) -> DtypeChoice:
    """Returns the dtype that ``dtype="auto"`` means for a checkpoint of a dtype on a device, and why.

    ``native`` says whether the device has native arithmetic for that dtype; None asks the device.
    """
    stored = dtype_name(checkpoint)
    if is_native(checkpoint, device) if native is None else native:
        return DtypeChoice(checkpoint, f"auto: {stored}, as in the checkpoint")
    # A GPU without bfloat16 has float16, at half the memory of float32. A CPU keeps all of the checkpoint's digits.
    dtype = torch.float16 if device.type == "cuda" and checkpoint is torch.bfloat16 else torch.float32
    reason = f"because this {'GPU' if device.type == 'cuda' else 'CPU'} has no native {stored} arithmetic"
    return DtypeChoice(dtype, f"auto: {dtype_name(dtype)}, {reason} (checkpoint: {stored})")


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
