"""What is said to wandb, and that the run goes on whatever wandb does: with fakes that fail and hang."""

import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from experiments.tracking.base import NullTracker, Tracker
from experiments.tracking.several import SeveralTrackers
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


def test_nothing_is_tracked_by_default(tmp_path: Path) -> None:
    use(NullTracker(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["files"], "those that the test made"


def test_everything_is_mirrored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    use(WandbTracker("p", group="g", tags=["t"], job_type="j"), tmp_path)
    calls = dict(fake.calls)
    init = calls["init"]
    assert (init["project"], init["group"], init["tags"], init["job_type"]) == ("p", "g", ["t"], "j")
    assert init["name"] == "drafter=x", "the run's own name, where none is given"
    assert init["mode"] == "offline"
    assert init["config"] == {"seed": 1, "drafter": {"component": "X"}}
    assert init["dir"] == str(tmp_path)
    assert calls["summary"] == {"speedup": 2.0, "lossless": "ties"}
    logged = [value for name, value in fake.calls if name == "log"]
    assert logged[:2] == [{"prompts_done": 1, "speedup": 1.5}, {"prompts_done": 2, "speedup": 2.0}]
    assert logged[2:5] == [
        {"position": 1, "acceptance/unconditional": 0.5, "acceptance/conditional": 0.5},
        {"position": 2, "acceptance/unconditional": 0.2, "acceptance/conditional": 0.4},
        {"position": 3, "acceptance/unconditional": 0.0},
    ]
    assert logged[5] == {"prompts": (["a", "b"], [[1, "x"], [2, None]])}
    assert logged[6] == {"pictures/time": str(tmp_path / "files" / "time.png")}
    assert calls["log_artifact"].name == "results-1"
    assert calls["log_artifact"].files == [("records.jsonl", "mutable")], "and no trace, unless it is asked for"
    assert calls["finish"] == 0
    assert "login" not in calls, "offline needs none"
    assert warnings_of(caplog) == []


def test_every_metric_has_its_axis_before_it_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    use(WandbTracker("p"), tmp_path)
    axes: dict[str, tuple[str | None, str | None]] = {}
    for name, value in fake.calls:
        if name == "define_metric":
            assert value[0] not in axes, "once each"
            axes[value[0]] = value[1].get("step_metric"), value[1].get("summary")
        if name == "log" and not {"prompts", "pictures/time"} & value.keys():
            assert value.keys() <= axes.keys()
    assert axes == {
        "prompts_done": (None, "none"),
        "speedup": ("prompts_done", None),
        "position": (None, "none"),
        "acceptance/unconditional": ("position", "none"),
        "acceptance/conditional": ("position", "none"),
    }


def test_a_trace_is_an_artifact_of_its_own_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    use(WandbTracker("p", trace=True), tmp_path)
    artifacts = [value for name, value in fake.calls if name == "log_artifact"]
    assert [(each.name, each.type) for each in artifacts] == [("results-1", "results"), ("trace-1", "trace")]
    assert artifacts[1].files == [("00000.parquet", "immutable")]


def test_names_that_wandb_would_refuse_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    use(WandbTracker("p", name="n" * 500, tags=["t" * 500]), tmp_path)
    init = dict(fake.calls)["init"]
    assert (len(init["name"]), len(init["tags"][0])) == (128, 64)


def test_several_trackers_fail_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeWandb(broken="summary")
    install(monkeypatch, fake)
    other = Noting()
    use(SeveralTrackers({"wandb": WandbTracker("p"), "off": None, "other": other}), tmp_path)
    assert fake.calls[-1][0] == "summary"
    assert other.told == ["start", "progress", "progress", "summary", "curve", "table", "files", "files", "finish"]
    assert len(warnings_of(caplog)) == 1


class Noting(NullTracker):
    """Notes which of its methods are called."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in Tracker.__dict__ and not name.startswith("_"):
            self.told.append(name)
        return super().__getattribute__(name)


def test_wandb_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, None)
    use(WandbTracker("p"), tmp_path)
    assert len(warnings_of(caplog)) == 1
    assert "not installed" in warnings_of(caplog)[0]


@pytest.mark.parametrize("what", ["init", "summary", "log", "log_artifact", "finish"])
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


def test_online_where_the_run_cannot_begin_is_recorded_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refuses(FakeWandb):
        def init(self, **arguments: Any) -> FakeWandb:
            if arguments["mode"] == "online":
                raise RuntimeError("no permission")
            return super().init(**arguments)

    fake = Refuses()
    install(monkeypatch, fake)
    use(WandbTracker("p", mode="online"), tmp_path)
    assert dict(fake.calls)["init"]["mode"] == "offline"
    assert dict(fake.calls)["finish"] == 0
    (warning,) = warnings_of(caplog)
    assert "no permission. The run is recorded offline" in warning


def test_online_with_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    install(monkeypatch, fake)
    use(WandbTracker("p", mode="online"), tmp_path)
    assert dict(fake.calls)["init"]["mode"] == "online"
    assert dict(fake.calls)["login"]["prompt"] is False, "nobody may be asked to type a key"


def test_bad_mode() -> None:
    with pytest.raises(ValueError, match=r"tracker\.mode='upload'"):
        WandbTracker("p", mode="upload")
