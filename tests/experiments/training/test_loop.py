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
from accelerate.utils import DistributedType
from torch import Tensor

from drafters.eagle import TrainedEagle3
from drafters.heads.training import TargetStates, TextBatch
from experiments.commands import train as commands_train
from experiments.train import train
from experiments.training import loop
from experiments.training.comparison import Comparison
from experiments.training.data.document import Document
from experiments.training.data.packing import Rows
from experiments.training.fitting import FitConfig
from experiments.training.loop import LOG, Training, newest_checkpoint
from experiments.training.losses import ForwardKL
from experiments.training.sharding import check_processes
from experiments.training.states import NAME, FrozenTarget, StoredTarget
from experiments.training.weights import Power
from specdec.target.target import Target
from tests.experiments.conftest import VOCAB_SIZE
from tests.experiments.runs import Configure

ROOT = Path(__file__).parents[3]


def final(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / "step-00000012.pt", weights_only=True)


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(equal, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


@pytest.mark.parametrize("stop", [6, pytest.param(8, marks=pytest.mark.full)])
def test_a_resumed_training_ends_as_the_uninterrupted_one(stop: int, training, tmp_path, monkeypatch) -> None:
    """Ended by SIGTERM, which saves a checkpoint, where it is measured next, and right after a checkpoint."""
    train(training(f"out={tmp_path / 'whole'}"))
    step, handler = Training._step, signal.getsignal(signal.SIGTERM)

    def interrupted(self: Training, number: int) -> None:
        if number == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(training(f"out={tmp_path / 'parts'}"))
    assert newest_checkpoint(tmp_path / "parts" / "checkpoints").name == f"step-{stop:08d}.pt"
    assert signal.getsignal(signal.SIGTERM) is handler
    train(training(f"out={tmp_path / 'parts'}", "resume=true"))
    assert equal(final(tmp_path / "parts"), final(tmp_path / "whole"))
    logs = [(tmp_path / name / LOG).read_text() for name in ("parts", "whole")]
    assert logs[0] == logs[1]
    for name in ("best", "last"):
        weights = [(tmp_path / each / name / "model.safetensors").read_bytes() for each in ("parts", "whole")]
        assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("asked", "native", "taken"),
    [("auto", False, "float32"), ("auto", True, "auto"), ("bfloat16", False, "bfloat16")],
)
def test_a_training_takes_float32_where_products_in_16_bits_are_slow(
    asked: str, native: bool, taken: str, configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Decoding keeps the checkpoint's dtype there, by products of this project's C, which have no gradients."""
    monkeypatch.setattr(commands_train, "is_native", lambda *given: native)
    config = configure("train", "head=eagle3", f"target.dtype={asked}", f"out={tmp_path}", "fit.steps=0")
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
    for name, more in (("fixed", [f"mixed_precision={faster}"]), ("more", [])):
        train(training(f"out={tmp_path / name}", *short, *more))
    weights = [(tmp_path / name / "last" / "model.safetensors").read_bytes() for name in ("out", "fixed", "more")]
    assert weights[0] == weights[1] and (weights[1] == weights[2]) is (faster == "no")
    known = json.loads((tmp_path / "out" / "last" / "training.json").read_text())
    assert known["mixed_precision"] == faster
    seen.clear()
    train(training("mixed_precision=auto", "resume=true", *short))
    assert set(seen) <= {faster}


def test_a_loss_that_is_not_finite_stops_and_names_the_batch(training, tmp_path, monkeypatch) -> None:
    forward = Comparison.forward
    calls = []

    def poisoned(self: Comparison, *arguments: Any) -> Any:
        loss, places = forward(self, *arguments)
        calls.append(torch.is_grad_enabled())
        return loss * (float("nan") if calls.count(True) == 6 else 1.0), places

    monkeypatch.setattr(Comparison, "forward", poisoned)
    message = r"the loss is nan in step 6, on rows \[.*\] \(.*\.txt.*step-00000004\.pt"
    with pytest.raises(loop.DivergedError, match=message):
        train(training())
    saved = torch.load(tmp_path / "out" / "checkpoints" / "step-00000004.pt", weights_only=True)
    assert all(value.isfinite().all() for value in saved["head"].values())
    assert not (tmp_path / "out" / "checkpoints" / "step-00000008.pt").exists()


def test_parts_of_a_batch_give_the_gradient_of_the_whole(training: Configure, tmp_path: Path) -> None:
    """Rows of unequal length, one at a time or together, and logits in pieces or at once: the same weights."""
    for name, more in (("a", []), ("b", ["fit.micro_batch=1", "fit.chunk=7"])):
        given = ["served.prompts=0", "fit.steps=3", "fit.muon_lr=null"]  # Muon rounds gradients to bfloat16
        train(training(f"out={tmp_path / name}", *given, *more))
    whole, parts = (torch.load(tmp_path / n / "checkpoints/step-00000003.pt", weights_only=True)["head"] for n in "ab")
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("by", ["served_length", "expected_length"])
def test_the_best_weights_have_the_greatest_length_and_another_training_is_refused(
    by: str, training: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the expected length, against the served one, where there is one."""
    lengths = iter([1.5, 2.5, 2.0])
    monkeypatch.setattr(
        "experiments.commands.train.served",
        lambda *_, **__: {"served_length": 9.0 - (length := next(lengths)), by: length},
    )
    train(training("evaluate_every=4"))
    told = json.loads((tmp_path / "out" / "best" / "training.json").read_text())
    assert told["step"] == 8 and told["figures"][by] == 2.5
    shown = "".join(capsys.readouterr())
    assert f"(best so far by {by.partition('_')[0]} length)" in shown
    assert json.loads((tmp_path / "out" / "last" / "training.json").read_text())["step"] == 12
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


class Share:
    """What ``Training`` asks of accelerate, in one of two processes whose sums are those of both."""

    is_main_process, num_processes, device = False, 2, torch.device("cpu")

    def __init__(self, rank: int, sums: list[torch.Tensor] | None = None):
        self.process_index, self.sums, self.said = rank, sums, []

    def reduce(self, value: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        self.said.append(value.clone())
        return value if self.sums is None else self.sums[len(self.said) - 1]


def gradients(target: Target, batch: TextBatch, states: TargetStates, share: Share | None = None) -> Tensor:
    torch.manual_seed(1)
    head = TrainedEagle3(depths=3, hidden_layers=[1, 2, 3])
    head.begin(target, None)
    anchors = head.anchors(batch, torch.Generator())
    totals = anchors.counted.sum(0).float()
    totals = totals if share is None else loop._summed(share, totals)
    loss, _ = Comparison(head, ForwardKL(), Power(), chunk=7)(batch, states, anchors, totals, 0.0)
    (loss * (1 if share is None else share.num_processes)).backward()
    return torch.cat([each.grad.flatten() for each in head.parameters() if each.grad is not None])


def test_sums_are_divided_by_the_places_of_all_processes(target: Target) -> None:
    """The mean of two processes' gradients is that of the whole batch, also where one has fewer places."""
    rows = Rows([Document.whole(str(n), list(range(n))) for n in (16, 11)], length=16, batch_size=2, seed=0)
    frozen, whole = FrozenTarget(target, [1, 2, 3]), rows.batch(rows.numbers(0))

    def of_both(shares: list[Share]) -> list[Tensor]:
        batches = [rows.batch(rows.numbers(0, share.process_index, 2)) for share in shares]
        return [gradients(target, *each) for each in zip(batches, map(frozen, batches), shares, strict=True)]

    shares = [Share(rank) for rank in (0, 1)]
    alone, wanted = of_both(shares), gradients(target, whole, frozen(whole))
    sums = [torch.stack(each).sum(0) for each in zip(*(share.said for share in shares), strict=True)]
    both = of_both([Share(rank, sums) for rank in (0, 1)])
    torch.testing.assert_close((both[0] + both[1]) / 2, wanted, rtol=1e-4, atol=1e-6)
    # The mutant: each divides by its own places.
    assert not torch.allclose((alone[0] + alone[1]) / 4, wanted, rtol=1e-2, atol=1e-4)


def launched(given: list[str], count: int, out: Path, *program: str) -> subprocess.CompletedProcess[str]:
    """Trains in so many processes, on CPUs; by another program than the command if one is given."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    command = [*launch, *(program or ("-m", "experiments.train")), *given, f"out={out}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.full
@pytest.mark.parametrize("way", ["DDP", "FSDP"])
def test_two_processes_train_as_one(way: str, tiny_training: list[str], tmp_path: Path) -> None:
    """Each takes half of a batch, in which documents are of unequal length: the same weights, the same figures.

    With FSDP each keeps a part of the head; the target's states come from a disk then.
    """
    given = [*tiny_training, "evaluate_every=4", "served.prompts=1", f"hydra.run.dir={tmp_path}/h", "fit.steps=4"]
    given += ["fit.muon_lr=null"] if way == "FSDP" else []
    sharded = ["sharded=true", f"states={tmp_path / 'states'}"] if way == "FSDP" else []
    for count, more in (("1", []), ("2", sharded)):
        done = launched([*given, *more], int(count), tmp_path / count)
        assert done.returncode == 0, done.stderr[-3000:]
    logs = [[json.loads(line) for line in (tmp_path / each / LOG).read_text().splitlines()] for each in ("1", "2")]
    for one, two in zip(*logs, strict=True):
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
    states = [torch.load(tmp_path / each / "checkpoints/step-00000004.pt", weights_only=True) for each in "12"]
    parts = [[state["head"], *(optimizer["state"] for optimizer in state["optimizers"])] for state in states]
    torch.testing.assert_close(*parts, rtol=1e-3, atol=1e-5)
    for count in ("1", "2"):
        said = json.loads((tmp_path / count / "best" / "training.json").read_text())
        assert said["processes"] == int(count), "a launcher may start fewer than it was told to"
        assert (tmp_path / count / "best" / "model.safetensors").is_file()


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
    given += ["head=uno", "head.rank=4", "head.depths=2", "sharded=true", "fit.muon_lr=null"]
    given += ["served.prompts=1", f"hydra.run.dir={tmp_path}/h"]
    (tmp_path / "killed.py").write_text(KILLED)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for more, out, program in (([], whole, ()), ([], parts, (f"{tmp_path}/killed.py",)), (["resume=true"], parts, ())):
        done = launched([*given, *more], 2, out, *program)
        assert (done.returncode == 0) == (not program), done.stderr[-3000:]
        assert newest_checkpoint(out / "checkpoints").name == f"step-{4 if program else 12:08d}.pt"
    assert equal(final(parts), final(whole))
    assert (parts / LOG).read_text() == (whole / LOG).read_text()
    assert all(weight.any() for weight in final(whole)["head"].values()), "every layer of the adapter has learnt"


def test_what_cannot_be_divided_is_refused() -> None:
    for kind, count, sharded, message in (
        (DistributedType.NO, 1, True, "sharded=true divides the head among processes, and there is one"),
        (DistributedType.MULTI_CPU, 2, True, "Muon needs whole matrices"),
        (DistributedType.FSDP, 2, False, "its own FSDP: leave that out, and give sharded=true"),
    ):
        processes: Any = SimpleNamespace(distributed_type=kind, num_processes=count)
        with pytest.raises(ValueError, match=message):
            check_processes(processes, sharded=sharded, muon=count == 2)


@pytest.fixture
def rows() -> Rows:
    documents = [Document.whole(str(n), [(n * 7 + i) % VOCAB_SIZE for i in range(n)]) for n in (30, 11, 5, 40, 9)]
    return Rows(documents, length=16, batch_size=2, seed=0)


def test_states_from_a_disk_give_the_gradients_of_computed_ones(target: Target, rows: Rows, tmp_path: Path) -> None:
    """To the last bit: when they are computed and stored, when they are read, and by another process."""
    frozen, numbers = FrozenTarget(target, [1, 2, 3]), [2, 0]
    batch, stored = rows.batch(numbers), StoredTarget(frozen, rows, tmp_path)
    wanted = gradients(target, batch, frozen(batch))
    for source in (stored, stored, StoredTarget(frozen, rows, tmp_path, main=False)):
        assert torch.equal(gradients(target, batch, source(batch, numbers)), wanted)
    # The mutant: the states of other rows.
    assert not torch.allclose(gradients(target, batch, stored(batch, numbers[::-1])), wanted, rtol=1e-2)


def test_every_row_is_computed_once(target: Target, rows: Rows, tmp_path: Path, monkeypatch: Any) -> None:
    frozen, seen = FrozenTarget(target), []
    call = FrozenTarget.__call__

    def counted(self: FrozenTarget, batch: Any, numbers: Any = None) -> TargetStates:
        seen.append(len(batch.tokens))
        return call(self, batch, numbers)

    monkeypatch.setattr(FrozenTarget, "__call__", counted)
    for numbers in ([0, 1], [1, 2], [2, 0]):
        stored = StoredTarget(frozen, rows, tmp_path)  # a new process each time
        wanted = call(frozen, rows.batch(numbers)).hidden[-1]
        torch.testing.assert_close(stored(rows.batch(numbers), numbers).hidden[-1], wanted, rtol=1e-5, atol=1e-6)
    assert seen == [2, 1]
    stored(rows.batch([1]))
    assert seen == [2, 1, 1], "text without numbers is not the training's"


def test_the_size_is_said_and_a_full_disk_and_other_states_are_refused(
    target: Target, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    shorter = Rows(rows.documents, length=8, batch_size=2, seed=0)
    for other, text in ((FrozenTarget(target, [2]), rows), (frozen, shorter)):
        with pytest.raises(ValueError, match=r"holds the states of another training \(other (layers|length, text)\)"):
            StoredTarget(other, text, tmp_path)
