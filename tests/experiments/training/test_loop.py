"""Interrupted trainings end as uninterrupted ones do; a loss that is not finite stops them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from experiments.train import train
from experiments.training.checkpoints import Checkpoints, write_folder
from experiments.training.comparison import Comparison
from experiments.training.fitting import FitConfig
from experiments.training.loop import LOG, DivergedError, Training

Compose = Callable[..., DictConfig]
ROOT = Path(__file__).parents[3]


def final(folder: Path) -> dict[str, Any]:
    """The state after the last step."""
    return torch.load(folder / "checkpoints" / "step-00000012.pt", weights_only=True)


def equal(first: Any, second: Any) -> bool:
    """Whether two states are equal to the last bit."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(equal, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


@pytest.mark.parametrize("stop", [6, pytest.param(8, marks=pytest.mark.full)])
def test_a_resumed_training_ends_as_the_uninterrupted_one(
    stop: int, training: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted where it is measured next, and right after a checkpoint."""
    train(training(f"out={tmp_path / 'whole'}"))
    step = Training._step

    def interrupted(self: Training, number: int) -> None:
        if number == stop:
            raise KeyboardInterrupt
        step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(training(f"out={tmp_path / 'parts'}"))
    train(training(f"out={tmp_path / 'parts'}", "resume=true"))
    assert equal(final(tmp_path / "parts"), final(tmp_path / "whole"))
    logs = [(tmp_path / name / LOG).read_text() for name in ("parts", "whole")]
    assert logs[0] == logs[1]
    for name in ("best", "last"):
        weights = [(tmp_path / each / name / "model.safetensors").read_bytes() for each in ("parts", "whole")]
        assert weights[0] == weights[1]


def test_sigterm_saves_a_checkpoint(training: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, before = Training._step, signal.getsignal(signal.SIGTERM)

    def ended(self: Training, number: int) -> None:
        if number == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        step(self, number)

    monkeypatch.setattr(Training, "_step", ended)
    with pytest.raises(KeyboardInterrupt):
        train(training())
    newest = Checkpoints(tmp_path / "out" / "checkpoints").newest()
    assert newest is not None and newest.name == "step-00000006.pt"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_loss_that_is_not_finite_stops_and_names_the_batch(
    training: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Comparison.forward
    calls = []

    def poisoned(self: Comparison, *arguments: Any) -> Any:
        loss, places = forward(self, *arguments)
        calls.append(torch.is_grad_enabled())
        return loss * (float("nan") if calls.count(True) == 6 else 1.0), places

    monkeypatch.setattr(Comparison, "forward", poisoned)
    with pytest.raises(DivergedError, match=r"the loss is nan in step 6, on rows \[.*\] \(.*\.txt.*step-00000004\.pt"):
        train(training())
    saved = torch.load(tmp_path / "out" / "checkpoints" / "step-00000004.pt", weights_only=True)
    assert all(value.isfinite().all() for value in saved["head"].values())
    assert not (tmp_path / "out" / "checkpoints" / "step-00000008.pt").exists()


def test_parts_of_a_batch_give_the_gradient_of_the_whole(training: Compose, tmp_path: Path) -> None:
    """Rows of unequal length, one at a time or together, and logits in pieces or at once: the same weights."""
    for name, more in (("a", []), ("b", ["fit.micro_batch=1", "fit.chunk=7"])):
        given = ["served.prompts=0", "fit.steps=3", "fit.muon_lr=null"]  # Muon rounds gradients to bfloat16
        train(training(f"out={tmp_path / name}", *given, *more))
    whole, parts = (torch.load(tmp_path / n / "checkpoints/step-00000003.pt", weights_only=True)["head"] for n in "ab")
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-6)


def test_a_folder_of_another_training_is_refused(training: Compose, tmp_path: Path) -> None:
    given = ["fit.steps=2", "served.prompts=0"]
    train(training(*given))
    for more, message in (
        ([], "another training: give another out"),
        (["fit.lr=0.5", "resume=true"], r"had fit\.lr=0\.01, and this one has fit\.lr=0\.5"),
        (["resume=true", f"out={tmp_path / 'elsewhere'}"], r"resume=true: there is no training in .*elsewhere"),
    ):
        with pytest.raises(ValueError, match=message):
            train(training(*given, *more))


def test_the_best_weights_are_those_of_the_greatest_served_length(
    training: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter([1.5, 2.5, 2.0])
    monkeypatch.setattr("experiments.commands.train.served", lambda *_, **__: {"served_length": next(lengths)})
    train(training("evaluate_every=4"))
    told = json.loads((tmp_path / "out" / "best" / "training.json").read_text())
    assert told["step"] == 8 and told["figures"]["served_length"] == 2.5
    assert json.loads((tmp_path / "out" / "last" / "training.json").read_text())["step"] == 12


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, {"step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002.pt", "step-00000003.pt"]

    def half(path: Path) -> None:
        (path / "a" if path.is_dir() else path).write_text("half")
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda state, path: half(path))
        with pytest.raises(OSError, match="no space"):
            checkpoints.save(4, {"step": 4})
    newest = checkpoints.newest()
    assert newest is not None and torch.load(newest, weights_only=True) == {"step": 3}

    write_folder(tmp_path / "best", lambda folder: (folder / "a").write_text("1"))
    with pytest.raises(OSError, match="no space"):
        write_folder(tmp_path / "best", half)
    assert (tmp_path / "best" / "a").read_text() == "1"
    write_folder(tmp_path / "best", lambda folder: (folder / "b").write_text("2"))
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["b"]


def test_the_learning_rate_rises_and_falls() -> None:
    config = FitConfig(steps=10, batch_size=1, length=8, lr=1.0, warmup=4)
    assert [config.factor(step) for step in (0, 3, 6, 9)] == [0.25, 1.0, 4 / 7, 1 / 7]
    cosine = FitConfig(steps=10, batch_size=1, length=8, lr=1.0, warmup=4, decay="cosine")
    assert cosine.factor(3) == 1.0 and cosine.factor(9) < 0.06


@pytest.mark.full
def test_two_processes_train_as_one(tiny_training: list[str], tmp_path: Path) -> None:
    """Each takes half of a batch, in which documents are of unequal length: the same weights, the same figures."""
    given = [*tiny_training, "fit.steps=4", "evaluate_every=4", "served.prompts=1", f"hydra.run.dir={tmp_path}/h"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines=1", "--mixed_precision=no"]
    launch += ["--dynamo_backend=no", "--main_process_port=0"]
    for count in (1, 2):
        command = [*launch, f"--num_processes={count}", "-m", "experiments.train", *given]
        command.append(f"out={tmp_path / str(count)}")
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    logs = [[json.loads(line) for line in (tmp_path / each / LOG).read_text().splitlines()] for each in ("1", "2")]
    for one, two in zip(*logs, strict=True):
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
    heads = [torch.load(tmp_path / each / "checkpoints/step-00000004.pt", weights_only=True)["head"] for each in "12"]
    for name, value in heads[0].items():
        torch.testing.assert_close(heads[1][name], value, rtol=1e-3, atol=1e-5)
