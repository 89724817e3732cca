"""What a machine is said to compute fast, for machines that are not here: facts are given."""

from pathlib import Path

import pytest
import torch

from specdec import machine
from specdec.machine import Cpu, choose_dtype

CPU = torch.device("cpu")
CUDA = torch.device("cuda")

LAPTOP = Cpu(features=frozenset({"avx2", "fma", "f16c"}), physical_cores=4, logical_cores=8)
AVX512 = Cpu(features=LAPTOP.features | {"avx512f", "avx512bw", "avx512_vnni"})
ZEN4 = Cpu(features=AVX512.features | {"avx512_bf16"})
SAPPHIRE_RAPIDS = Cpu(features=ZEN4.features | {"amx_bf16", "amx_tile", "avx512_fp16"})
GRAVITON3 = Cpu(features=frozenset({"asimd", "fphp", "asimdhp", "sve", "svebf16", "bf16"}))
RASPBERRY = Cpu(features=frozenset({"asimd", "crc32"}))
UNKNOWN = Cpu()


@pytest.mark.parametrize(
    ("facts", "bfloat16", "float16"),
    [
        (LAPTOP, False, False),
        (AVX512, False, False),
        (ZEN4, True, False),
        (SAPPHIRE_RAPIDS, True, True),
        (GRAVITON3, True, True),
        (RASPBERRY, False, False),
        (UNKNOWN, False, False),
        (Cpu(features=SAPPHIRE_RAPIDS.features, onednn=False), False, False),
        (Cpu(features=SAPPHIRE_RAPIDS.features, onednn_limit="AVX2"), False, False),
        (Cpu(features=SAPPHIRE_RAPIDS.features, onednn_limit="AVX512_CORE"), False, False),
        (Cpu(features=SAPPHIRE_RAPIDS.features, onednn_limit="AVX512_CORE_BF16"), True, False),
        (Cpu(features=SAPPHIRE_RAPIDS.features, onednn_limit="AVX512_CORE_AMX"), True, True),
        (Cpu(features=SAPPHIRE_RAPIDS.features, onednn_limit="ALL"), True, True),
    ],
    ids=lambda value: None if isinstance(value, Cpu) else str(value),
)
def test_native_arithmetic(facts: Cpu, bfloat16: bool, float16: bool) -> None:
    assert machine.native_bfloat16(facts) is bfloat16
    assert machine.native_float16(facts) is float16
    assert machine.is_native(torch.bfloat16, CPU, facts) is bfloat16
    assert machine.is_native(torch.float16, CPU, facts) is float16
    assert machine.is_native(torch.float32, CPU, facts) and machine.is_native(torch.float64, CPU, facts)


@pytest.mark.parametrize(
    ("checkpoint", "device", "native", "dtype", "reason"),
    [
        (torch.bfloat16, CPU, True, torch.bfloat16, "auto: bfloat16, as in the checkpoint"),
        (
            torch.bfloat16, CPU, False, torch.float32,
            "auto: float32, because this CPU has no native bfloat16 arithmetic (checkpoint: bfloat16)",
        ),
        (
            torch.float16, CPU, False, torch.float32,
            "auto: float32, because this CPU has no native float16 arithmetic (checkpoint: float16)",
        ),
        (
            torch.bfloat16, CUDA, False, torch.float16,
            "auto: float16, because this GPU has no native bfloat16 arithmetic (checkpoint: bfloat16)",
        ),
        (torch.float16, CUDA, True, torch.float16, "auto: float16, as in the checkpoint"),
        (torch.float32, CPU, None, torch.float32, "auto: float32, as in the checkpoint"),
        (torch.float64, CUDA, None, torch.float64, "auto: float64, as in the checkpoint"),
    ],
)  # fmt: skip
def test_auto_is_what_is_fast(
    checkpoint: torch.dtype, device: torch.device, native: bool | None, dtype: torch.dtype, reason: str
) -> None:
    choice = choose_dtype(checkpoint, device, native=native)
    assert (choice.dtype, choice.reason) == (dtype, reason)


@pytest.mark.parametrize("emulated", [False, True])
def test_a_gpu_is_asked_for_arithmetic_without_emulation(monkeypatch: pytest.MonkeyPatch, emulated: bool) -> None:
    class Here:
        def __init__(self, device: torch.device):
            assert device == CUDA

        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Here)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or not emulated
    )
    assert machine.is_native(torch.bfloat16, CUDA) is not emulated
    assert machine.is_native(torch.float16, CUDA)


@pytest.mark.parametrize(
    ("facts", "threads"),
    [
        (LAPTOP, 4),
        (Cpu(physical_cores=32, quota=4.0), 4),
        (Cpu(physical_cores=32, quota=3.5), 3),
        (Cpu(physical_cores=2, quota=16.0), 2),
        (Cpu(physical_cores=8, quota=0.5), 1),
        (Cpu(physical_cores=8, quota=2.0, omp_threads=6), 6),
        (UNKNOWN, 1),
    ],
    ids=lambda value: None if isinstance(value, Cpu) else str(value),
)
def test_recommended_threads(facts: Cpu, threads: int) -> None:
    assert machine.recommended_threads(facts) == threads


@pytest.mark.parametrize(
    ("facts", "packed_float32", "packed_bfloat16", "queries", "products"),
    [
        (LAPTOP, True, False, True, False),
        (ZEN4, True, True, True, True),
        (SAPPHIRE_RAPIDS, True, True, False, False),
        (Cpu(features=ZEN4.features, onednn=False), False, False, True, False),
        (Cpu(features=SAPPHIRE_RAPIDS.features, onednn_limit="AVX2"), True, False, True, False),
    ],
    ids=lambda value: None if isinstance(value, Cpu) else str(value),
)
def test_what_follows_for_kernels(
    facts: Cpu, packed_float32: bool, packed_bfloat16: bool, queries: bool, products: bool
) -> None:
    assert machine.prefers_packed(torch.float32, facts) is packed_float32
    assert machine.prefers_packed(torch.bfloat16, facts) is packed_bfloat16
    assert not machine.prefers_packed(torch.float16, facts)
    assert machine.bfloat16_queries_in_float32(facts) is queries
    assert machine.bfloat16_products_beat_sdpa(facts) is products


def groups(root: Path, own: str, **limits: str) -> float | None:
    """The quota with files of a control group file system: ``a__b__cpu.max`` stands for a/b/cpu.max."""
    for name, text in limits.items():
        file = root / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "own").write_text(own)
    return machine.cgroup_quota(root, root / "own")


def test_quotas_of_version_2(tmp_path: Path) -> None:
    found = groups(tmp_path, "0::/pod/job\n", pod__job__cpu_dot_max="max 100000\n", pod__cpu_dot_max="250000 100000\n")
    assert found == 2.5
    assert groups(tmp_path, "0::/pod/job\n", pod__job__cpu_dot_max="100000 200000\n") == 0.5
    assert groups(tmp_path, "0::/other\n") is None


def test_quotas_of_version_1(tmp_path: Path) -> None:
    own = "5:memory:/job\n4:cpu,cpuacct:/job\n0::/\n"
    folder = "cpu,cpuacct__job__"
    limits = {f"{folder}cpu.cfs_quota_us": "300000\n", f"{folder}cpu.cfs_period_us": "100000\n"}
    assert groups(tmp_path, own, **limits) == 3.0
    assert groups(tmp_path, own, **{f"{folder}cpu.cfs_quota_us": "-1\n"}) is None


def test_hardware_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    for number, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        file = tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(siblings + "\n")
    assert machine._physical_cores(frozenset({0, 1, 2, 3}), tmp_path) == 2
    assert machine._physical_cores(frozenset({0, 2}), tmp_path) == 1
    assert machine._physical_cores(frozenset({0, 1}), tmp_path) == 2


def test_this_machine_is_read_without_fail() -> None:
    facts = machine.cpu()
    assert 1 <= facts.physical_cores <= facts.logical_cores
    assert facts.name and facts.features
    assert machine.cpu() is facts
    if torch.cpu._is_avx512_bf16_supported():  # another source than the one that names the features
        assert "avx512_bf16" in facts.features
    assert machine.recommended_threads() >= 1
