"""The doctor: what it prints, and how it judges times. The times here are made up, or of a model too small to judge."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from specdec import machine
from specdec.doctor import check as checking
from specdec.doctor.__main__ import check, main, report
from specdec.doctor.check import TOKENS, Times, Verdict, Way, measure, verdicts, ways
from specdec.doctor.findings import chosen, found
from specdec.machine import Cpu

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip

CHOICE = Way(torch.float32, True, 2)
OTHER_DTYPE = Way(torch.bfloat16, True, 2)
PLAIN = Way(torch.float32, False, 2)
OTHER_PLAIN = Way(torch.bfloat16, False, 2)
MORE_THREADS = Way(torch.float32, True, 4)


def printed(*arguments: str, terminal: bool = False) -> tuple[int, str]:
    stream = io.StringIO()
    code = main(arguments, Console(file=stream, force_terminal=terminal, width=140, soft_wrap=True))
    return code, stream.getvalue()


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


@pytest.mark.parametrize("argument", ["quick=yes", "quick", "fast=true", "device=tpu", "device=meta", ""])
def test_arguments_that_are_not_understood(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = printed(argument)
    assert (code, text) == (2, "")
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "give" in error


def test_what_is_found_of_another_machine() -> None:
    facts = Cpu(
        name="Some CPU", features=frozenset({"avx2"}), physical_cores=4, logical_cores=8, quota=2.5, onednn=False
    )
    rows = dict(found(facts))
    assert rows["processor"] == "Some CPU"
    assert rows["cores"] == "4, with 8 hardware threads that this process may use"
    assert rows["quota"] == "2.5 cores' worth of time"
    assert rows["bfloat16"] == rows["float16"] == "not native" and rows["oneDNN"] == "none"
    held = dict(found(Cpu(features=frozenset({"avx512_bf16"}), onednn_limit="AVX2")))
    assert held["bfloat16"] == "not native: torch does not use avx512_bf16 here"
    assert held["oneDNN"] == "yes, held to AVX2 by ONEDNN_MAX_CPU_ISA"
    assert dict(found(Cpu(features=frozenset({"avx512_bf16"}))))["bfloat16"] == "native (avx512_bf16)"


def test_what_is_chosen_for_another_machine() -> None:
    rows = dict(chosen(CPU, Cpu(features=frozenset({"avx2"}), physical_cores=4, quota=2.5), default_threads=8))
    assert rows["dtype, bfloat16 model"] == (
        "auto: float32, because this CPU has no native bfloat16 arithmetic (checkpoint: bfloat16)"
    )
    assert rows["threads"] == "2 (torch by itself: 8)"
    rows = dict(chosen(CPU, Cpu(features=frozenset({"avx512_bf16"})), default_threads=1))
    assert rows["dtype, bfloat16 model"] == "auto: bfloat16, as in the checkpoint"


@pytest.mark.parametrize(("facts", "first"), [(Cpu(features=frozenset({"avx512_bf16"})), torch.bfloat16),
                                              (Cpu(features=frozenset({"avx2"})), torch.float32)])  # fmt: skip
def test_the_choice_is_compared_with_every_other(
    monkeypatch: pytest.MonkeyPatch, facts: Cpu, first: torch.dtype
) -> None:
    monkeypatch.setattr(machine, "cpu", lambda: facts)
    other = torch.float32 if first is torch.bfloat16 else torch.bfloat16
    assert ways(CPU, default_threads=1) == [
        Way(first, True, 1), Way(other, True, 1), Way(first, False, 1), Way(other, False, 1),
    ]  # fmt: skip
    assert ways(CPU, default_threads=6)[4:] == [Way(first, True, 6)]


def test_times_of_every_way() -> None:
    before = torch.get_num_threads()
    compared = [Way(torch.bfloat16, True, 1), Way(torch.float32, True, 1), Way(torch.float32, False, 2)]
    times = measure(compared, CPU, sizes=TINY, seconds=0.0, least=2)
    assert list(times) == compared
    assert all(len(each) == len(TOKENS) and min(each) > 0 for each in times.values())
    assert torch.get_num_threads() == before


def test_a_machine_without_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "free_memory", lambda device: 1000)
    stream = io.StringIO()
    monkeypatch.setattr(checking, "SIZES", TINY)
    check(Console(file=stream, soft_wrap=True), CPU, default_threads=1)
    assert stream.getvalue().startswith("warning: nothing was measured: the check needs 0.0 GiB")
    assert stream.getvalue().endswith("or give quick=true\n")


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (
            {CHOICE: (1.0, 2.0), OTHER_DTYPE: (2.0, 8.0)},
            [Verdict(True, "dtype: float32 takes 0.50 for 1 token and 0.25 for 8 tokens of the time of bfloat16, "
                           "the right choice here")],
        ),
        (
            {CHOICE: (2.0, 8.0), OTHER_DTYPE: (1.0, 2.0)},
            [Verdict(False, "dtype: float32 takes 2.00 for 1 token and 4.00 for 8 tokens of the time of bfloat16, "
                            "the wrong choice here: bfloat16 is the faster")],
        ),
        (  # slower for one token and faster for eight: about as fast
            {CHOICE: (1.2, 0.8), PLAIN: (1.0, 1.0)},
            [Verdict(True, "execution: packed and captured takes 1.20 for 1 token and 0.80 for 8 tokens of the time "
                           "of plain, the right choice here")],
        ),
        (
            {CHOICE: (1.0, 1.0), MORE_THREADS: (0.5, 0.5)},
            [Verdict(False, "threads: using 2 takes 2.00 for 1 token and 2.00 for 8 tokens of the time of torch's "
                            "own 4, the wrong choice here: torch's own 4 is the faster")],
        ),
        # What differs in two things says nothing of either.
        ({CHOICE: (1.0, 1.0), OTHER_PLAIN: (0.1, 0.1)}, []),
    ],
)  # fmt: skip
def test_verdicts(times: Times, expected: list[Verdict]) -> None:
    assert verdicts(times) == expected


def test_a_wrong_choice_is_a_warning() -> None:
    stream = io.StringIO()
    times = {CHOICE: (0.002, 0.008), OTHER_DTYPE: (0.001, 0.002), PLAIN: (0.004, 0.016)}
    report(Console(file=stream, soft_wrap=True), times)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "measured: milliseconds of a forward of 1 and 8 tokens:"
    assert lines[1] == "  float32, packed and captured, 2 threads: 2.00 and 8.00"
    assert lines[-2].startswith("warning: dtype: float32 takes") and lines[-1].startswith("ok: execution: ")
