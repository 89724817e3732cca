"""Figures of runs that can be computed by hand, and the report that is made of them."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from experiments.load.arrivals import Gaps
from experiments.load.driver import Overload
from experiments.load.figures import figures_of, knee, latencies, little, warnings_of
from experiments.load.run import CLOSED, DROPPED, FAILED, OPEN, UNFINISHED, LoadRun
from experiments.reporting.load import LoadReport, load_tables, report_load
from experiments.results.limits import Limits, Terms
from experiments.results.statistics import Bootstrap
from tests.experiments.load.one_server import driven, requests

BOOTSTRAP = Bootstrap(resamples=100)
LIMITS = Terms(limits=Limits(ttft=3.5, tpot=1.0))


def figures(run: LoadRun, terms: Terms = LIMITS) -> Any:
    return figures_of([run], terms, BOOTSTRAP).iloc[0]


def test_latencies_are_those_of_the_definitions() -> None:
    run = driven([1.0, 2.0, 10.0], lambda number: [(3.0, 1), (2.0, 3)] if number < 2 else [(3.0, 1)])
    found = latencies(run)[["queue", "ttft", "engine_ttft", "tpot", "e2e"]].to_numpy().tolist()
    expected = [[0, 3, 3, 2 / 3, 5], [4, 7, 3, 2 / 3, 9], [1, 4, 3, np.nan, 4]]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_request_lasts_its_first_token_and_the_others() -> None:
    """e2e = TTFT + (N - 1) · TPOT, exactly; the mutant with N tokens is not."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 5, (300, 3))
    run = driven(Gaps(rate=0.3).times(rng, 300), lambda number: [(0.3 * (1 + n), int(n)) for n in sizes[number] if n])
    found = latencies(run)
    others = found.output_tokens - 1
    np.testing.assert_allclose(found.ttft + others * found.tpot.fillna(0), found.e2e, rtol=1e-12)
    assert not np.allclose(found.ttft + found.output_tokens * found.tpot.fillna(0), found.e2e, rtol=1e-3)
    np.testing.assert_allclose(found.queue + found.engine_ttft, found.ttft, rtol=1e-12)


def ten(late: int, overload: Overload | None = None) -> LoadRun:
    """Ten requests, 5 s apart, of which so many come 3 s late with their first token."""
    return driven(5.0 * np.arange(10), lambda number: [(4.0 if number < late else 1.0, 1)], overload=overload)


def test_goodput_counts_what_keeps_every_limit() -> None:
    found = figures(ten(late=3))
    assert found.attained == 0.7
    assert found.goodput == pytest.approx(0.7 * found.requests_per_second)
    assert found.requests_per_second == pytest.approx(10 / 46)
    assert figures(ten(late=3), Terms(limits=Limits(ttft=4.5))).attained == 1.0
    assert figures(ten(late=0), Terms(limits=Limits(e2e=0.9))).attained == 0.0
    assert "goodput" not in figures(ten(late=0), Terms())
    assert (found["ttft.p50"], found["ttft.p99"]) == pytest.approx((1.0, 4.0))
    assert (found["ttft.p90_low"], found["ttft.p90_high"]) == pytest.approx((1.0, 4.0)), "over requests"


def test_dropped_failed_and_unfinished_requests_are_missed_and_in_no_latency() -> None:
    run = ten(late=0)
    for number, outcome in enumerate((DROPPED, FAILED, UNFINISHED)):
        run.requests.loc[number, "outcome"] = outcome
    found = figures(run)
    assert (found.done, found.dropped, found.failed, found.unfinished, found.arrived) == (7, 1, 1, 1, 10)
    assert found.attained == 0.7 and found["ttft.p99"] == pytest.approx(1.0)
    assert found.output_tokens_per_second == pytest.approx(7 / run.seconds) and found.dropped_tokens == 3


def test_littles_law_holds_unless_timestamps_are_wrong() -> None:
    rng = np.random.default_rng(2)
    seconds = rng.exponential(1.0, 400)
    run = driven(Gaps(rate=0.7).times(rng, 400), lambda number: [(float(seconds[number]), 1)])
    balance = little(run)
    assert balance["in_engine"] == pytest.approx(balance["expected"], rel=1e-6)
    assert balance["running"] < 1.0 < balance["in_engine"]
    assert balance["running"] == pytest.approx(seconds.sum() / run.seconds, rel=1e-6)
    found = figures(run)
    assert not warnings_of(run, found) and found.unused == pytest.approx(1 - balance["running"])
    stays = run.requests.finished - run.requests.submitted
    wrong = replace(run, requests=run.requests.assign(finished=run.requests.submitted + 0.9 * stays))
    assert [text.partition(":")[0] for text in warnings_of(wrong, figures(wrong))] == ["BROKEN TIMESTAMPS"]


def test_classes_are_told_apart() -> None:
    asked = requests(10, lambda number: "even" if number % 2 == 0 else "odd")
    run = driven(5.0 * np.arange(10), lambda number: [(1.0 if number % 2 == 0 else 4.0, 1)], asked=asked)
    found = figures_of([run], LIMITS, BOOTSTRAP).set_index("group")
    assert found[["arrived", "attained"]].to_numpy().tolist() == [[10, 0.5], [5, 1.0], [5, 0.0]]
    assert found.index.tolist() == ["all", "even", "odd"] and found.loc["odd", "ttft.p50"] == pytest.approx(4.0)


def test_the_knee_is_the_highest_rate_below_which_limits_are_kept() -> None:
    def at(*shares: tuple[float, float | None]) -> pandas.DataFrame:
        return pandas.DataFrame(shares, columns=["rate", "attained"])

    assert knee(at((4, 0.95), (1, 1.0), (2, 0.92))) == 4
    assert knee(at((1, 1.0), (2, 0.5), (4, 1.0))) == 1, "what comes behind a miss does not count"
    assert knee(at((1, 0.95)), 0.99) is None and knee(at((1, None))) is None


def loads(loop: str, *rates: float) -> list[LoadRun]:
    """Two methods, the second one half as fast."""
    found = []
    for rate, (method, seconds) in itertools.product(rates, (("plain", 0.2), ("m: a | long name", 0.4))):
        times = Gaps(rate=rate).times(np.random.default_rng(0), 30) if loop == OPEN else np.zeros(30)
        asked = requests(30, lambda number: "short" if number % 3 else "long")
        rounds = [(seconds / 2, 1), (seconds / 2, 3)]
        given = {"asked": asked, "loop": loop, "users": int(rate), "method": method, "rate": rate}
        found.append(driven(times, lambda _, own=rounds: own, **given))
    return found


def test_a_report_has_its_pictures_tables_and_timeline(tmp_path: Path) -> None:
    terms = Terms(limits=Limits(ttft=0.5, tpot=0.1))
    report = LoadReport(folder=tmp_path, terms=terms, bootstrap=BOOTSTRAP, title="T", notes=["A note."], spare=0.5)
    found, written = report_load(loads(OPEN, 1.0, 4.0), report)
    names = {path.name for path in written}
    assert {"knee.png", "load.png"} < names
    assert all(path.is_file() and path.stat().st_size > 500 for path in written)
    text = (tmp_path / "load.md").read_text()
    assert text.count("open loop: ") == text.count("## ") == 4, "under every table"
    assert all(part in text for part in ("TTFT ≤ 500 ms, TPOT ≤ 100 ms", "A note.", "of slots and time were unused"))
    assert "highest rate up to which 90% of requests keep all limits" in text
    kept = json.loads((tmp_path / "load.json").read_text())["runs"]
    assert kept[0]["ttft.p50"] == pytest.approx(found["ttft.p50"][0])
    halves = [row["times_tokens"] for row in kept if row.get("times_tokens") is not None]
    assert halves == pytest.approx([0.5, 0.5]), "the other method is half as fast"
    events = json.loads((tmp_path / "plain_4" / "timeline.json").read_text())["traceEvents"]
    assert all({"name", "ph", "pid"} <= event.keys() for event in events)
    whole = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in whole) and len(whole) == 60 + 3 * 30
    assert sum(event["dur"] for event in whole if event["pid"] == 1) == pytest.approx(1e6 * 30 * 0.2)


def test_one_closed_loop_without_limits_and_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    runs = loads(CLOSED, 3.0)
    _, written = report_load(runs, LoadReport(folder=tmp_path, terms=Terms(), bootstrap=BOOTSTRAP, title="T"))
    names = {path.name for path in written}
    assert not names & {"knee.png", "load.png"}, "one rate is no line"
    text = (tmp_path / "load.md").read_text()
    assert "no limits were given" in text and "closed loop: " in text and "open loop" not in text
    runs[0].save(tmp_path / "run")
    again = LoadRun.load(tmp_path / "run")
    assert figures(again).equals(figures(runs[0])) and again.turns.equals(runs[0].turns)


def test_preemption_and_swap_stand_beside_goodput() -> None:
    run = ten(late=0)
    totals = replace(run.totals, swapped_out=120, swap_seconds=0.25, preempted=3, recomputed=40)
    frame = run.requests.assign(preemptions=[3, *[0] * 9], recomputed_tokens=[40, *[0] * 9], preempted_seconds=0.5)
    run = replace(run, totals=totals, requests=frame)
    found = figures(run)
    assert (found.swapped_tokens, found.swap_seconds, found.preempted_seconds) == (120, 0.25, 5.0)
    report = LoadReport(folder=Path(), terms=LIMITS, bootstrap=BOOTSTRAP, title="T")
    cells = [cell.text for cell in load_tables([found.to_dict()], report)[1].rows[0]]
    assert {"3; 40", "120", "250"} <= set(cells)
