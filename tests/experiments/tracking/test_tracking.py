"""Trackers: what of a measurement goes there, wandb itself offline and failing, and whole runs and sweeps."""

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, MagicMock, call, create_autospec

import pytest
import yaml

from experiments.commands.settings import RunSettings
from experiments.config.sections import plain, typed, values_of
from experiments.results.manifest import ROOT
from experiments.results.records import PLAIN, Record
from experiments.tracking.base import TrackedRun, Tracker
from experiments.tracking.mirror import Mirror
from experiments.tracking.wandb import WandbTracker
from specdec.tree import TreeShape
from tests.experiments.made_runs import output, run_of
from tests.experiments.runs import Configure, launched


def record(prompt: int, method: str, temperature: float = 0.0, accepted: Sequence[int] = (2, 0), **more: Any) -> Record:
    """A record of two rounds of depth 2, whose speed is the number of accepted tokens."""
    accepted, depth, equal = ((0, 0), (0, 0), None) if method == PLAIN else (tuple(accepted), (2, 2), True)
    fields = {"batch": prompt, "prompt_tokens": 4, "temperature": temperature, "accepted": accepted}
    fields |= {"proposed_depth": depth, "equals_plain": equal}
    return output(f"p{prompt}", method, tokens=sum(accepted) + 2, **fields | more)


def pairs(count: int) -> list[Record]:
    return [each for number in range(count) for each in (record(number, PLAIN), record(number, "ngram"))]


@pytest.fixture
def tracker() -> Any:
    return create_autospec(Tracker, instance=True)


def points(tracker: Any) -> list[tuple[int, dict[str, float]]]:
    return [(prompts, figures) for figures, prompts in (each.args for each in tracker.progress.mock_calls)]


def test_the_figures_of_a_runs_one_method_have_bare_names(tracker: Any) -> None:
    """So that two runs of different methods have columns in common; figures add lines, a table of prompts and files."""
    records = pairs(2)
    files = [Path("a/records.jsonl")], [Path("a/trace/00000.parquet")]
    Mirror(tracker, [PLAIN, "ngram"], [0.0]).results(run_of(records).rows, records, *files)
    (figures,) = tracker.summary.call_args.args
    known = {"mean_acceptance_length": 2.0, "draft_acceptance_rate": 0.5, "tokens_per_second": 4.0, "complete": 1.0}
    known |= {"plain/tokens_per_second": 2.0, "lossless": "equal", "exactness": "exact"}
    assert {name: figures[name] for name in known} == known
    assert figures["speedup"] == pytest.approx(2.0), "four tokens to plain decoding's two"
    _, columns, rows = tracker.table.call_args.args
    prompts = [dict(zip(columns, row, strict=True)) for row in rows]
    assert [(row["prompt"], row["method"], row["tokens"]) for row in prompts] == [
        (prompt, *each) for prompt in ("p0", "p1") for each in (("plain", 2), ("ngram", 4))
    ]
    assert tracker.files.mock_calls == [call("results", files[0]), call("trace", files[1])]


def test_several_methods_or_temperatures_are_told_apart(tracker: Any) -> None:
    records = [record(0, method, t) for t in (0.0, 0.7) for method in (PLAIN, "ngram", "medusa")]
    mirror = Mirror(tracker, [PLAIN, "ngram", "medusa"], [0.0, 0.7])
    mirror.progress(records[:3], 1, 2)
    mirror.results(run_of(records, planned=1, series=6).rows, records, [])
    (figures,) = tracker.summary.call_args.args
    assert figures["ngram/T=0/speedup"] == figures["medusa/T=0.7/speedup"] == pytest.approx(2.0)
    assert {name for name in figures if "/" not in name} == {"complete", "planned"}
    running = {name for name in points(tracker)[0][1] if name.endswith("speedup")}
    assert running == {"ngram/T=0/speedup", "medusa/T=0/speedup"}
    assert "medusa/T=0.7/acceptance/conditional" in dict(each.args for each in tracker.curve.mock_calls)["position"]


def test_running_figures_end_as_the_final_ones(tracker: Any) -> None:
    """Also with a failure, which counts nowhere, in neither method."""
    failed = dict.fromkeys(("token_ids", "accepted", "expected_accepted", "proposed_depth", "proposed_nodes"), ())
    failed |= {"finish_reason": "error", "error": "boom", "seconds": None, "equals_plain": None}
    records = [*pairs(3), record(3, PLAIN), record(3, "ngram", **failed)]
    records[1] = record(0, "ngram", accepted=(1, 0))
    mirror = Mirror(tracker, [PLAIN, "ngram"], [0.0])
    for done in range(1, 5):
        mirror.progress(records[: 2 * done], done, 4)
    mirror.results(run_of(records, planned=4).rows, records, [])
    prompts, figures = zip(*points(tracker), strict=True)
    assert prompts == (1, 2, 3, 4)
    assert [each["mean_acceptance_length"] for each in figures] == pytest.approx([1.5, 1.75, 11 / 6, 11 / 6])
    both = {"mean_acceptance_length", "tokens_per_second"}
    assert set(figures[-1]) == both | {"speedup", "draft_acceptance_rate"} | {f"plain/{name}" for name in both}
    assert tracker.summary.call_args.args[0].items() >= figures[-1].items()


def test_there_are_at_most_a_hundred_points_and_none_where_nothing_is_new(tracker: Any, monkeypatch: Any) -> None:
    """A resumed run's records are there from the start: figures at their places would be those of a later time."""
    monkeypatch.setattr("experiments.tracking.mirror.running_figures", lambda *_, **__: {})
    mirror, records = Mirror(tracker, [PLAIN, "ngram"], [0.0]), pairs(250)
    for done in range(1, 251):
        mirror.progress(records[: 2 * done], done, 250)
    assert 80 <= len(points(tracker)) <= 101
    assert points(tracker)[-1][0] == 250, "the last one is there"
    tracker.reset_mock()
    mirror.start(None, kept=4)  # type: ignore[arg-type]  # this tracker does not look at the run
    for done, known in ((1, 4), (2, 4), (3, 6), (4, 8)):
        mirror.progress(records[:known], done, 4)
    assert [prompts for prompts, _ in points(tracker)] == [3, 4]


def use(tracker: Tracker, folder: Path) -> None:
    tracker.start(TrackedRun(folder=folder, config={"seed": 1}, name="drafter=x", group="night", command="run"))
    tracker.progress({"speedup": 1.5}, 1)
    tracker.summary({"speedup": 2.0, "lossless": "ties"})
    tracker.curve("position", {"acceptance/conditional": {1: 0.5, 2: 0.4}})
    tracker.table("prompts", ["a", "b"], [[1, "x"], [2, None]])
    tracker.files("results", [folder / "records.jsonl"])
    tracker.finish(0)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in records if record.name.startswith("experiments.tracking")]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Stands in for the package; its run is ``wandb.init.return_value``."""
    fake = MagicMock()
    fake.login.return_value = True
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("experiments.tracking.wandb.GRACE", 0.1)
    return fake


def fails(*_: object, **__: object) -> None:
    raise RuntimeError("it is\nbroken")


def hangs(**_: object) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("method", "does", "said"),
    [("init.return_value.log", fails, "RuntimeError: it is broken"), ("init", hangs, "no answer within")],
)
def test_trouble_is_one_warning_and_no_more_calls(method, does, said, wandb, tmp_path, caplog) -> None:
    """A call that hangs is left behind."""
    wandb.configure_mock(**{f"{method}.side_effect": does})
    use(WandbTracker("p", timeout=0.5), tmp_path)
    run = wandb.init.return_value
    assert run.log.call_count == (does is fails) and not run.summary.update.called and not run.finish.called
    (warning,) = warnings_of(caplog)
    assert said in warning


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("login.return_value", False),
        ("login.side_effect", hangs),
        ("init.side_effect", lambda mode, **_: fails() if mode == "online" else DEFAULT),
    ],
)
def test_online_where_a_run_cannot_begin_it_is_recorded_offline(setting, value, wandb, tmp_path, caplog) -> None:
    wandb.configure_mock(**{setting: value})
    use(WandbTracker("p", mode="online", timeout=1), tmp_path)
    assert wandb.init.call_args.kwargs["mode"] == "offline"
    wandb.init.return_value.finish.assert_called_once_with(exit_code=0)
    (warning,) = warnings_of(caplog)
    assert "recorded offline" in warning


def test_online_with_a_login_and_a_service_that_has_died_is_left(wandb, tmp_path, caplog) -> None:
    use(WandbTracker("p", mode="online", timeout=1), tmp_path)
    assert wandb.init.call_args.kwargs["mode"] == "online"
    assert wandb.login.call_args.kwargs["prompt"] is False, "nobody may be asked to type a key"
    run = wandb.init.return_value
    run.define_metric.assert_any_call("acceptance/conditional", step_metric="position", summary="none")
    logged = [each.args[0] for each in run.log.mock_calls]
    assert logged[:2] == [{"prompts_done": 1, "speedup": 1.5}, {"position": 1, "acceptance/conditional": 0.5}]
    wandb.reset_mock()
    wandb.init.side_effect = [RuntimeError("died"), DEFAULT]
    use(WandbTracker("p", timeout=1), tmp_path)
    assert wandb.teardown.called and not warnings_of(caplog), "the next run of a sweep is recorded"
    wandb.init.return_value.finish.assert_called_once_with(exit_code=0)


def test_a_sweep_is_a_group_at_wandb_and_all_of_a_run_is_in_its_file(tiny, tmp_path, monkeypatch) -> None:
    """The file is a log of blocks of 32 KiB, each of which begins with a header of seven bytes."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    kept = [text for text in tiny if not text.startswith("out=")]
    sweep = [f"hydra.sweep.dir={tmp_path / 'night'}", "hydra.sweep.subdir=${hydra.job.num}"]
    more = ["drafter=ngram", "drafter.max_draft_tokens=2,4", "trace=true"]
    more += ["tracker=wandb", "tracker.timeout=120", "tracker.trace=true", "tracker.project=mine", "tracker.tags=[own]"]
    assert launched("-m", *kept, *more, *sweep, monkeypatch=monkeypatch) == 0
    for job, tokens in (("0", 2), ("1", 4)):
        (path,) = (tmp_path / "night" / job / "wandb").glob("*run-*/*.wandb")
        expected = ["mine", "own", "night", f"drafter.max_draft_tokens={tokens} ", "NGramDrafter", "prompts_done"]
        expected += ["acceptance/conditional", "position", "lossless", "summary.json", "00000.parquet"]
        expected += ["prompts.table.json", "media/images/pictures/time"]
        limit, missing = time.monotonic() + 60.0, expected
        while missing:  # wandb's service writes the last block a little after it has said so
            assert time.monotonic() < limit, missing
            data = path.read_bytes()
            text = b"".join(data[at + 7 : at + 32768] for at in range(0, len(data), 32768))
            missing = [word for word in expected if word.encode() not in text]


@pytest.mark.full
@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_an_agent_would_run_is_a_run(path: Path, configure: Configure) -> None:
    sweep = yaml.safe_load(path.read_text())
    assert (ROOT / sweep["program"]).is_file()
    assert sweep["metric"] == {"name": "speedup", "goal": "maximize"}
    program, words, (arguments,) = sweep["command"][:4], sweep["command"][4:-1], sweep["command"][-1:]
    assert program == ["${env}", "${interpreter}", "-m", "experiments.run"] and arguments == "${args_no_hyphens}"
    values = {name: choice.get("values", [choice.get("value")]) for name, choice in sweep["parameters"].items()}
    for number in range(max(map(len, values.values()))):
        config = configure("run", *words, *(f"{name}={each[number % len(each)]}" for name, each in values.items()))
        # Hydra itself resolves these two, which a composition outside of it cannot.
        given = {str(name): plain(config, str(name)) for name in config if name not in ("out", "method")}
        typed(RunSettings, values_of(RunSettings, given | {"out": ".", "method": "m"}))
        assert config.tracker.mode == "online", "an agent's run has to be seen by wandb"
        assert TreeShape.of(plain(config, "drafter.shape"))
