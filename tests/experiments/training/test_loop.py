"""Interrupted trainings end as uninterrupted ones do; a loss that is not finite stops them."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.eagle import TrainedEagle3
from drafters.heads.training import TargetStates, TextBatch
from experiments.commands import train as commands_train
from experiments.results.manifest import ROOT
from experiments.train import train
from experiments.training import loop
from experiments.training.comparison import Comparison
from experiments.training.data.document import Document
from experiments.training.data.packing import Rows
from experiments.training.fitting import FitConfig
from experiments.training.loop import LOG, Training, newest_checkpoint
from experiments.training.losses import ForwardKL
from experiments.training.states import NAME, FrozenTarget, StoredTarget
from experiments.training.weights import Power
from specdec.target.target import Target
from tests.experiments.conftest import VOCAB_SIZE
from tests.experiments.runs import Configure


def saved_state(folder: Path, step: int = 12) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / f"step-{step:08d}.pt", weights_only=True)


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(equal, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


@pytest.mark.parametrize("stop", [6, pytest.param(8, marks=pytest.mark.full)])
def test_a_resumed_training_ends_as_the_uninterrupted_one(stop: int, training, tmp_path, monkeypatch) -> None:
    """Ended by SIGTERM, which saves a checkpoint, where it is measured next, and right after a checkpoint."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(training(f"out={whole}"))
    step, handler = Training._step, signal.getsignal(signal.SIGTERM)

    def interrupted(self: Training, number: int) -> None:
        if number == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(training(f"out={parts}"))
    assert newest_checkpoint(parts / "checkpoints").name == f"step-{stop:08d}.pt"
    assert signal.getsignal(signal.SIGTERM) is handler
    train(training(f"out={parts}", "resume=true"))
    assert equal(saved_state(parts), saved_state(whole))
    for name in (LOG, "best/model.safetensors", "last/model.safetensors"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize(("native", "taken"), [(False, "float32"), (True, "auto")])
def test_a_training_takes_float32_where_16_bits_are_slow(native, taken, configure, monkeypatch, tmp_path) -> None:
    """Decoding keeps the checkpoint's dtype there, by products of this project's C, which have no gradients."""
    monkeypatch.setattr(commands_train, "is_native", lambda *given: native)
    config = configure("train", "head=eagle3", "target.dtype=auto", f"out={tmp_path}", "fit.steps=0")
    with pytest.raises(ValueError, match="steps"):
        train(config)
    assert config.target.dtype == taken


@pytest.mark.parametrize("slow", ["no", "bf16"])
def test_the_faster_precision_is_measured_and_kept(slow: str, training: Configure, tmp_path: Path, monkeypatch) -> None:
    """Measuring changes no weight, and a training that goes on does not measure again."""
    forward, now, seen = Comparison.forward, [0.0], []

    def timed(self: Comparison, *arguments: Any) -> Any:
        seen.append("bf16" if torch.is_autocast_enabled("cpu") else "no")
        now[0] += 2.0 if seen[-1] == slow else 1.0
        return forward(self, *arguments)

    monkeypatch.setattr(Comparison, "forward", timed)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    faster, short = ("bf16" if slow == "no" else "no"), ["served.prompts=0", "fit.steps=4", "evaluate_every=4"]
    train(training("mixed_precision=auto", *short))
    assert set(seen[4:]) == {faster}
    train(training(f"out={tmp_path / 'fixed'}", *short, f"mixed_precision={faster}"))
    weights = [(tmp_path / name / "last" / "model.safetensors").read_bytes() for name in ("out", "fixed")]
    assert weights[0] == weights[1]
    assert json.loads((tmp_path / "out/last/training.json").read_text())["mixed_precision"] == faster
    seen.clear()
    train(training("mixed_precision=auto", "resume=true", *short))
    assert set(seen) <= {faster}


def test_a_loss_that_is_not_finite_stops_and_names_the_batch(training, tmp_path, monkeypatch) -> None:
    forward, calls = Comparison.forward, []

    def poisoned(self: Comparison, *arguments: Any) -> Any:
        loss, places = forward(self, *arguments)
        calls.append(torch.is_grad_enabled())
        return loss * (float("nan") if calls.count(True) == 6 else 1.0), places

    monkeypatch.setattr(Comparison, "forward", poisoned)
    message = r"the loss is nan in step 6, on rows \[.*\] \(.*\.txt.*step-00000004\.pt"
    with pytest.raises(loop.DivergedError, match=message):
        train(training())
    assert all(value.isfinite().all() for value in saved_state(tmp_path / "out", 4)["head"].values())
    assert not (tmp_path / "out" / "checkpoints" / "step-00000008.pt").exists()


def test_parts_of_a_batch_give_the_gradient_of_the_whole(training: Configure, tmp_path: Path) -> None:
    """Rows of unequal length, one at a time or together, and logits in pieces or at once: the same weights."""
    for name, more in (("a", []), ("b", ["fit.micro_batch=1", "fit.chunk=7"])):
        given = ["served.prompts=0", "fit.steps=3", "fit.muon_lr=null"]  # Muon rounds gradients to bfloat16
        train(training(f"out={tmp_path / name}", *given, *more))
    whole, parts = (saved_state(tmp_path / name, 3)["head"] for name in "ab")
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("by", ["served_length", "expected_length"])
def test_the_best_weights_are_kept_and_another_training_is_refused(by, training, tmp_path, monkeypatch, capsys) -> None:
    """The greatest length decides: the expected one, against the served one, where there is one."""
    figures = iter([{"served_length": 9.0 - length, by: length} for length in (1.5, 2.5, 2.0)])
    monkeypatch.setattr(commands_train, "served", lambda *_, **__: next(figures))
    train(training("evaluate_every=4"))
    best, last = (json.loads((tmp_path / "out" / name / "training.json").read_text()) for name in ("best", "last"))
    assert (best["step"], best["figures"][by], last["step"]) == (8, 2.5, 12)
    assert f"(best so far by {by.partition('_')[0]} length)" in "".join(capsys.readouterr())
    for more, message in (
        ([], "another training: give another out"),
        (["fit.lr=0.5", "resume=true"], r"had fit\.lr=0\.01, and this one has fit\.lr=0\.5"),
        (["resume=true", f"out={tmp_path / 'elsewhere'}"], r"resume=true: there is no training in .*elsewhere"),
    ):
        with pytest.raises(ValueError, match=message):
            train(training("evaluate_every=4", *more))


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        loop.save_checkpoint(tmp_path, step, {"step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002.pt", "step-00000003.pt"]

    def half(path: Path) -> None:
        (path / "a" if path.is_dir() else path).write_text("half")
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda state, path: half(path))
        with pytest.raises(OSError, match="no space"):
            loop.save_checkpoint(tmp_path, 4, {"step": 4})
    assert torch.load(newest_checkpoint(tmp_path), weights_only=True) == {"step": 3}

    loop.write_folder(tmp_path / "best", lambda folder: (folder / "a").write_text("1"))
    with pytest.raises(OSError, match="no space"):
        loop.write_folder(tmp_path / "best", half)
    assert (tmp_path / "best" / "a").read_text() == "1"
    loop.write_folder(tmp_path / "best", lambda folder: (folder / "b").write_text("2"))
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["b"]


def test_the_learning_rate_rises_and_falls() -> None:
    def factors(steps: int, at: Iterable[int], decay: str = "linear") -> list[float]:
        return [FitConfig(steps=steps, batch_size=1, length=8, lr=1.0, warmup=4, decay=decay).factor(n) for n in at]

    assert factors(10, (0, 3, 6, 9)) == [0.25, 1.0, 4 / 7, 1 / 7]
    assert factors(10, [3], "cosine") == [1.0] and factors(10, [9], "cosine")[0] < 0.06
    assert factors(16, (11, 12, 14, 15), "late") == [1.0, 1.0, 0.5, 0.25]
    assert factors(16, range(13), "late") == factors(24, range(13), "late"), "its length may be chosen late"


def in_two_processes(given: list[str], out: Path, *program: str) -> subprocess.CompletedProcess[str]:
    """Trains on CPUs; by another program than the command if one is given."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launch, *(program or ("-m", "experiments.train")), *given, f"out={out}", f"hydra.run.dir={out}-hydra"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.full
@pytest.mark.parametrize("way", ["DDP", "FSDP"])
def test_two_processes_train_as_one(way: str, configure: Configure, tiny_training: list[str], tmp_path: Path) -> None:
    """Each takes half of a batch, in which documents are of unequal length: the same weights, the same figures.

    With FSDP each keeps a part of the head; the target's states come from a disk then.
    """
    given = [*tiny_training, "evaluate_every=4", "served.prompts=1", "fit.steps=4"]
    given += ["fit.muon_lr=null"] if way == "FSDP" else []
    train(configure("train", *given, f"out={tmp_path / '1'}"))
    sharded = ["sharded=true", f"states={tmp_path / 'states'}"] if way == "FSDP" else []
    done = in_two_processes([*given, *sharded], tmp_path / "2")
    assert done.returncode == 0, done.stderr[-3000:]
    logs = [[json.loads(line) for line in (tmp_path / each / LOG).read_text().splitlines()] for each in "12"]
    for one, two in zip(*logs, strict=True):
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
    states = [saved_state(tmp_path / each, 4) for each in "12"]
    parts = [[state["head"], *(optimizer["state"] for optimizer in state["optimizers"])] for state in states]
    torch.testing.assert_close(*parts, rtol=1e-3, atol=1e-5)
    said = json.loads((tmp_path / "2" / "best" / "training.json").read_text())
    assert said["processes"] == 2, "a launcher may start fewer than it was told to"
    assert (tmp_path / "2" / "best" / "model.safetensors").is_file()


KILLED = """
import os, signal
from experiments.commands import train as commands_train
from experiments.train import train
from experiments.training.loop import Training
step = Training._step
Training._step = lambda self, number: os.kill(os.getpid(), signal.SIGKILL) if number == 6 else step(self, number)
train.main()
"""


@pytest.mark.full
def test_a_sharded_training_that_was_killed_ends_as_the_uninterrupted_one(tiny_training, tmp_path) -> None:
    """It goes on from its checkpoint, to the last bit. The adapter's layers read the parts that FSDP puts together."""
    given = [each for each in tiny_training if not each.startswith("head.")]
    given += ["head=uno", "head.rank=4", "head.depths=2", "sharded=true", "fit.muon_lr=null", "served.prompts=1"]
    (tmp_path / "killed.py").write_text(KILLED)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for more, out, program in (([], whole, ()), ([], parts, (f"{tmp_path}/killed.py",)), (["resume=true"], parts, ())):
        done = in_two_processes([*given, *more], out, *program)
        assert (done.returncode == 0) == (not program), done.stderr[-3000:]
        assert newest_checkpoint(out / "checkpoints").name == f"step-{4 if program else 12:08d}.pt"
    assert equal(saved_state(parts), saved_state(whole))
    assert (parts / LOG).read_text() == (whole / LOG).read_text()
    assert all(weight.any() for weight in saved_state(whole)["head"].values()), "every layer of the adapter has learnt"


@pytest.fixture
def rows() -> Rows:
    documents = [Document.whole(str(n), [(n * 7 + i) % VOCAB_SIZE for i in range(n)]) for n in (30, 11, 5, 40, 9)]
    return Rows(documents, length=16, batch_size=2, seed=0)


def gradients(target: Target, batch: TextBatch, states: TargetStates) -> Tensor:
    torch.manual_seed(1)
    head = TrainedEagle3(depths=3, hidden_layers=[1, 2, 3])
    head.begin(target, None)
    anchors = head.anchors(batch, torch.Generator())
    totals = anchors.counted.sum(0).float()
    Comparison(head, ForwardKL(), Power(), chunk=7)(batch, states, anchors, totals, 0.0)[0].backward()
    return torch.cat([each.grad.flatten() for each in head.parameters() if each.grad is not None])


def test_states_from_a_disk_give_the_gradients_of_computed_ones(target, rows, tmp_path, monkeypatch) -> None:
    """To the last bit: when they are computed and stored, when they are read, and by another process.

    Every row is computed once.
    """
    frozen, numbers, seen, call = FrozenTarget(target, [1, 2, 3]), [2, 0], [], FrozenTarget.__call__
    batch = rows.batch(numbers)
    wanted = gradients(target, batch, frozen(batch))

    def counted(self: FrozenTarget, batch: Any, numbers: Any = None) -> TargetStates:
        seen.append(len(batch.tokens))
        return call(self, batch, numbers)

    monkeypatch.setattr(FrozenTarget, "__call__", counted)
    stored = StoredTarget(frozen, rows, tmp_path)
    for source in (stored, stored, StoredTarget(frozen, rows, tmp_path, main=False)):
        assert torch.equal(gradients(target, batch, source(batch, numbers)), wanted)
    # The mutant: the states of other rows.
    assert not torch.allclose(gradients(target, batch, stored(batch, numbers[::-1])), wanted, rtol=1e-2)
    stored(rows.batch([1, 2]), [1, 2])
    assert seen == [2, 1]
    stored(rows.batch([1]))
    assert seen == [2, 1, 1], "text without numbers is not the training's"


def test_a_full_disk_and_other_states_are_refused(target, rows, tmp_path, monkeypatch, capsys) -> None:
    frozen = FrozenTarget(target, [1])
    size = len(rows) * 2 * 16 * target.model.config.hidden_size * 4
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=size - 1))
        with pytest.raises(ValueError, match=r"states of .* rows take .* GB .*, and the disk has .* GB left"):
            StoredTarget(frozen, rows, tmp_path)
        assert not (tmp_path / NAME).exists()
    stored = StoredTarget(frozen, rows, tmp_path)
    assert f"rows take {size / 1e9:.3g} GB" in capsys.readouterr().err
    stored(rows.batch([0]), [0])
    assert size / len(rows) < sum(path.stat().st_size for path in tmp_path.glob("row-*")) < size / len(rows) + 4096
    for other in (FrozenTarget(target, [2]), frozen):
        text = Rows(rows.documents, length=8, batch_size=2, seed=0) if other is frozen else rows
        with pytest.raises(ValueError, match=r"holds the states of another training \(other (layers|length, text)\)"):
            StoredTarget(other, text, tmp_path)
