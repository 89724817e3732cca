"""Whatever a tracker does, the run goes on: with wandb itself offline, and with fakes that fail and hang."""

import logging
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from experiments.tracking.wandb import NullTracker, Tracker, WandbTracker


def use(tracker: Tracker, folder: Path) -> None:
    tracker.start({"seed": 1}, folder)
    tracker.summary({"speedup": 2.0})
    tracker.table("prompts", ["a", "b"], [[1, "x"], [2, None]])
    tracker.finish(0)


class FakeWandb(ModuleType):
    """Notes what it is told; ``broken`` names what raises, ``slow`` what hangs until ``release`` is set."""

    def __init__(self, *, broken: str = "", slow: str = "", logged_in: bool = True):
        super().__init__("wandb")
        self.broken, self.slow, self.logged_in = broken, slow, logged_in
        self.release = threading.Event()
        self.calls: list[tuple[str, Any]] = []
        self.summary = SimpleNamespace(update=lambda figures: self.note("summary", figures))

    def note(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if name == self.broken:
            raise RuntimeError(f"{name} is\nbroken")
        if name == self.slow:
            self.release.wait(60)
            self.calls.append((f"{name} answered", None))

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802 (wandb's name)
        return settings

    def Table(self, columns: list[str], data: list[list[Any]]) -> tuple[Any, Any]:  # noqa: N802
        return columns, data

    def login(self, **arguments: Any) -> bool:
        self.note("login", arguments)
        return self.logged_in

    def init(self, **arguments: Any) -> "FakeWandb":
        self.note("init", arguments)
        return self

    def log(self, values: dict[str, Any]) -> None:
        self.note("log", values)

    def finish(self, exit_code: int) -> None:
        self.note("finish", exit_code)


def install(patch: pytest.MonkeyPatch, fake: ModuleType | None) -> None:
    patch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.levelno >= logging.WARNING and r.name == "experiments.tracking.wandb"
    ]


def test_nothing_is_tracked_by_default(tmp_path: Path) -> None:
    use(NullTracker(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_everything_is_mirrored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    use(WandbTracker("p", group="g", tags=["t"], job_type="j"), tmp_path)
    calls = dict(fake.calls)
    init = calls["init"]
    assert (init["project"], init["group"], init["tags"], init["job_type"]) == ("p", "g", ["t"], "j")
    assert init["mode"] == "offline"
    assert init["config"] == {"seed": 1}
    assert init["dir"] == str(tmp_path)
    assert calls["summary"] == {"speedup": 2.0}
    assert calls["log"] == {"prompts": (["a", "b"], [[1, "x"], [2, None]])}
    assert calls["finish"] == 0
    assert "login" not in calls, "offline needs none"
    assert warnings_of(caplog) == []


def test_wandb_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, None)
    use(WandbTracker("p"), tmp_path)
    assert len(warnings_of(caplog)) == 1
    assert "not installed" in warnings_of(caplog)[0]


@pytest.mark.parametrize("what", ["init", "summary", "log", "finish"])
def test_one_warning_when_it_fails_and_no_more_calls(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeWandb(broken=what)
    install(monkeypatch, fake)
    use(WandbTracker("p"), tmp_path)
    assert fake.calls[-1][0] == what
    assert len(warnings_of(caplog)) == 1
    assert f"RuntimeError: {what} is broken" in warnings_of(caplog)[0]


@pytest.mark.parametrize("what", ["init", "summary", "finish"])
def test_a_call_that_hangs_is_left_behind(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("experiments.tracking.wandb.GRACE", 0.1)
    fake = FakeWandb(slow=what)
    install(monkeypatch, fake)
    use(WandbTracker("p", timeout=0.1), tmp_path)
    assert (f"{what} answered", None) not in fake.calls
    fake.release.set()
    assert len(warnings_of(caplog)) == 1
    assert "no answer within" in warnings_of(caplog)[0]


@pytest.mark.parametrize("trouble", [{"logged_in": False}, {"broken": "login"}, {"slow": "login"}])
def test_online_without_a_login_is_recorded_offline(
    trouble: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("experiments.tracking.wandb.GRACE", 0.1)
    fake = FakeWandb(**trouble)
    install(monkeypatch, fake)
    use(WandbTracker("p", mode="online", timeout=0.5), tmp_path)
    assert dict(fake.calls)["init"]["mode"] == "offline"
    assert dict(fake.calls)["finish"] == 0
    assert len(warnings_of(caplog)) == 1
    assert "recorded offline" in warnings_of(caplog)[0]


def test_online_with_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    use(WandbTracker("p", mode="online"), tmp_path)
    assert dict(fake.calls)["init"]["mode"] == "online"
    assert dict(fake.calls)["login"]["prompt"] is False, "nobody may be asked to type a key"


def test_bad_mode() -> None:
    with pytest.raises(ValueError, match=r"tracker\.mode='upload'"):
        WandbTracker("p", mode="upload")


def test_wandb_itself_offline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("wandb")
    use(WandbTracker("p", tags=["t"], timeout=120), tmp_path)  # importing it can take long on a busy machine
    assert warnings_of(caplog) == []
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
