"""What of a measurement goes to a tracker: names, running figures, lines, tables and files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.results.records import PLAIN, Record
from experiments.results.rows import Row, rows_of
from experiments.results.statistics import Bootstrap
from experiments.results.summary import summarize
from experiments.tracking.base import NullTracker
from experiments.tracking.mirror import Mirror
from tests.experiments.results.outputs import output


class Noting(NullTracker):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.curves: dict[str, dict[str, Mapping[int, float]]] = {}
        self.figures: dict[str, float | str] = {}
        self.rows: list[Sequence[Any]] = []
        self.kept: dict[str, list[str]] = {}

    def progress(self, figures: Mapping[str, float], prompts: int) -> None:
        self.points.append((prompts, dict(figures)))

    def curve(self, axis: str, lines: Mapping[str, Mapping[int, float]]) -> None:
        self.curves[axis] = dict(lines)

    def summary(self, figures: Mapping[str, float | str]) -> None:
        self.figures = dict(figures)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.rows = [dict(zip(columns, row, strict=True)) for row in rows]

    def files(self, kind: str, paths: Sequence[Path]) -> None:
        self.kept[kind] = [path.name for path in paths]


def record(prompt: int, method: str, temperature: float = 0.0, accepted: Sequence[int] = (2, 0), **more: Any) -> Record:
    """A record of two rounds of depth 2, whose speed is the number of accepted tokens."""
    plain = method == PLAIN
    accepted, depth = ((0, 0), (0, 0)) if plain else (tuple(accepted), (2, 2))
    fields = {"batch": prompt, "prompt_tokens": 4, "temperature": temperature, "accepted": accepted}
    fields |= {"proposed_depth": depth, "equals_plain": None if plain else True}
    return output(f"p{prompt}", method, tokens=sum(accepted) + 2, **fields | more)


def summed_up(records: Sequence[Record], planned: int, series: int = 2) -> list[Row]:
    return rows_of(summarize(records, planned=planned, series=series, bootstrap=Bootstrap(resamples=100)))


def pairs(count: int, method: str = "ngram") -> list[Record]:
    return [each for number in range(count) for each in (record(number, PLAIN), record(number, method))]


def test_the_figures_of_a_runs_one_method_have_bare_names() -> None:
    """So that two runs of different methods have columns in common; figures add lines, a table of prompts and files."""
    names = []
    for method in ("ngram", "medusa"):
        tracker, records = Noting(), pairs(2, method)
        files = [Path("a/records.jsonl")], [Path("a/trace/00000.parquet")]
        Mirror(tracker, [PLAIN, method], [0.0]).results(summed_up(records, 2), records, *files)
        known = {"mean_acceptance_length": 2.0, "draft_acceptance_rate": 0.5, "tokens_per_second": 4.0, "complete": 1.0}
        known |= {"plain/tokens_per_second": 2.0, "lossless": "equal", "exactness": "exact"}
        assert {name: tracker.figures[name] for name in known} == known
        assert tracker.figures["speedup"] == pytest.approx(2.0), "four tokens to plain decoding's two"
        assert [(row["prompt"], row["method"], row["tokens"]) for row in tracker.rows] == [
            (prompt, *each) for prompt in ("p0", "p1") for each in (("plain", 2), (method, 4))
        ]
        assert tracker.kept == {"results": ["records.jsonl"], "trace": ["00000.parquet"]}
        names.append(set(tracker.figures))
    assert names[0] == names[1]


def test_several_methods_or_temperatures_are_told_apart() -> None:
    tracker = Noting()
    records = [record(0, method, t) for t in (0.0, 0.7) for method in (PLAIN, "ngram", "medusa")]
    mirror = Mirror(tracker, [PLAIN, "ngram", "medusa"], [0.0, 0.7])
    mirror.progress(records[:3], 1, 2)
    mirror.results(summed_up(records, 1, series=6), records, [])
    assert tracker.figures["ngram/T=0/speedup"] == tracker.figures["medusa/T=0.7/speedup"] == pytest.approx(2.0)
    assert {name for name in tracker.figures if "/" not in name} == {"complete", "planned"}
    running = {name for name in tracker.points[0][1] if name.endswith("speedup")}
    assert running == {"ngram/T=0/speedup", "medusa/T=0/speedup"}
    assert "medusa/T=0.7/acceptance/conditional" in tracker.curves["position"]
    alone = Mirror(tracker, [PLAIN], [0.0, 1.0])
    records = [record(0, PLAIN, t) for t in (0.0, 1.0)]
    alone.results(summed_up(records, 1), records, [])
    assert {"plain/T=0/tokens", "plain/T=1/tokens"} <= tracker.figures.keys()


def test_running_figures_end_as_the_final_ones() -> None:
    """Also with a failure, which counts nowhere, in neither method."""
    failed = {"finish_reason": "error", "error": "boom", "seconds": None, "token_ids": (), "accepted": ()}
    failed |= {"expected_accepted": (), "proposed_depth": (), "proposed_nodes": ()}
    records = [*pairs(3), record(3, PLAIN), record(3, "ngram", **{**failed, "equals_plain": None})]
    records[1] = record(0, "ngram", accepted=(1, 0))
    tracker = Noting()
    mirror = Mirror(tracker, [PLAIN, "ngram"], [0.0])
    for done in range(1, 5):
        mirror.progress(records[: 2 * done], done, 4)
    mirror.results(summed_up(records, 4), records, [])
    assert [prompts for prompts, _ in tracker.points] == [1, 2, 3, 4]
    assert [point["mean_acceptance_length"] for _, point in tracker.points] == pytest.approx(
        [1.5, 1.75, 11 / 6, 11 / 6]
    )
    last = tracker.points[-1][1]
    assert set(last) == {
        *("speedup", "mean_acceptance_length", "draft_acceptance_rate", "tokens_per_second"),
        *("plain/mean_acceptance_length", "plain/tokens_per_second"),
    }
    assert {name: tracker.figures[name] for name in last} == last


def test_there_are_at_most_a_hundred_points_and_none_where_nothing_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run's records are there from the start: figures at their places would be those of a later time."""
    monkeypatch.setattr("experiments.tracking.mirror.running_figures", lambda *_, **__: {})
    tracker, records = Noting(), pairs(250)
    mirror = Mirror(tracker, [PLAIN, "ngram"], [0.0])
    for done in range(1, 251):
        mirror.progress(records[: 2 * done], done, 250)
    assert 80 <= len(tracker.points) <= 101
    assert tracker.points[-1][0] == 250, "the last one is there"
    tracker.points = []
    mirror.start(None, kept=4)  # type: ignore[arg-type]  # this tracker does not look at the run
    for done, known in ((1, 4), (2, 4), (3, 6), (4, 8)):
        mirror.progress(records[:known], done, 4)
    assert [prompts for prompts, _ in tracker.points] == [3, 4]
