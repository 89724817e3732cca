"""What is said to wandb, and that the run goes on whatever wandb does: with fakes that fail and hang."""

import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from experiments.tracking.wandb import WandbTracker
from tests.experiments.tracking.everything import use, warnings_of


class FakeArtifact:
    def __init__(self, name: str, type: str):
        self.name, self.type, self.files = name, type, []

    def add_file(self, path: str, *, name: str, policy: str) -> None:
        self.files.append((name, policy))


class FakeWandb(ModuleType):
    """Notes what it is told; ``broken`` names what raises, ``slow`` what hangs until ``release`` is set."""

    def __init__(self, *, broken: str = "", slow: str = "", logged_in: bool = True):
        super().__init__("wandb")
        self.broken, self.slow, self.logged_in = broken, slow, logged_in
        self.id = "1"
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

    def Table(self, columns: list[str], data: list[list[Any]], allow_mixed_types: bool) -> Any:  # noqa: N802
        return columns, data

    def Image(self, path: str) -> str:  # noqa: N802
        return path

    def Artifact(self, name: str, type: str) -> "FakeArtifact":  # noqa: N802
        return FakeArtifact(name, type)

    def define_metric(self, name: str, **options: Any) -> None:
        self.calls.append(("define_metric", (name, options)))

    def log_artifact(self, artifact: "FakeArtifact") -> None:
        self.note("log_artifact", artifact)

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


def test_a_trace_is_an_artifact_of_its_own_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    use(WandbTracker("p", trace=True), tmp_path)
    artifacts = [value for name, value in fake.calls if name == "log_artifact"]
    assert [(each.name, each.type) for each in artifacts] == [("results-1", "results"), ("trace-1", "trace")]
    assert artifacts[1].files == [("00000.parquet", "immutable")]


def test_wandb_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, None)
    use(WandbTracker("p"), tmp_path)
    assert len(warnings_of(caplog)) == 1
    assert "not installed" in warnings_of(caplog)[0]


@pytest.mark.parametrize("what", ["init", "log"])
def test_one_warning_when_it_fails_and_no_more_calls(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeWandb(broken=what)
    install(monkeypatch, fake)
    use(WandbTracker("p"), tmp_path)
    assert fake.calls[-1][0] == what
    assert len(warnings_of(caplog)) == 1
    assert f"RuntimeError: {what} is broken" in warnings_of(caplog)[0]


@pytest.mark.parametrize("what", ["init", "finish"])
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


@pytest.mark.parametrize("trouble", [{"logged_in": False}, {"broken": "login"}, {"slow": "login"}, {"mode": "online"}])
def test_online_where_a_run_cannot_begin_it_is_recorded_offline(
    trouble: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refuses(FakeWandb):
        def init(self, **arguments: Any) -> FakeWandb:
            if arguments["mode"] == trouble.get("mode"):
                raise RuntimeError("no permission")
            return super().init(**arguments)

    monkeypatch.setattr("experiments.tracking.wandb.GRACE", 0.1)
    fake = Refuses(**{name: value for name, value in trouble.items() if name != "mode"})
    install(monkeypatch, fake)
    use(WandbTracker("p", mode="online", timeout=0.5), tmp_path)
    assert dict(fake.calls)["init"]["mode"] == "offline"
    assert dict(fake.calls)["finish"] == 0
    (warning,) = warnings_of(caplog)
    assert "recorded offline" in warning


def test_online_with_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    use(WandbTracker("p", mode="online"), tmp_path)
    assert dict(fake.calls)["init"]["mode"] == "online"
    assert dict(fake.calls)["login"]["prompt"] is False, "nobody may be asked to type a key"


def test_bad_mode() -> None:
    with pytest.raises(ValueError, match=r"tracker\.mode='upload'"):
        WandbTracker("p", mode="upload")
