"""What a machine is said to compute fast, for machines that are not here, and the doctor's judgement of times."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from specdec import machine
from specdec.doctor import check as checking
from specdec.doctor.__main__ import check, main
from specdec.doctor.check import TOKENS, Times, Way, measure, verdicts
from specdec.doctor.findings import chosen, found
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
        (limited("AVX2"), False, False),
        (limited("AVX512_CORE"), False, False),
        (limited("AVX512_CORE_BF16"), True, False),
        (limited("AVX512_CORE_AMX"), True, True),
        (limited("ALL"), True, True),
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
        ("float16", CPU, False, "float32", "CPU"),
        ("bfloat16", CUDA, False, "float16", "GPU"),
        ("float16", CUDA, True, "float16", ""),
        ("float32", CPU, None, "float32", ""),
        ("float64", CUDA, None, "float64", ""),
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


ROOT = Path(__file__).parent.parent.parent
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip

CHOICE = Way(torch.float32, True, 2)
OTHER_DTYPE = Way(torch.bfloat16, True, 2)
PLAIN = Way(torch.float32, False, 2)
OTHER_PLAIN = Way(torch.bfloat16, False, 2)
MORE_THREADS = Way(torch.float32, True, 4)


def printed(*arguments: str) -> tuple[int, str]:
    stream = io.StringIO()
    return main(arguments, Console(file=stream, width=140, soft_wrap=True)), stream.getvalue()


def test_quick_shows_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.doctor.__main__.measure", None)  # it would not be callable
    code, text = printed("quick=true", "device=cpu")
    assert code == 0
    lines = text.splitlines()
    assert lines[0] == "found:" and "chosen:" in lines
    assert f"  torch: {torch.__version__}" in lines and "  device: cpu" in lines
    named = [line.split(":")[0].strip() for line in lines]
    for name in ("processor", "quota", "bfloat16", "oneDNN", "memory", "transformers", "threads", "attention"):
        assert named.count(name) == 1, name
    assert text.isascii(), "no frames and no colours where nobody looks at a terminal"


@pytest.mark.full
def test_it_is_a_command_that_needs_no_hydra() -> None:
    code = (
        "import sys, runpy; sys.modules['hydra'] = sys.modules['omegaconf'] = None; "
        "sys.argv[1:] = ['quick=true']; runpy.run_module('specdec.doctor', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("found:\n  processor: ")


def test_arguments_that_are_not_understood(capsys: pytest.CaptureFixture[str]) -> None:
    for argument in ("quick=yes", "quick", "fast=true", "device=tpu", "device=meta", ""):
        assert printed(argument) == (2, "")
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and "give" in error


def test_what_is_found_and_chosen_for_another_machine() -> None:
    avx2, held = frozenset({"avx2"}), frozenset({"avx512_bf16"})
    facts = Cpu(name="Some CPU", features=avx2, physical_cores=4, logical_cores=8, quota=2.5, onednn=False)
    rows = dict(found(facts))
    assert (rows["processor"], rows["oneDNN"]) == ("Some CPU", "none")
    assert rows["cores"].startswith("4, with 8 ") and rows["quota"].startswith("2.5 ")
    assert rows["bfloat16"] == rows["float16"] == "not native"
    rows = dict(chosen(CPU, facts, default_threads=8))
    assert rows["dtype, bfloat16 model"].startswith("auto: float32, because this CPU has no native bfloat16")
    assert rows["threads"] == "2 (torch by itself: 8)"
    rows = dict(found(Cpu(features=held, onednn_limit="AVX2")))
    assert rows["bfloat16"] == "not native: torch does not use avx512_bf16 here"
    assert rows["oneDNN"] == "yes, held to AVX2 by ONEDNN_MAX_CPU_ISA"
    assert dict(found(Cpu(features=held)))["bfloat16"] == "native (avx512_bf16)"
    assert dict(chosen(CPU, Cpu(features=held), default_threads=1))["dtype, bfloat16 model"].startswith("auto: bfloat1")


def test_times_of_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SIZES": TINY, "SECONDS": 0.0, "LEAST": 2}.items():
        monkeypatch.setattr(checking, name, value)
    before = torch.get_num_threads()
    compared = [Way(torch.float32, True, 1), Way(torch.bfloat16, False, 2)]
    times = measure(compared, CPU)
    assert list(times) == compared
    assert all(len(each) == len(TOKENS) and min(each) > 0 for each in times.values())
    assert torch.get_num_threads() == before


def test_a_machine_without_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "free_memory", lambda device: 1000)
    monkeypatch.setattr(checking, "SIZES", TINY)
    stream = io.StringIO()
    check(Console(file=stream, soft_wrap=True), CPU, default_threads=1)
    assert stream.getvalue().startswith("warning: nothing was measured: the check needs 0.0 GiB")
    assert stream.getvalue().endswith("or give quick=true\n")


@pytest.mark.parametrize(
    ("times", "right", "said"),
    [
        ({CHOICE: (1.0, 2.0), OTHER_DTYPE: (2.0, 8.0)}, True, "dtype: float32 takes 0.50 for 1 .* 0.25 .* of bfloat16"),
        ({CHOICE: (2.0, 8.0), OTHER_DTYPE: (1.0, 2.0)}, False, "dtype: .* 2.00 .* 4.00 .*: bfloat16 is the faster"),
        # Slower for one token and faster for eight: about as fast.
        ({CHOICE: (1.2, 0.8), PLAIN: (1.0, 1.0)}, True, "execution: packed and captured .* 1.20 .* 0.80 .* of plain"),
        ({CHOICE: (1.0, 1.0), MORE_THREADS: (0.5, 0.5)}, False, "threads: using 2 .*: torch's own 4 is the faster"),
    ],
)
def test_verdicts(times: Times, right: bool, said: str) -> None:
    (verdict,) = verdicts(times)
    assert (verdict.right, bool(re.search(said, verdict.text))) == (right, True), verdict.text
    assert verdicts({CHOICE: (1.0, 1.0), OTHER_PLAIN: (0.1, 0.1)}) == [], "ways that differ in two things say nothing"
