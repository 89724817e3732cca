"""Results as frames: right figures, the documented columns, and nothing needed but pandas and scipy."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest

from experiments import results
from experiments.results.data import PROMPTS, ROUNDS, RUNS
from experiments.results.records import GREEDY_BELOW, Record, RecordWriter
from experiments.results.runs import load_run
from experiments.results.summary import SCHEMA
from experiments.results.timing import STAGES
from specdec.engine import clock
from specdec.requests import GREEDY_BELOW as ENGINES_GREEDY_BELOW
from tests.experiments.made_runs import made

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "measurements.md"

FACTS: dict[str, Any] = {
    "started": "2026-03-01T12:00:00+01:00",
    "threads": 2,
    "target": {"name": "bundled/target", "parameters": 1000},
    "versions": {"torch": "2.13.0", "wandb": None},
    "machine": {"system": "Linux x86_64", "processor": "a processor", "gpus": ["A", "B"]},
    "peaks": {"copy": 80.0, "read": 100.0, "flops": 1000.0, "cache_bytes": 0},
}


def lossy_round(folder: Path, **more: Any) -> None:
    """Append one output of a lossy rule that differs from plain decoding's, with distances and stages."""
    record = Record(
        prompt="p9",
        category="qa",
        method="typical",
        exactness="lossy",
        temperature=0,
        batch=9,
        prompt_tokens=5,
        token_ids=(1, 2, 3),
        text="abc",
        finish_reason="stop",
        seconds=0.5,
        stage_seconds={"draft": 0.1, "verify": 0.3},
        accepted=(1, 0),
        expected_accepted=(0.5, 0.25),
        proposed_depth=(2, 1),
        proposed_nodes=(2, 1),
        distance_tv=(0.5, 0.0),
        distance_kl=(None, 0.0),
        equals_plain=False,
        divergence=1,
        margin=0.25,
        tie_bound=0.01,
        work={"verify_bytes": 15.0, "verify_flops": 60.0, "verified": 4.0, "committed": 3.0},
        round_seconds=(0.25, 0.15),
        arrived=0.0,
        admitted=0.1,
        prefilled=0.2,
        finished=0.4,
        emitted_at=(0.3, 0.4),
        emitted=(2, 1),
    )
    with RecordWriter(folder / "records.jsonl", append=True) as writer:
        writer.write(dataclasses.replace(record, **more))


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two jobs of a sweep with everything that a run can have; the working directory is above them."""
    for number, shape in enumerate(("[2,1]", "4")):
        folder = made(tmp_path / "outputs" / "sweep" / str(number), "drafter=model", f"drafter.shape={shape}", **FACTS)
        zeros = dict.fromkeys(("accepted", "expected_accepted", "proposed_depth", "proposed_nodes"), (0, 0, 0))
        lossy_round(folder, method="plain", exactness=None, equals_plain=None, distance_tv=(), distance_kl=(), **zeros)
        lossy_round(folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


def test_a_row_per_method_has_the_figures_of_the_summary(outputs: Path) -> None:
    found = results.load("outputs/**")
    assert repr(found) == "Results of 2 runs: .runs, .prompts, .rounds"
    runs = found.runs.set_index(["run", "method"])
    assert list(runs.index) == [
        (f"outputs/sweep/{job}", method) for job in (0, 1) for method in ("plain", "model", "typical")
    ]
    row = runs.loc[("outputs/sweep/1", "model")]
    summary = load_run(outputs / "sweep" / "1").summary.methods[1]
    assert row.mean_acceptance_length == summary.mean_acceptance_length == pytest.approx(19 / 9)
    assert (row.speedup_low, row.speedup_high) == summary.speedup_interval
    assert row["acceptance_at.1"] == pytest.approx(7 / 9)
    assert row["conditional_acceptance_at.2"] == pytest.approx(3 / 7)
    assert row["rounds_at.2"] == 9
    assert row["override.drafter.shape"] == "4"
    assert row["config.engine.max_batch_size"] == 1
    assert row.gpus == "A, B"
    assert row.started == pandas.Timestamp("2026-03-01T11:00:00", tz="UTC")
    assert runs.loc[("outputs/sweep/0", "typical"), "divergences"] == 1
    assert runs.loc[("outputs/sweep/0", "typical"), "stage_seconds.verify"] == 0.3
    assert runs.loc[("outputs/sweep/0", "typical"), ["mbu.verify", "mfu.verify", "wasted"]].tolist() == [0.5, 0.2, 0.25]
    assert found.rounds.seconds.dropna().tolist()[-2:] == [0.25, 0.15]
    assert pandas.isna(row.divergences), "nothing was compared"


def test_rows_of_prompts_and_rounds_are_the_records(outputs: Path) -> None:
    found = results.load("outputs/sweep/0")
    prompts = found.prompts
    assert len(prompts) == 8
    last = prompts.iloc[-1]
    assert (last.run, last.prompt, last.category, last.method) == ("outputs/sweep/0", "p9", "qa", "typical")
    assert (last.tokens, last["rounds"], last.accepted, last.proposed_depth) == (3, 2, 1, 3)
    assert (last.mean_acceptance_length, last.expected_accepted, last.batch_seconds) == (1.5, 0.75, 0.5)
    assert (last.equals_plain, last.divergence, last.margin, last.text) == (False, 1, 0.25, "abc")
    rounds = found.rounds
    assert len(rounds) == 3 * 6 + 3 * 3 + 3 + 2
    tail = rounds.iloc[-2:]
    assert list(tail["round"]) == [0, 1]
    assert list(tail.accepted) == [1, 0]
    assert list(tail.distance_tv) == [0.5, 0.0]
    assert list(tail.distance_kl.isna()) == [True, False]
    assert rounds.iloc[:-2].distance_tv.isna().all(), "an exact rule has no distance"


def test_what_cannot_be_read_is_left_out_with_one_warning(outputs: Path) -> None:
    (outputs / "sweep" / "0" / "manifest.json").write_text("{")
    (outputs / "foreign").mkdir()
    (outputs / "foreign" / "manifest.json").write_text('{"name": "a web page"}')
    (outputs / "begun").mkdir()
    (outputs / "begun" / "manifest.json").write_text('{"config": {}}')
    (outputs / "empty").mkdir()
    with pytest.warns(UserWarning, match="left out 3 folders that cannot be read") as caught:
        found = results.load("outputs/**")
    assert len(caught) == 1
    listed = str(caught[0].message)
    for part in ("sweep/0/manifest.json is damaged", "outputs/foreign", "outputs/begun has a manifest and no records"):
        assert part in listed
    assert "outputs/empty" not in listed, "a folder without a manifest is nobody's run"
    assert set(found.runs.run) == {"outputs/sweep/1"}


@pytest.mark.parametrize("given", ["nothing/**", "nothing", "outputs/none*"])
def test_no_run_at_all_is_one_sentence(given: str, outputs: Path) -> None:
    with pytest.raises(ValueError, match=rf"no run found in '{re.escape(given)}': give folders of runs, or a pattern"):
        results.load(given)


def test_runs_are_chosen_by_name(outputs: Path) -> None:
    found = results.load("outputs")
    chosen = found.only(found.runs.query("`override.drafter.shape` == '4'").run)
    assert len(chosen) == 1
    assert set(chosen.rounds.run) == {"outputs/sweep/1"}
    with pytest.raises(ValueError, match="there is no run 'x' among these 2: take names from"):
        found.only(["x"])


def test_a_summary_is_used_as_long_as_it_is_up_to_date(outputs: Path) -> None:
    folder = outputs / "sweep" / "0"
    summary = load_run(folder).summary
    summary["methods"][1]["speedup"] = 99.0  # so that one can tell where a figure came from
    (folder / "summary.json").write_text(json.dumps(summary))
    assert 99.0 in set(results.load(folder).runs.speedup)
    del summary["schema"]  # as an older version wrote it
    (folder / "summary.json").write_text(json.dumps(summary))
    assert 99.0 not in set(results.load(folder).runs.speedup)
    (folder / "summary.json").write_text(json.dumps(summary | {"schema": SCHEMA}))
    later = (folder / "summary.json").stat().st_mtime + 10
    os.utime(folder / "records.jsonl", (later, later))
    assert 99.0 not in set(results.load(folder).runs.speedup), "the records have grown since"


# ---------------------------------------------------------------- the documented schema


def documented() -> dict[str, dict[str, str]]:
    """Columns and types of every frame, as the page has them."""
    found: dict[str, dict[str, str]] = {}
    frame = ""
    for line in PAGE.read_text().splitlines():
        heading = re.fullmatch(r"### `(\w+)`.*", line)
        if re.match("##+ ", line):
            frame = heading[1] if heading else ""
        row = re.fullmatch(r"\| `([^`]+)` \| `([^`]+)` \|([^|]*)\|([^|]+)\|", line)
        if frame and row:
            found.setdefault(frame, {})[row[1]] = row[2]
            assert row[4].strip(), f"{row[1]} has no meaning"
    return found


def test_the_page_has_every_column_with_its_type() -> None:
    assert documented() == {"runs": RUNS, "prompts": PROMPTS, "rounds": ROUNDS}


@pytest.mark.parametrize("name", ["runs", "prompts", "rounds"])
def test_the_frames_have_the_documented_types(name: str, outputs: Path) -> None:
    frame, known = getattr(results.load("outputs"), name), documented()[name]
    for column in frame.columns:
        wanted = known.get(column, known.get(re.sub(r"\..*", ".*", column, count=1)))
        assert wanted is not None, f"{column} is not on the page"
        assert wanted == "any" or str(frame[column].dtype) == wanted, column
    families = {column for column in known if column.endswith(".*")}
    missing = [column for column in known.keys() - families if column not in frame]
    assert not missing
    for family in families:
        assert any(column.startswith(family[:-1]) for column in frame.columns), f"no run here has {family}"


# ---------------------------------------------------------------- on its own

BLOCKED = """
import importlib.abc, sys
names = {names}
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in names:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
{code}
"""
FOREIGN = ["specdec", "drafters", "verifiers", "torch", "transformers", "hydra", "omegaconf", "wandb", "matplotlib"]


def alone(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code where none of the other packages can be imported."""
    script = BLOCKED.format(names=FOREIGN, code=code)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True)


def test_reading_needs_no_other_package(outputs: Path) -> None:
    code = "from experiments import results; d = results.load('outputs/**'); print(len(d.runs), len(d.rounds))"
    done = alone(code, outputs.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6", "64"]
    refused = alone("import specdec", outputs.parent)
    assert "specdec is blocked" in refused.stderr, "the blocking works"


def test_records_and_settings_do_not_wait_for_pandas() -> None:
    code = "import sys, experiments.results.records, experiments.results.limits; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_what_is_written_twice_agrees() -> None:
    """Constants of the engine that the reading side has a copy of, because it must not import the engine."""
    assert ("ingestion", *clock.STAGES) == STAGES  # which is before the rounds
    assert GREEDY_BELOW == ENGINES_GREEDY_BELOW
