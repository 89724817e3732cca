"""accelerate's trackers: TensorBoard itself, its event files read back; and a service that fails."""

from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from experiments.results.origin import flatten
from experiments.tracking.accelerate import AccelerateTracker
from tests.experiments.tracking.everything import use, warnings_of


class Service(GeneralTracker):
    """Keeps what it is told; refuses what MLflow does."""

    name, requires_logging_directory, main_process_only = "service", False, False
    broken = ""
    calls: list[tuple[str, Any]]

    def __init__(self, project: str, **options: Any):
        super().__init__()
        self.calls.append(("init", (project, options)))

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._told("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        assert not any("=" in name for name in values)
        self._told("log", (step, values))

    def finish(self) -> None:
        self._told("finish", None)

    def _told(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if name == self.broken:
            raise RuntimeError(f"{name} is broken")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> type[Service]:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "service", Service)
    monkeypatch.setattr(Service, "calls", [], raising=False)
    return Service


def test_figures_go_to_the_service(service: type[Service], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = AccelerateTracker("service", project="p", options={"tag": "t"})
    use(tracker, tmp_path)
    assert warnings_of(caplog) == []
    names = [name for name, _ in service.calls]
    assert names == ["init", "config", *["log"] * 3, "config", *["log"] * 3, "finish"]
    assert service.calls[0][1] == ("p", {"tag": "t"})
    known = {"seed": 1, "drafter.component": "X", "name": "drafter=x", "group": "night", "command": "run"}
    assert service.calls[1][1] == known
    assert service.calls[5][1] == known | {"lossless": "ties"}
    logged = [value for name, value in service.calls if name == "log"]
    assert logged[:3] == [(1, {"speedup": 1.5}), (2, {"speedup": 2.0}), (2, {"speedup": 2.0})]
    assert [step for step, _ in logged[3:]] == [1, 2, 3], "a line, place by place"
    tracker._log({"model/T=0/speedup": 1.0}, 3)
    assert service.calls[-1][0] == "finish", "after the end nothing is said"
    assert flatten({"a": {"b": {"c": 1}}, "d": None}) == {"a.b.c": 1, "d": None}


@pytest.mark.parametrize("what", ["config", "log", "finish"])
def test_one_warning_when_it_fails_and_no_more_calls(
    what: str, service: type[Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Service, "broken", what)
    use(AccelerateTracker("service"), tmp_path)
    assert service.calls[-1][0] == what
    (warning,) = warnings_of(caplog)
    assert f"service: RuntimeError: {what} is broken" in warning


def test_tensorboard_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    use(AccelerateTracker("tensorboard", timeout=120), tmp_path)
    assert warnings_of(caplog) == []
    found = module.EventAccumulator(str(tmp_path / "specdec"), size_guidance={"scalars": 0})
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("speedup")] == [(1, 1.5), (2, 2.0), (2, 2.0)]
    assert [each.step for each in found.Scalars("acceptance/conditional")] == [1, 2]
