"""TensorBoard itself: event files, read back with its own reader; and without it."""

import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.tracking.tensorboard import TensorBoardTracker
from tests.experiments.tracking.everything import use, warnings_of


def events(folder: Path) -> Any:
    """What TensorBoard reads in a folder."""
    module = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed: pip install .[tensorboard]",
    )
    found = module.EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    found.Reload()
    return found


def test_a_run_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install .[tensorboard]")
    use(TensorBoardTracker(timeout=120), tmp_path)
    assert warnings_of(caplog) == []
    found = events(tmp_path / "tensorboard")
    tags = found.Tags()
    assert set(tags["scalars"]) == {"speedup", "acceptance/unconditional", "acceptance/conditional"}
    # The last point twice: the table of settings and figures is made of scalars, too.
    assert [(each.step, each.value) for each in found.Scalars("speedup")] == [(1, 1.5), (2, 2.0), (2, 2.0)]
    curve = [(each.step, pytest.approx(each.value)) for each in found.Scalars("acceptance/conditional")]
    assert curve == [(1, 0.5), (2, 0.4)]
    assert tags["images"] == ["pictures/time"]
    assert found.Images("pictures/time")[0].width == 2
    assert found.Tensors("lossless/text_summary")[0].tensor_proto.string_val == [b"ties"]
    assert hparams(found) == {"seed": 1, "drafter.component": "X", "lossless": "ties"}


def hparams(found: Any) -> dict[str, Any]:
    """The settings of a run in the table HPARAMS."""
    from tensorboard.plugins.hparams import plugin_data_pb2

    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    data = plugin_data_pb2.HParamsPluginData.FromString(content)
    settings = data.session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in settings.items()}


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install .[tensorboard]")
    use(TensorBoardTracker(folder=str(tmp_path / "board"), timeout=120), tmp_path)
    assert events(tmp_path / "board" / "drafter=x").Tags()["scalars"]


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install .[tensorboard]")
    (tmp_path / "file").touch()
    use(TensorBoardTracker(folder=str(tmp_path / "file"), timeout=120), tmp_path)
    assert len(warnings_of(caplog)) == 1


def test_tensorboard_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    use(TensorBoardTracker(), tmp_path)
    (warning,) = warnings_of(caplog)
    assert "tensorboard: not installed (pip install 'specdec[tensorboard]')" in warning
