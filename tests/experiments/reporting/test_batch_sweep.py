"""Latency against throughput over batch sizes: knees and crossings by hand, and what is said and drawn of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.reporting.batch_sweep import curve, curves, report_batch_sweep, sentences
from experiments.results.frame import Figures
from experiments.results.records import Record
from experiments.results.runs import Run
from tests.experiments.made_runs import loaded
from tests.experiments.results.outputs import moments, output

BATCHES = (1, 2, 4, 8)
# Seconds per round by batch size: the fixed part is shared up to 4 rows, then every row costs its own. Speculation
# emits two tokens per round, which costs 1.2 times as much at batch 1 and ever more above.
PLAIN = {1: 0.10, 2: 0.10, 4: 0.11, 8: 0.22}
FAST = {1: 0.12, 2: 0.13, 4: 0.17, 8: 0.44}
TOKENS = 8


def records(batch: int) -> list[Record]:
    """Two full batches of requests of 8 tokens, without queue or prefill."""
    found = []
    for number in range(2 * batch):
        for method, per_round, emitted in (("plain", PLAIN[batch], 1), ("fast", FAST[batch], 2)):
            seen = [(per_round * (place + 1), emitted) for place in range(TOKENS // emitted)]
            fields = {"batch": number // batch, "seconds": seen[-1][0], "accepted": (emitted - 1,) * len(seen)}
            found.append(output(f"p{number}", method, **fields | moments(*seen)))
    return found


def run_at(folder: Path, batch: int) -> Run:
    setting = f"engine.max_batch_size={batch}"
    facts: dict[str, Any] = {"planned": 2 * batch, "config": {"engine": {"max_batch_size": batch}}}
    return loaded(folder / str(batch), setting, records=records(batch), **facts)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("sweep")
    return [run_at(folder, batch) for batch in reversed(BATCHES)]  # in any order


def test_curves_by_hand(runs: list[Run]) -> None:
    plain, fast = curves(runs)
    assert (plain.method, fast.method) == ("plain", "fast")
    assert [point.batch for point in plain.points] == list(BATCHES)
    assert [point.tpot for point in plain.points] == pytest.approx(list(PLAIN.values()))
    # Batch 4 emits 4 tokens in 0.11 s. Drafted: after the first of 8 tokens, 7 more in 3 rounds of 0.17 s.
    assert plain.points[2].tokens_per_second == pytest.approx(4 / 0.11)
    assert fast.points[2].tokens_per_second == pytest.approx(8 / 0.17)
    assert fast.points[2].tpot == pytest.approx(3 * 0.17 / 7)
    assert [point.speedup for point in fast.points] == pytest.approx([2 * PLAIN[b] / FAST[b] for b in BATCHES])
    # The knee, where throughput over latency is largest: 331 at 4 rows, 200 at 2, 165 at 8.
    assert (plain.knee, fast.knee) == (4, 4)
    first = curve("plain", 0.0, plain.points[:3])
    assert (first.top.batch, first.knee) == (4, None)  # at the end of the range, it may go on


def point(batch: int, speedup: float, spread: float) -> Figures:
    interval = (speedup - spread, speedup + spread)
    return Figures(batch=batch, speedup=speedup, speedup_interval=interval, tokens_per_second=1.0, tpot=1.0)


def test_crossings_on_a_logarithmic_scale(runs: list[Run]) -> None:
    (crossing,) = curves(runs)[1].crossings
    # The speedup is 0.22/0.17 = 1.29 at batch 4, and exactly 1 at batch 8: that is not above 1 any more.
    assert (crossing.before, crossing.after, crossing.stops) == (4, 8, True)
    assert crossing.at == pytest.approx(8.0) and not crossing.certain  # the interval at batch 8 holds 1
    down, up = curve("fast", 0.0, [point(b, s, 0.01) for b, s in ((2, 1.2), (8, 0.8), (32, 1.6))]).crossings
    assert (down.at, down.stops, down.certain) == (pytest.approx(4.0), True, True)  # half way from 2 to 8
    assert (up.at, up.stops) == (pytest.approx(8 * 4 ** (1 / 4)), False)
    wide = curve("fast", 0.0, [point(b, s, 0.3) for b, s in ((2, 1.2), (8, 0.8))])
    assert "one of them holds 1" in sentences([wide])[1]


def test_what_is_written_and_said(runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_batch_sweep(runs, tmp_path)
    said = capsys.readouterr().out
    assert "plain decoding: knee at batch 4, 36 tokens/s at 110.0 ms per token" in said
    assert "stops to be faster than plain decoding between batch 4 and 8, at about 8.0" in said
    assert {path.name for path in tmp_path.iterdir()} == {
        "batch_sweep.md", "batch_sweep.json", "batch_sweep.png", "batch_sweep.svg"
    }  # fmt: skip
    figures = json.loads((tmp_path / "batch_sweep.json").read_text())["curves"]
    assert [each["knee"] for each in figures] == [4, 4]
    assert "closed loop" in (tmp_path / "batch_sweep.svg").read_text()
    with pytest.raises(ValueError, match="needs runs at two of them"):
        report_batch_sweep(runs[:1], tmp_path)
