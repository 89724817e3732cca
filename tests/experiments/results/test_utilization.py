"""MBU, MFU and waste from records, by hand."""

from typing import Any

import pytest

from experiments.reporting.run_tables import not_recorded, utilization_table
from experiments.results.records import Record
from experiments.results.utilization import utilization_of
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
    assert found["of_least.verify"] == pytest.approx(8 / 3)
    assert found["useful_mfu"] == pytest.approx(500 / 8000) and found["wasted"] == pytest.approx(1 - 6 / 8)
    assert [name for name in found if name.startswith("mbu.")] == ["mbu.verify"] and not found["mbu_printed.verify"]
    printed = utilization_of([record()], {**PEAKS, "printed_bandwidth": 200.0, "printed_flops": 4000.0})
    assert printed["mbu_printed.verify"] == pytest.approx(300 / 1600)
    assert printed["mfu_printed.verify"] == pytest.approx(2000 / 32000)
    # And the table shows them.
    table = utilization_table(run_of([record()], planned=1, series=1, peaks=PEAKS))
    assert table is not None
    cells = {row[0].text: row[1].text for row in table.rows}
    assert (cells["verify: MBU"], cells["  MFU"], cells["wasted nodes"]) == ("38%", "25%", "25%")
    assert utilization_table(run_of([record()], planned=1, series=1)) is None


def test_stages_that_failed_to_be_recorded_are_named_once() -> None:
    failed = {"refused": {"commit": ["RuntimeError: operation not permitted"]}, "by_design": {}}
    fine = {"refused": {}, "by_design": {"requests have logits processors": 9}}
    assert not_recorded({"plain": failed, "medusa": failed, "other": fine}) == [
        "plain, medusa: not recorded, so that it ran slower: commit (RuntimeError: operation not permitted)"
    ]
