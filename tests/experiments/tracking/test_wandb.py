"""wandb itself, offline: its files are read back; and fakes that fail and hang: the run goes on."""

import logging
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from matplotlib import image

from experiments.tracking.base import TrackedRun, Tracker
from experiments.tracking.wandb import WandbTracker
from tests.experiments.tracking.datastore import Datastore


def use(tracker: Tracker, folder: Path) -> None:
    """Tell a tracker of a run of two prompts, with two files, a picture and a trace."""
    records, picture, trace = (folder / name for name in ("records.jsonl", "time.png", "00000.parquet"))
    records.write_text("{}\n")
    image.imsave(picture, [[0.0, 1.0], [1.0, 0.0]])
    trace.write_bytes(b"PAR1")
    config = {"seed": 1, "drafter": {"component": "X"}}
    tracker.start(TrackedRun(folder=folder, config=config, name="drafter=x", group="night", command="run"))
    tracker.progress({"speedup": 1.5}, 1)
    tracker.progress({"speedup": 2.0}, 2)
    tracker.summary({"speedup": 2.0, "lossless": "ties"})
    lines = {"unconditional": {1: 0.5, 2: 0.2, 3: 0.0}, "conditional": {1: 0.5, 2: 0.4}}
    tracker.curve("position", {f"acceptance/{name}": line for name, line in lines.items()})
    tracker.table("prompts", ["a", "b"], [[1, "x"], [2, None]])
    tracker.files("results", [records, picture])
    tracker.files("trace", [trace])
    tracker.finish(0)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What trackers have warned of."""
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in records if record.name.startswith("experiments.tracking")]


def test_offline_everything_is_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    use(WandbTracker("p", tags=["t"], trace=True, timeout=120), tmp_path)  # importing it can take long
    assert warnings_of(caplog) == []
    found = Datastore(tmp_path / "wandb")
    run = found.run
    assert (run.project, run.display_name, run.run_group, run.job_type) == ("p", "drafter=x", "night", "run")
    assert list(run.tags) == ["t"]
    assert (found.config["seed"], found.config["drafter"]) == (1, {"component": "X"})
    assert found.line("speedup") == [(1, 1.5), (2, 2.0)]
    assert found.line("acceptance/unconditional") == [(1, 0.5), (2, 0.2), (3, 0.0)]
    assert found.line("acceptance/conditional") == [(1, 0.5), (2, 0.4)]
    assert found.metrics["acceptance/conditional"] == ("position", ["none"]), "not in the summary"
    assert (found.summary["speedup"], found.summary["lossless"]) == (2.0, "ties")
    assert not [name for name in found.summary if name.startswith(("acceptance", "position", "prompts_done"))]
    kinds = {kind: sizes for _, kind, sizes in found.artifacts}
    assert (kinds["results"], kinds["trace"]) == ({"records.jsonl": 3}, {"00000.parquet": 4})
    assert "prompts.table.json" in kinds["run_table"]
    assert [name for name in found.files if name.startswith("media/images/pictures/time")]
    assert found.exit_code == 0


class FakeWandb(ModuleType):
    """Notes what it is told; ``broken`` names a call or a mode that raises, ``slow`` a call that hangs."""

    def __init__(self, *, broken: str = "", slow: str = "", logged_in: bool = True):
        super().__init__("wandb")
        self.broken, self.slow, self.logged_in, self.id = broken, slow, logged_in, "1"
        self.release = threading.Event()
        self.calls: list[tuple[str, Any]] = []
        self.summary = SimpleNamespace(update=lambda figures: None)
        self.Settings, self.Table, self.Image = dict, dict, str
        self.Artifact = lambda name, type: SimpleNamespace(add_file=lambda *of, **more: None)
        self.define_metric = self.log_artifact = lambda *of, **more: None

    def note(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if self.broken in (name, value):
            raise RuntimeError(f"{name} is\nbroken")
        if name == self.slow:
            self.release.wait(60)
            self.calls.append((f"{name} answered", None))

    def login(self, *, prompt: bool, timeout: int) -> bool:
        assert not prompt, "nobody may be asked to type a key"
        self.note("login", None)
        return self.logged_in

    def init(self, *, mode: str, **more: Any) -> "FakeWandb":
        self.note("init", mode)
        return self

    def log(self, values: dict[str, Any]) -> None:
        self.note("log", values)

    def finish(self, exit_code: int) -> None:
        self.note("finish", exit_code)


def told(fake: FakeWandb | None, folder: Path, patch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Tell a run's story to a fake, with little patience."""
    patch.setattr("experiments.tracking.wandb.GRACE", 0.1)
    patch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    use(WandbTracker("p", **{"timeout": 0.1} | settings), folder)


@pytest.mark.parametrize(
    ("fake", "last", "said"),
    [
        (None, None, "not installed"),
        (FakeWandb(broken="init"), "init", "RuntimeError: init is broken"),
        (FakeWandb(broken="log"), "log", "RuntimeError: log is broken"),
        (FakeWandb(slow="init"), "init", "no answer within"),
        (FakeWandb(slow="finish"), "finish", "no answer within"),
    ],
)
def test_trouble_is_one_warning_and_no_more_calls(
    fake: FakeWandb | None, last: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    told(fake, tmp_path, monkeypatch)
    if fake is not None:
        assert fake.calls[-1][0] == last, "and a call that hangs is left behind"
        fake.release.set()
    (warning,) = warnings_of(caplog)
    assert said in warning


@pytest.mark.parametrize(
    "trouble", [{"logged_in": False}, {"broken": "login"}, {"slow": "login"}, {"broken": "online"}]
)
def test_online_where_a_run_cannot_begin_it_is_recorded_offline(
    trouble: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeWandb(**trouble)
    told(fake, tmp_path, monkeypatch, mode="online", timeout=0.5)
    assert dict(fake.calls)["init"] == "offline" and dict(fake.calls)["finish"] == 0
    (warning,) = warnings_of(caplog)
    assert "recorded offline" in warning


def test_online_with_a_login_and_a_service_that_has_died_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeWandb()
    told(fake, tmp_path, monkeypatch, mode="online")
    assert dict(fake.calls)["init"] == "online"
    fake = FakeWandb(broken="init")
    fake.teardown = lambda: setattr(fake, "broken", "")
    told(fake, tmp_path, monkeypatch)
    assert dict(fake.calls)["finish"] == 0 and not warnings_of(caplog), "the next run of a sweep is recorded"
