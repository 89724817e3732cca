"""States of the target from a disk: the gradients of states that are computed anew, and files of others are refused."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from drafters.eagle import TrainedEagle3
from drafters.heads.training import TargetStates
from experiments.training.comparison import Comparison
from experiments.training.data.document import Document
from experiments.training.data.packing import Rows
from experiments.training.losses import ForwardKL
from experiments.training.states import STATES, FrozenTarget, StoredTarget
from experiments.training.weights import Power
from specdec.target.target import Target
from tests.experiments.conftest import VOCAB_SIZE

NUMBERS = [2, 0]


class Disk(NamedTuple):
    free: int


@pytest.fixture
def rows() -> Rows:
    documents = [Document.whole(str(n), [(n * 7 + i) % VOCAB_SIZE for i in range(n)]) for n in (30, 11, 5, 40, 9)]
    return Rows(documents, length=16, batch_size=2, seed=0)


def gradients(target: Target, rows: Rows, states: TargetStates) -> dict[str, Tensor]:
    torch.manual_seed(1)
    head = TrainedEagle3(depths=3, hidden_layers=[1, 2, 3])
    head.begin(target, None)
    batch = rows.batch(NUMBERS)
    anchors = head.anchors(batch, torch.Generator())
    totals = anchors.counted.sum(0).float()
    loss, _ = Comparison(head, ForwardKL(), Power(), chunk=7)(batch, states, anchors, totals, 0.0)
    loss.backward()
    return {name: each.grad for name, each in head.named_parameters() if each.grad is not None}


def test_states_from_a_disk_give_the_gradients_of_computed_ones(target: Target, rows: Rows, tmp_path: Path) -> None:
    """To the last bit: when they are computed and stored, when they are read, and by another process."""
    frozen = FrozenTarget(target, [1, 2, 3])
    wanted = gradients(target, rows, frozen(rows.batch(NUMBERS)))
    stored = StoredTarget(frozen, rows, tmp_path)
    for source in (stored, stored, StoredTarget(frozen, rows, tmp_path, main=False)):
        found = gradients(target, rows, source(rows.batch(NUMBERS), NUMBERS))
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    # The mutant: the states of other rows.
    found = gradients(target, rows, stored(rows.batch(NUMBERS), NUMBERS[::-1]))
    assert not all(torch.allclose(found[name], wanted[name], rtol=1e-2) for name in wanted)


def test_every_row_is_computed_once(
    target: Target, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        patch.setattr(shutil, "disk_usage", lambda folder: Disk(size - 1))
        with pytest.raises(
            ValueError, match=r"the target's states of .* rows take .* GB .*, and the disk has .* GB left"
        ):
            StoredTarget(frozen, rows, tmp_path)
        assert not (tmp_path / STATES).exists()
    StoredTarget(frozen, rows, tmp_path)
    assert f"rows take {size / 1e9:.3g} GB" in capsys.readouterr().err
    assert (tmp_path / STATES).stat().st_size == size
    shorter = Rows(rows.documents, length=8, batch_size=2, seed=0)
    for other, text in ((FrozenTarget(target, [2]), rows), (frozen, shorter)):
        with pytest.raises(ValueError, match=r"holds the states of another training \(other (layers|length, text)\)"):
            StoredTarget(other, text, tmp_path)
