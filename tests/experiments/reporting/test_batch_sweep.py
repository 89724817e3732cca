"""Latency against throughput over batch sizes: knees and crossings by hand, and what is said and drawn of them."""

import json
from pathlib import Path
from typing import Any

import pandas
import pytest

from experiments.reporting.studies.batch_sweep import BATCH, crossings, report
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
    frame = report.frame(runs)
    plain, fast = (own for _, own in frame.groupby("name", sort=False))
    assert list(plain[BATCH]) == list(fast[BATCH]) == list(BATCHES)
    assert list(plain["tpot.p50"]) == pytest.approx(list(PLAIN.values()))
    # Batch 4 emits 4 tokens in 0.11 s. Drafted: after the first of 8 tokens, 7 more in 3 rounds of 0.17 s.
    assert plain.output_tokens_per_second.iloc[2] == pytest.approx(4 / 0.11)
    assert fast.output_tokens_per_second.iloc[2] == pytest.approx(8 / 0.17)
    assert fast["tpot.p50"].iloc[2] == pytest.approx(3 * 0.17 / 7)
    assert list(fast.speedup) == pytest.approx([2 * PLAIN[b] / FAST[b] for b in BATCHES])
    # The knee, where throughput over latency is largest: 331 at 4 rows, 200 at 2, 165 at 8.
    assert list(frame[BATCH][frame.knee != ""]) == [4, 4]
    assert set(report.frame([run for run in runs if run is not runs[0]]).knee) == {""}, "it may go on after batch 4"


def points(*speeds: tuple[int, float], spread: float) -> pandas.DataFrame:
    rows = [{BATCH: b, "speedup": s, "speedup_low": s - spread, "speedup_high": s + spread} for b, s in speeds]
    return pandas.DataFrame(rows)


def test_crossings_on_a_logarithmic_scale(runs: list[Run]) -> None:
    frame = report.frame(runs)
    ((at, words),) = crossings(frame[frame.name == "fast"])
    # The speedup is 0.22/0.17 = 1.29 at batch 4, and exactly 1 at batch 8: that is not above 1 any more.
    assert at == pytest.approx(8.0) and words.startswith("stops to be faster than plain decoding between batch 4 and 8")
    assert words.endswith("one of them holds 1"), "the interval at batch 8"
    down, up = crossings(points((2, 1.2), (8, 0.8), (32, 1.6), spread=0.01))
    assert down[0] == pytest.approx(4.0) and down[1].startswith("stops"), "half way from 2 to 8"
    assert up[0] == pytest.approx(8 * 4 ** (1 / 4)) and up[1].startswith("begins") and "holds 1" not in up[1]
    assert "holds 1" in crossings(points((2, 1.2), (8, 0.8), spread=0.3))[0][1]


def test_what_is_written_and_said(runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(runs, tmp_path)
    said = capsys.readouterr().out
    assert "plain, T=0: knee at batch 4" in said
    assert "stops to be faster than plain decoding between batch 4 and 8, at about 8.0" in said
    assert {path.name for path in tmp_path.iterdir()} == {
        "batch_sweep.md", "batch_sweep.json", "batch_sweep.png", "batch_sweep.svg"
    }  # fmt: skip
    rows = json.loads((tmp_path / "batch_sweep.json").read_text())["rows"]
    assert [row[BATCH] for row in rows if row["knee"]] == [4, 4]
    assert "knee: largest throughput" in (tmp_path / "batch_sweep.svg").read_text()
    with pytest.raises(ValueError, match=r"needs runs .* at two values of engine\.max_batch_size or more: give engine"):
        report(runs[:1], tmp_path)
