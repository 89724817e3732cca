"""What a machine is said to compute fast, for machines that are not here."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec import machine
from specdec.machine import Cpu, choose_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

LAPTOP = Cpu(features=frozenset({"avx2", "fma", "f16c"}), physical_cores=4, logical_cores=8)
AVX512 = Cpu(features=LAPTOP.features | {"avx512f", "avx512bw", "avx512_vnni"})
ZEN4 = Cpu(features=AVX512.features | {"avx512_bf16"})
SAPPHIRE_RAPIDS = Cpu(features=ZEN4.features | {"amx_bf16", "amx_tile", "avx512_fp16"})
GRAVITON3 = Cpu(features=frozenset({"asimd", "fphp", "asimdhp", "sve", "svebf16", "bf16"}))
RASPBERRY = Cpu(features=frozenset({"asimd", "crc32"}))
UNKNOWN = Cpu()


def limited(onednn_limit: str) -> Cpu:
    return Cpu(features=SAPPHIRE_RAPIDS.features, onednn_limit=onednn_limit)


def test_native_arithmetic() -> None:
    """bfloat16, then float16; and what oneDNN is held to counts."""
    for facts, bfloat16, float16 in (
        (LAPTOP, False, False),
        (AVX512, False, False),
        (ZEN4, True, False),
        (SAPPHIRE_RAPIDS, True, True),
        (GRAVITON3, True, True),
        (RASPBERRY, False, False),
        (UNKNOWN, False, False),
        (Cpu(features=SAPPHIRE_RAPIDS.features, onednn=False), False, False),
        (limited("AVX512_CORE"), False, False),
        (limited("AVX512_CORE_BF16"), True, False),
        (limited("AVX512_CORE_AMX"), True, True),
    ):
        found = machine.native_bfloat16(facts), machine.native_float16(facts)
        assert found == (bfloat16, float16), facts
        native = [machine.is_native(dtype, CPU, facts) for dtype in (torch.bfloat16, torch.float16)]
        assert native == [bfloat16, float16], facts
        assert machine.is_native(torch.float32, CPU, facts) and machine.is_native(torch.float64, CPU, facts)


@pytest.mark.parametrize(
    ("checkpoint", "device", "native", "dtype", "lacking"),
    [
        ("bfloat16", CPU, True, "bfloat16", ""),
        ("bfloat16", CPU, False, "float32", "CPU"),
        ("bfloat16", CUDA, False, "float16", "GPU"),
        ("float16", CUDA, True, "float16", ""),
        ("float32", CPU, None, "float32", ""),
    ],
)
def test_auto_is_what_is_fast(
    checkpoint: str, device: torch.device, native: bool | None, dtype: str, lacking: str
) -> None:
    choice = choose_dtype(getattr(torch, checkpoint), device, native=native)
    why = f"because this {lacking} has no native {checkpoint} arithmetic (checkpoint: {checkpoint})"
    reason = f"auto: {dtype}, " + (why if lacking else "as in the checkpoint")
    assert (choice.dtype, choice.reason) == (getattr(torch, dtype), reason)


def test_cores_that_a_process_may_use() -> None:
    for facts, cores in (
        (LAPTOP, 4),
        (Cpu(physical_cores=32, quota=4.0), 4),
        (Cpu(physical_cores=32, quota=3.5), 3),
        (Cpu(physical_cores=2, quota=16.0), 2),
        (Cpu(physical_cores=8, quota=0.5), 1),
        (UNKNOWN, 1),
    ):
        assert machine.usable_cores(facts) == cores, facts


def quota(root: Path, own: str, **limits: str) -> float | None:
    """The quota with files of a control group file system: ``a__b__cpu.max`` stands for a/b/cpu.max."""
    for name, text in limits.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "own").write_text(own)
    return machine.cgroup_quota(root, root / "own")


def test_quotas_of_control_groups(tmp_path: Path) -> None:
    two, one = tmp_path / "2", tmp_path / "1"
    limits = {"pod__job__cpu.max": "max 100000\n", "pod__cpu.max": "250000 100000\n"}
    assert quota(two, "0::/pod/job\n", **limits) == 2.5
    assert quota(two, "0::/pod/job\n", **{"pod__job__cpu.max": "100000 200000\n"}) == 0.5
    assert quota(two, "0::/other\n") is None
    own, folder = "5:memory:/job\n4:cpu,cpuacct:/job\n0::/\n", "cpu,cpuacct__job__"
    limits = {f"{folder}cpu.cfs_quota_us": "300000\n", f"{folder}cpu.cfs_period_us": "100000\n"}
    assert quota(one, own, **limits) == 3.0
    assert quota(one, own, **{f"{folder}cpu.cfs_quota_us": "-1\n"}) is None


def test_this_machine_is_read_without_fail() -> None:
    facts = machine.cpu()
    assert 1 <= facts.physical_cores <= facts.logical_cores
    assert facts.name and facts.features
    assert machine.cpu() is facts
    if torch.cpu._is_avx512_bf16_supported():  # another source than the one that names the features
        assert "avx512_bf16" in facts.features
    assert machine.usable_cores() >= 1


@pytest.mark.full
def test_the_table_is_a_command_that_needs_no_hydra() -> None:
    code = (
        "import sys, runpy; sys.modules['hydra'] = sys.modules['omegaconf'] = None; "
        "runpy.run_module('specdec.doctor', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"processor: {machine.cpu().name}\n") and f"torch {torch.__version__}" in done.stdout
