"""Results as frames: right figures, the documented columns, and nothing needed but pandas and scipy."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pandas
import pytest

from experiments import results
from experiments.results import texts as files
from experiments.results.lossless import stated_exactness
from experiments.results.manifest import _PIECE, _PIECES, revision_of
from experiments.results.records import keep_record
from experiments.results.rows import PROMPTS, ROUNDS, RUNS
from experiments.results.runs import load_run
from experiments.results.texts import read_token_texts
from experiments.results.timing import STAGES
from specdec.engine import clock
from tests.experiments.made_runs import made, moments, output
from verifiers import RejectionVerifier

PAGE = Path(__file__).parents[3] / "docs" / "measurements.md"

FACTS: dict[str, Any] = {
    "started": "2026-03-01T12:00:00+01:00",
    "threads": 2,
    "target": {"name": "bundled/target", "parameters": 1000},
    "versions": {"torch": "2.13.0", "wandb": None},
    "machine": {"system": "Linux x86_64", "processor": "a processor", "gpus": ["A", "B"]},
    "peaks": {"copy": 80.0, "read": 100.0, "flops": 1000.0, "cache_bytes": 0},
}


def documented() -> dict[str, set[str]]:
    """Columns of every frame, as the page has them."""
    found: dict[str, set[str]] = {}
    for part in re.split(r"^##+ ", PAGE.read_text(), flags=re.MULTILINE):
        items = re.findall(r"^- ((?:`[^`]+`(?:, )?)+): .", part, re.MULTILINE)
        if items and (frame := re.match(r"`(\w+)`", part)):
            found[frame[1]] = {name for item in items for name in re.findall(r"`([^`]+)`", item)}
    return found


SHARED: dict[str, Any] = {"category": "qa", "batch": 9, "seconds": 0.5}
SHARED |= moments((0.3, 2), (0.4, 1), admitted=0.1, prefilled=0.2)
# Of a lossy rule, which differs from plain decoding's, with distances and stages.
LOSSY = output(
    "p9", "typical", exactness="lossy", text="abc", stage_seconds={"draft": 0.1, "verify": 0.3},
    accepted=(1, 0), expected_accepted=(0.5, 0.25), proposed_depth=(2, 1), distance_tv=(0.5, 0.0),
    distance_kl=(None, 0.0), equals_plain=False, divergence=1, margin=0.25, tie_bound=0.01,
    work={"verify_bytes": 15.0, "verify_flops": 60.0, "verified": 4.0, "committed": 3.0}, **SHARED,
)  # fmt: skip


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two jobs of a sweep with everything that a run can have; the working directory is above it."""
    monkeypatch.chdir(tmp_path)
    for number, shape in enumerate(("[2,1]", "4")):
        folder = made(tmp_path / "outputs" / "sweep" / str(number), "drafter=model", f"drafter.shape={shape}", **FACTS)
        for record in (output("p9", "plain", accepted=(0, 0, 0), **SHARED), LOSSY):
            keep_record(folder / "records.jsonl", record)
    return tmp_path / "outputs"


def test_a_row_per_method_has_the_figures_of_the_summary(outputs: Path) -> None:
    found = results.load("outputs/**")
    runs = found.runs.set_index(["run", "method"])
    assert list(runs.index) == [(f"outputs/sweep/{job}", m) for job in (0, 1) for m in ("plain", "model", "typical")]
    row = runs.loc[("outputs/sweep/1", "model")]
    own = load_run(outputs / "sweep" / "1").rows[1]
    assert row.mean_acceptance_length == own["mean_acceptance_length"] == pytest.approx(19 / 9)
    assert set(found.categories.category) == {"", "qa"} and set(found.runs.category) == {"all"}
    assert row[["acceptance_at.1", "conditional_acceptance_at.2"]].tolist() == pytest.approx([7 / 9, 3 / 7])
    assert row[["override.drafter.shape", "config.engine.max_batch_size", "gpus"]].tolist() == ["4", 1, "A, B"]
    assert row.started == pandas.Timestamp("2026-03-01T11:00:00", tz="UTC")
    lossy = runs.loc[("outputs/sweep/0", "typical")]
    assert (lossy.divergences, lossy["stage_seconds.verify"]) == (1, 0.3)
    assert pandas.isna(row.divergences), "nothing was compared"

    found = results.load("outputs/sweep/0")
    last = found.prompts.iloc[-1]
    assert len(found.prompts) == 8
    assert (last.run, last.prompt, last.category, last.method) == ("outputs/sweep/0", "p9", "qa", "typical")
    assert (last.tokens, last["rounds"], last.accepted, last.proposed_depth) == (3, 2, 1, 3)
    assert (last.equals_plain, last.divergence, last.margin, last.text) == (False, 1, 0.25, "abc")
    tail = found.rounds.iloc[-2:]
    assert len(found.rounds) == 3 * 6 + 3 * 3 + 3 + 2
    assert [list(tail[name]) for name in ("round", "accepted", "distance_tv")] == [[0, 1], [1, 0], [0.5, 0.0]]
    assert list(tail.distance_kl.isna()) == [True, False]
    assert found.rounds.iloc[:-2].distance_tv.isna().all(), "an exact rule has no distance"


def test_every_column_is_on_the_page_and_has_its_type(outputs: Path) -> None:
    assert ("ingestion", *clock.STAGES) == STAGES, "which the reading side has a copy of: it imports no engine"
    schemas, found = {"runs": RUNS, "prompts": PROMPTS, "rounds": ROUNDS}, results.load("outputs")
    assert documented() == {name: set(known) for name, known in schemas.items()}
    for name, known in schemas.items():
        frame = getattr(found, name)
        for column in frame.columns:
            wanted = known.get(column, known.get(re.sub(r"\..*", ".*", column, count=1)))
            assert wanted is not None, f"{column} has no type"
            assert wanted == "any" or str(frame[column].dtype) == wanted, column
        for column in known:
            assert any(each == column or each.startswith(column.partition("*")[0]) for each in frame.columns), column


def test_what_cannot_be_read_is_left_out_with_one_warning(outputs: Path) -> None:
    (outputs / "sweep" / "0" / "manifest.json").write_text("{")
    (outputs / "foreign").mkdir()
    (outputs / "foreign" / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.warns(UserWarning, match="left out 2 folders that cannot be read") as caught:
        found = results.load("outputs/**")
    assert len(caught) == 1
    listed = str(caught[0].message)
    assert "sweep/0/manifest.json is damaged" in listed and "outputs/foreign" in listed
    assert set(found.runs.run) == {"outputs/sweep/1"}
    with pytest.raises(ValueError, match=r"no run found in 'nothing/\*\*'"):
        results.load("nothing/**")


def test_a_summary_is_used_as_long_as_it_is_up_to_date(outputs: Path) -> None:
    folder = outputs / "sweep" / "0"
    path = load_run(folder).write("a title")
    summary = json.loads(path.read_text())
    whole = [row for row in summary["rows"] if row["category"] == "all"]
    whole[1]["speedup"] = 99.0  # so that one can tell where a figure came from
    older = {name: value for name, value in summary.items() if name != "schema"}
    for written, is_used in ((summary, True), (older, False), (summary, True)):
        path.write_text(json.dumps(written))
        assert (99.0 in set(results.load(folder).runs.speedup)) is is_used
    later = path.stat().st_mtime + 10
    os.utime(folder / "records.jsonl", (later, later))
    assert 99.0 not in set(results.load(folder).runs.speedup), "the records have grown since"


def test_shipped_rules_are_exact_and_one_that_somebody_adds_to_the_package_is_declared() -> None:
    """A file in a clone is not tested by being there."""
    assert stated_exactness(RejectionVerifier()) == "exact"
    for name in ("Added", "RejectionVerifier"):
        added = type(name, (RejectionVerifier,), {"__module__": "verifiers.rejection"})
        assert stated_exactness(added()) == "exact (declared)"


def test_damaged_files_and_other_folders_are_one_sentence(tmp_path: Path) -> None:
    for name, text, message, read in (
        (files.TOKENS, '{"1": [300]}', r"tokens\.json is damaged.*remove it", read_token_texts),
        (files.PROMPTS, '{"prompt": "a", "turns": []}\n{}\n', r"prompts\.jsonl, line 2 is not", files.read_prompts),
        ("records.jsonl", '{"prompt": "x"}\n', "line 1 is not a record", load_run),
        ("manifest.json", '{"config": {}}', "made by another version", load_run),
        ("notes", "", "is not the folder of a run: it has no manifest.json", lambda folder: load_run(folder.parent)),
    ):
        path = made(tmp_path / "run") / name
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read(path.parent)


def test_of_a_download_it_is_the_commit(tmp_path: Path) -> None:
    folder, commit = tmp_path / "models--owner--name", "0123456789abcdef0123456789abcdef01234567"
    for name, text in (("config.json", "{}"), ("heads/medusa_lm_head.pt", "{}"), ("../../refs/main", commit)):
        path = folder / "snapshots" / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for more in ({}, {"revision": commit}, {"subfolder": "heads"}):
        assert revision_of("owner/name", cache_dir=str(tmp_path), **more) == f"hub:{commit}"
    assert revision_of("owner/other", cache_dir=str(tmp_path)) is None
    assert revision_of("owner/name", cache_dir=str(tmp_path), revision="other") is None


def test_of_a_folder_it_changes_with_the_files(tmp_path: Path) -> None:
    def model(name: str, config: str = "{}", weights: bytes = bytes(100), **more: str) -> str | None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(config)
        (folder / "model.safetensors").write_bytes(weights)
        for file, text in more.items():
            (folder / file).write_text(text)
        return revision_of(str(folder))

    large = bytes(3 * _PIECE * _PIECES)
    end, inner = bytearray(large), bytearray(large)
    end[-1], inner[len(large) // 2 - _PIECE : len(large) // 2 + 8 * _PIECE] = 1, b"x" * (9 * _PIECE)
    others = [bytes(99) + b"x", bytes(101), large, bytes(end), bytes(inner)]
    found = [model("a"), model("b", config="{ }"), *(model(f"c{n}", weights=each) for n, each in enumerate(others))]
    assert len(set(found)) == len(found)
    assert all(each is not None and each.startswith("files:") for each in found)
    assert model("again", notes="not part of the model") == found[0], "the same wherever it lies"
    assert revision_of(str(tmp_path / "a" / "config.json")) == found[0], "a file stands for its folder"
