"""The four parts for a GPU, rehearsed on a CPU: what they find and refuse, and that nothing is lost or lacking."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.bench.gpu import measure, outcome, run, smoke, tests
from experiments.bench.gpu.drafters import DRAFTERS
from experiments.bench.gpu.expected import EXPECTED, judged
from experiments.bench.gpu.kernels import kind_of
from experiments.bench.gpu.outcome import Outcome, file_of
from specdec.execution.recorder import Recordings, TapeRecorder

HIDDEN = """
import importlib.machinery

hidden = ("hydra", "omegaconf", "wandb", "beartype", "pandas", "pyarrow", "accelerate", "torchao", "llama_cpp", "vllm")
find = importlib.machinery.PathFinder.find_spec
class Find:
    def __call__(self, name, *more):
        return None if name.split(".")[0] in hidden else find(name, *more)
importlib.machinery.PathFinder.find_spec = Find()
"""
"""Hides what the GPU's machine has not, in every Python process that finds this as ``sitecustomize``."""


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the packages that a machine for measurements need not have."""
    (folder / "sitecustomize.py").write_text(HIDDEN)
    more = {"PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # hydra brings a plugin of pytest
    return subprocess.run(
        [sys.executable, *words], cwd=outcome.ROOT, env=os.environ | more, capture_output=True, text=True
    )


def play(out: Path, *words: str) -> int:
    """The exit code of a rehearsed part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpu", f"out={out}", "device=cpu", *words])
        with pytest.raises(SystemExit) as ended:
            run.main()
    return int(ended.value.code or 0)


def results(out: Path, part: int) -> dict[str, Any]:
    return json.loads(file_of(out, part).read_text())


def test_every_module_is_imported_without_the_packages_of_the_experiments(tmp_path: Path) -> None:
    names = [f"experiments.bench.gpu.{path.stem}" for path in Path(run.__file__).parent.glob("[a-z]*.py")]
    code = f"import {', '.join(names)}, sys; assert not {{'hydra', 'wandb', 'pandas'}} & set(sys.modules)"
    done = command(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_rehearsal_of_all_parts(tmp_path: Path) -> None:
    done = command(tmp_path, "-m", "experiments.bench", "gpu", f"out={tmp_path}", "device=cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    for part, name in outcome.PARTS.items():
        found = results(tmp_path, part)
        assert found["ended"] and not found["red"] and found["versions"]["torch"] and found["seconds"] > 0
        missing = {each["figure"] for each in found["expected"] if each["found"] is None}
        assert missing <= {"fp8", "passed"}, f"{name} has no figure of {missing}"
    measured = results(tmp_path, 2)
    assert [each["item"] for each in measured["items"]] == list(run.ITEMS) == list(measure.ITEMS)
    assert [each["what"] for each in measured["left_out"]] == ["products in fp8"], "a CPU has no fp8, and all else"
    assert len(results(tmp_path, 1)["drafters"]) == len(DRAFTERS) == 8
    stages = {(each["method"], each["stage"]) for each in results(tmp_path, 4)["kernels"]}
    assert {("eagle3", "draft"), ("eagle3", "verify"), ("plain", "judge")} <= stages
    assert "test_one_synchronization_per_round" in (tmp_path / "3-tests.log").read_text()


class Stale(TapeRecorder):
    """Hands out the outputs of the first time again, as graphs do that others have written over."""

    def record(self, name: str, *given: Any) -> Any:
        recording, outputs = super().record(name, *given)
        kept = [each.clone() for each in outputs]

        def replay(*inputs: Tensor) -> Sequence[Tensor]:
            assert recording is not None
            recording(*inputs)
            return kept

        return (replay if name == "judge" else recording), outputs


class Refusing(TapeRecorder):
    """Records no forward, as a graph that meets a read by the host."""

    def record(self, name: str, *given: Any) -> Any:
        if name == "verify":
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(name, *given)


def forgetful(self: Recordings, *given: Any, **options: Any) -> Any:
    """Drops all recordings whenever anything comes, as an engine whose target seems to change."""
    self.clear()
    return unchanged(self, *given, **options)


unchanged = Recordings.run


@pytest.mark.parametrize("mutant", [None, Stale, Refusing, forgetful], ids=["none", "stale", "refusing", "forgetful"])
def test_the_smoke_test_is_red_where_recordings_are_wrong(
    mutant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(smoke, "DRAFTERS", {"chain": DRAFTERS["chain"]})
    if mutant is forgetful:
        monkeypatch.setattr(Recordings, "run", forgetful)
    elif mutant is not None:
        monkeypatch.setattr("specdec.engine.rounds.TapeRecorder", mutant)
    code = play(tmp_path, "part=1")
    missed = {each["figure"] for each in results(tmp_path, 1)["expected"] if each["met"] is False}
    wanted = {None: set(), Stale: {"different"}, Refusing: {"refused", "replayed"}, forgetful: {"replayed"}}[mutant]
    assert wanted <= missed <= wanted | ({"failed", "different", "replayed"} if mutant is Stale else set())
    assert code == bool(wanted)
    assert ("error: part 1 is red" in capsys.readouterr().err) == bool(wanted)


def test_nothing_goes_on_behind_a_red_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken_off(outcome: Outcome) -> None:
        outcome.add("drafters", drafter="ngram")
        raise KeyboardInterrupt

    monkeypatch.setattr(smoke, "run", broken_off)
    with pytest.raises(KeyboardInterrupt):
        run.play(run.Options(part=1, out=tmp_path, device="cpu"), 1)
    found = results(tmp_path, 1)
    assert found["drafters"] == [{"drafter": "ngram"}] and found["red"] and not found["ended"]
    assert "did not come to its end" in capsys.readouterr().out
    assert play(tmp_path, "part=2", "only=[peaks]") == 1
    assert "error: part 1 is red in" in capsys.readouterr().err and not file_of(tmp_path, 2).exists()
    assert play(tmp_path, "part=2", "only=[peaks]", "force=true") == 0
    assert results(tmp_path, 2)["peaks"][0]["copy"] > 0


def test_an_item_that_fails_is_left_out_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(measure, "ITEMS", {"steps": (1, fails), "peaks": measure.ITEMS["peaks"]})
    assert play(tmp_path, "part=2", "only=[steps,peaks]") == 0
    found = results(tmp_path, 2)
    assert found["left_out"] == [{"what": "steps", "why": "OutOfMemoryError: CUDA out of memory."}] and found["peaks"]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "part=1"])
    with pytest.raises(SystemExit):
        run.main()
    assert "sees no GPU here: device=cpu rehearses" in capsys.readouterr().err
    monkeypatch.setattr(run, "NEEDED", ("torch", "no_such_module"))
    with pytest.raises(SystemExit):
        run.main()
    assert "error: no_such_module not installed" in capsys.readouterr().err


def test_figures_are_judged_by_the_bounds_of_their_gpu() -> None:
    def met(part: str, figure: str, value: float, device: str, *, rehearsal: bool = False) -> bool | None:
        rows = judged(part, {figure: value}, device, rehearsal=rehearsal)
        return next(each["met"] for each in rows if each["figure"] == figure)

    assert met("measure", "plain", 5.0, "NVIDIA H100 80GB HBM3") is True
    assert met("measure", "plain", 5.0, "NVIDIA H200") is False
    assert met("measure", "plain", 5.0, "NVIDIA A100") is None, "nobody has said what it must reach"
    assert (
        met("measure", "kernels", 15, "NVIDIA A100") is True and met("measure", "kernels", 15.1, "NVIDIA A100") is False
    )
    assert met("measure", "kernels", 41, "AMD EPYC", rehearsal=True) is None
    assert met("smoke", "replayed", 0.79, "AMD EPYC", rehearsal=True) is False
    for part in EXPECTED:
        assert len({each.figure for each in EXPECTED[part]}) == len(EXPECTED[part])


def test_results_are_read_from_the_lines_of_many_processes_and_of_one() -> None:
    log = """
[gw3] [ 12%] PASSED tests/test_gpu_attention.py::test_the_kernel[one node, decoding]
[gw11] [ 13%] FAILED tests/test_gpu.py::test_a[x]
tests/gpu/test_alone.py::test_graphs_take PASSED [100%]
tests/gpu/test_alone.py::test_two gpus SKIPPED (needs two GPUs) [ 50%]
FAILED tests/test_gpu.py::test_a[x] - AssertionError: assert 1 == 2
"""
    assert tests.results_of(log) == {
        "tests/test_gpu_attention.py::test_the_kernel[one node, decoding]": "PASSED",
        "tests/test_gpu.py::test_a[x]": "FAILED",
        "tests/gpu/test_alone.py::test_graphs_take": "PASSED",
        "tests/gpu/test_alone.py::test_two gpus": "SKIPPED",
    }
    assert tests.ALONE in tests.gpu_tests() and "tests/test_gpu.py" in tests.gpu_tests()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "products"),
        ("_product", "products"),
        ("attend_piece", "attention"),
        ("void at::native::radixSortKVInPlace<2, -1, 16>", "sorts"),
        ("void at::native::elementwise_kernel<128, 4>", "the rest"),
    ],
)
def test_kernels_are_sorted_by_what_they_are_for(name: str, kind: str) -> None:
    assert kind_of(name) == kind
