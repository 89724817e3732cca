"""accelerate's trackers: TensorBoard itself, its event files read back; and a service that fails."""

from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import TensorBoardTracker

from experiments.tracking.accelerate import AccelerateTracker
from tests.experiments.tracking.everything import use, warnings_of

pytest.importorskip("tensorboard", reason="tensorboard is not installed")


def test_tensorboard_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(TensorBoardTracker, "store_init_configuration", lambda tracker, values: told.append(values))
    use(AccelerateTracker("tensorboard", timeout=120), tmp_path)
    assert warnings_of(caplog) == []
    known = {"seed": 1, "drafter.component": "X", "name": "drafter=x", "group": "night", "command": "run"}
    assert told == [known, known | {"lossless": "ties"}]
    found = module.EventAccumulator(str(tmp_path / "specdec"), size_guidance={"scalars": 0})
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("speedup")] == [(1, 1.5), (2, 2.0), (2, 2.0)]
    assert [each.step for each in found.Scalars("acceptance/conditional")] == [1, 2]


@pytest.mark.parametrize("what", ["store_init_configuration", "log", "finish"])
def test_one_warning_when_it_fails_and_no_more_calls(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: Any, **more: Any) -> None:
        raise RuntimeError("it is broken")

    monkeypatch.setattr(TensorBoardTracker, what, broken)
    use(AccelerateTracker("tensorboard"), tmp_path)
    (warning,) = warnings_of(caplog)
    assert "tensorboard: RuntimeError: it is broken" in warning
