"""Two-way tables and heat maps: which settings become rows and columns, and what the cells say."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments.reporting.studies.two_way import long_table, report_two_way, two_way_table
from experiments.reporting.table import Emphasis
from experiments.results.comparison import Entry, Grid, entries_of, grids
from experiments.results.runs import Run
from tests.experiments.made_runs import loaded


@pytest.fixture(scope="module")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return loaded(tmp_path_factory.mktemp("runs") / "one")


def rows(run: Run, *jobs: str, **facts: Any) -> list[Entry]:
    """A row for each job, by its overrides."""
    manifests = [run.manifest | {"overrides": job.split()} | facts for job in jobs]
    runs = [replace(run, folder=Path(str(number)), manifest=each) for number, each in enumerate(manifests)]
    return entries_of(runs)


def squares(first: str, second: str) -> list[str]:
    """All combinations of two settings, given as ``name=a,b``."""
    (one, some), (other, more) = ((text.split("=")[0], text.split("=")[1].split(",")) for text in (first, second))
    return [f"{one}={a} {other}={b}" for a in some for b in more]


def test_two_settings_make_rows_and_columns_and_what_was_not_given_is_the_configurations(made_run: Run) -> None:
    config = {
        "dataset": {"seed": 0},
        "drafter": {"shape": 4, "sampling": "iid"},
        "bootstrap": {"confidence": 0.95, "resamples": 100, "seed": 0},
        "engine": {"max_batch_size": 1},
    }
    jobs = squares("drafter.shape=2,8", "drafter.sampling=iid,coupled")
    (grid,) = grids(rows(made_run, *jobs, "drafter.sampling=coupled", "", config=config))
    assert (grid.down, grid.across) == ("drafter.shape", "drafter.sampling"), "the one with more values is down"
    assert (grid.rows, grid.columns, grid.fixed) == (("2", "4", "8"), ("iid", "coupled"), {})
    assert set(grid.cells) == {(row, column) for row in "248" for column in ("iid", "coupled")}
    assert grid.cells["4", "iid"]["mean_acceptance_length"] == pytest.approx(
        1 + (2 + 1 + 0 + 2 + 1 + 1 + 2 + 1 + 0) / 9
    )


# One setting; a diagonal: three of nine cells; one run.
@pytest.mark.parametrize("jobs", [["a=1", "a=2"], ["a=1 b=1", "a=2 b=2", "a=3 b=3"], ["a=1 b=1"]])
def test_no_table_of_less_than_two_settings(jobs: list[str], made_run: Run) -> None:
    assert grids(rows(made_run, *jobs)) == []


def test_the_table_and_its_files(made_run: Run, tmp_path: Path) -> None:
    found = rows(made_run, *squares("a=1,2", "b=x,y"))
    # Put together by hand: without records, intervals that do not overlap make a winner.
    made = [entry._replace(run=replace(entry.run, outputs=None)) for entry in found]

    def grid_of(low: float, high: float) -> Grid:
        fast = made[0].row | {"speedup": 3.0, "speedup_low": low, "speedup_high": high}
        broken = made[3].row | {"speedup": 9.0, "speedup_low": 8.0, "speedup_high": 10.0, "competes": False}
        (found,) = grids([made[0]._replace(row=fast), *made[1:3], made[3]._replace(row=broken)])
        return found

    unsure = two_way_table(grid_of(0.7, 4.2), 0.95)
    assert {cell.emphasis for row in unsure.rows for cell in row} == {Emphasis.NONE}, "chance may have made it the best"
    assert not any("bold" in note for note in unsure.notes)
    grid = grid_of(2.9, 3.1)
    table = two_way_table(grid, 0.95, notes=["NOISY TIMINGS in 1 of 4 runs"])
    assert table.notes[-1] == "NOISY TIMINGS in 1 of 4 runs" and any("bold" in note for note in table.notes)
    assert [column.heading for column in table.columns] == ["a \\ b", "x", "y"]
    assert table.rows[0][1].stacked.splitlines()[1] == "3.00x [2.90, 3.10]"
    marks = {cell.emphasis for row in table.rows for cell in row[1:] if cell is not table.rows[0][1]}
    assert table.rows[0][1].emphasis is Emphasis.BEST, "the fastest exact method"
    assert marks == {Emphasis.NONE}, "not the one that is not lossless, which is faster"
    assert len(long_table([grid])) == 4
    assert list(long_table([grid]).columns)[:3] == ["a", "b", "mean_acceptance_length"]

    out = Console(width=120, file=io.StringIO(), record=True)
    written = report_two_way(found, tmp_path, "conditions", out)
    assert [path.name for path in written] == ["two_way.md", "two_way.csv", "heat_map.png"]
    assert all(path.stat().st_size for path in written) and "a by b" in out.export_text()
    assert (tmp_path / "two_way.md").read_text().count("| a \\ b | x | y |") == 1
    assert report_two_way(found[:1], tmp_path, "", out) == []
