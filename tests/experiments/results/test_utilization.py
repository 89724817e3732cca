"""MBU, MFU, waste and residuals from records, by hand; what is above the roof is said."""

import itertools
from typing import Any

import pytest

from experiments.reporting.run_tables import above_roof, not_recorded, utilization_table
from experiments.results.records import Record
from experiments.results.utilization import CACHES, TOLERANCE, suspicion, utilization_of
from specdec.physics import work
from tests.experiments.made_runs import run_of
from tests.experiments.results.outputs import output

PEAKS = {"copy": 80.0, "read": 100.0, "flops": 1000.0, "cache_bytes": 0.0}
WORK = {
    "verify_bytes": 300.0, "verify_flops": 2000.0, "verify_forwards": 2.0, "useful_flops": 500.0,
    "verified": 8.0, "committed": 6.0,
}  # fmt: skip


def record(prompt: str = "p", rounds: int = 1, **more: Any) -> Record:
    fields = {"seconds": 10.0, "stage_seconds": {"verify": 8.0, "prefill": 1.0}, "work": WORK}
    return output(prompt, "plain", accepted=(0,) * rounds, **fields | more)


def test_utilization_is_counted_by_hand() -> None:
    found = utilization_of([record()], PEAKS)
    # 300 bytes in 8 s of 100 bytes/s, 2000 operations of 1000/s; the least time is that of the bytes.
    assert (found["mbu.verify"], found["mfu.verify"]) == (pytest.approx(300 / 800), pytest.approx(2000 / 8000))
    assert found["of_least.verify"] == pytest.approx(8 / 3) and found["suspicion.verify"] == ""
    assert found["useful_mfu"] == pytest.approx(500 / 8000) and found["wasted"] == pytest.approx(1 - 6 / 8)
    assert [name for name in found if name.startswith("mbu.")] == ["mbu.verify"] and not found["mbu_printed.verify"]
    printed = utilization_of([record()], {**PEAKS, "printed_bandwidth": 200.0, "printed_flops": 4000.0})
    assert printed["mbu_printed.verify"] == pytest.approx(300 / 1600)
    assert printed["mfu_printed.verify"] == pytest.approx(2000 / 32000)


@pytest.mark.parametrize(("cache", "note"), [(0, "FASTER THAN PHYSICS"), (100, "served by caches")])
def test_what_is_above_the_roof_is_said_unless_caches_explain_it(cache: int, note: str) -> None:
    """Two forwards of 150 bytes, which caches of 38 bytes or more may hold."""
    rows = [record(stage_seconds={"verify": 2.0})]
    peaks = {**PEAKS, "cache_bytes": cache}
    assert utilization_of(rows, peaks)["suspicion.verify"].startswith(note)
    said = above_roof(run_of(rows, planned=1, series=1, peaks=peaks))
    assert bool(said) == (not cache)
    if said:
        assert "plain's verify would be faster than physics: it took 67% of the least time" in said[0]


def test_suspicions_are_those_of_the_roofline() -> None:
    """The roof was measured, with noise; and 100 bytes may be in a cache of more than 25."""
    assert (TOLERANCE, CACHES) == (work.TOLERANCE, work.CACHES)
    for of_least, cache in itertools.product((0.5, 0.94, 0.96, 2.0), (0, 20, 30)):
        wanted = "served by caches" if cache == 30 else f"FASTER THAN PHYSICS ({of_least:.2f} of the least time)"
        assert suspicion(of_least, 100.0, cache) == ("" if of_least > 0.95 else wanted)


PREDICTED = {
    **WORK, "predicted_rounds": 2.0, "unpredicted_rounds": 1.0, "predicted_draft": 1.0, "measured_draft": 1.5,
    "predicted_verify": 6.0, "measured_verify": 5.0, "predicted_judge": 0.5, "measured_judge": 0.25,
    "predicted_prefill": 1.2, "measured_prefill": 1.0,
}  # fmt: skip


def test_residuals_add_up_and_are_shown() -> None:
    row = record(work=PREDICTED, round_seconds=(3.0, 3.75, 2.0), predicted_seconds=(3.3, 4.2, None), rounds=3)
    found = utilization_of([row], PEAKS)
    assert (found["prediction.rounds"], found["prediction.outside"]) == (2, 1)
    residual = {name: 2 * found[f"prediction.{name}"] for name in ("draft", "verify", "judge")}
    assert residual == {"draft": 0.5, "verify": -1.0, "judge": -0.25}
    assert sum(residual.values()) == pytest.approx((3.0 - 3.3) + (3.75 - 4.2))
    assert found["predicted_error"] == pytest.approx(7.5 / 6.75 - 1)
    assert found["prediction.median_error"] == found["prediction.p95_error"] == pytest.approx(0.12)
    # And the table shows them.
    rows = [record(work=PREDICTED, round_seconds=(3.0,), predicted_seconds=(3.3,))]
    table = utilization_table(run_of(rows, planned=1, series=1, peaks=PEAKS))
    assert table is not None
    cells = {row[0].text: row[1].text for row in table.rows}
    assert (cells["verify: MBU"], cells["  MFU"]) == ("38%", "25%")
    assert cells["wasted nodes"] == "25%"
    assert cells["  prefill, off by"] == "+20.0%"
    assert cells["predicted rounds; outside of the costs"] == "2; 1"
    assert cells["  measured less predicted, verify, ms per round"] == "-500.000"
    assert utilization_table(run_of([record()], planned=1, series=1)) is None


def test_stages_that_failed_to_be_recorded_are_named_once() -> None:
    failed = {"refused": {"commit": ["RuntimeError: operation not permitted"]}, "by_design": {}}
    fine = {"refused": {}, "by_design": {"requests have logits processors": 9}}
    assert not_recorded({"plain": failed, "medusa": failed, "other": fine}) == [
        "plain, medusa: not recorded, so that it ran slower: commit (RuntimeError: operation not permitted)"
    ]
