"""Studies by batch size, length of context, labels and pairs of settings: figures by hand, and what is written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
from omegaconf import OmegaConf

from experiments.reporting.studies import batch_sweep, context
from experiments.reporting.studies.batch_sweep import BATCH, crossings
from experiments.reporting.studies.context import CONTEXT
from experiments.reporting.studies.two_way import two_way_table
from experiments.reporting.table import Emphasis
from experiments.results.comparison import Entry, entries_of, grids
from experiments.results.rows import positions, rows_of
from experiments.results.runs import Run
from experiments.sweep.callbacks import Report
from tests.experiments.made_runs import loaded, made, moments, output

BATCHES = (1, 2, 4, 8)
# Seconds per round by batch size: the fixed part is shared up to 4 rows, then every row costs its own. Speculation
# emits two tokens per round, which costs 1.2 times as much at batch 1 and ever more above.
PLAIN = {1: 0.10, 2: 0.10, 4: 0.11, 8: 0.22}
FAST = {1: 0.12, 2: 0.13, 4: 0.17, 8: 0.44}


def run_at(folder: Path, batch: int) -> Run:
    """Two full batches of requests of 8 tokens, without queue or prefill."""
    found = []
    for number in range(2 * batch):
        for method, per_round, emitted in (("plain", PLAIN[batch], 1), ("fast", FAST[batch], 2)):
            seen = [(per_round * (place + 1), emitted) for place in range(8 // emitted)]
            fields = {"batch": number // batch, "seconds": seen[-1][0], "accepted": (emitted - 1,) * len(seen)}
            found.append(output(f"p{number}", method, **fields | moments(*seen)))
    facts: dict[str, Any] = {"planned": 2 * batch, "config": {"engine": {"max_batch_size": batch}}}
    return loaded(folder / str(batch), f"engine.max_batch_size={batch}", records=found, **facts)


def test_curves_by_hand(tmp_path: Path, capsys: Any) -> None:
    runs = [run_at(tmp_path / "sweep", batch) for batch in reversed(BATCHES)]  # in any order
    frame = batch_sweep.report.frame(runs)
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
    assert set(batch_sweep.report.frame(runs[1:]).knee) == {""}, "it may go on after batch 4"
    # Crossings are looked for on a logarithmic scale.
    ((at, words),) = crossings(frame[frame.name == "fast"])
    # The speedup is 0.22/0.17 = 1.29 at batch 4, and exactly 1 at batch 8: that is not above 1 any more.
    assert at == pytest.approx(8.0) and words.startswith("stops to be faster than plain decoding between batch 4 and 8")
    assert words.endswith("one of them holds 1"), "the interval at batch 8"
    speeds = ((2, 1.2), (8, 0.8), (32, 1.6))
    rows = ({BATCH: b, "speedup": s, "speedup_low": s - 0.01, "speedup_high": s + 0.01} for b, s in speeds)
    down, up = crossings(pandas.DataFrame(rows))
    assert down[0] == pytest.approx(4.0) and down[1].startswith("stops"), "half way from 2 to 8"
    assert up[0] == pytest.approx(8 * 4 ** (1 / 4)) and up[1].startswith("begins") and "holds 1" not in up[1]

    batch_sweep.report(runs, tmp_path / "out")
    said = capsys.readouterr().out
    assert "plain, T=0: knee at batch 4" in said and "between batch 4 and 8, at about 8.0" in said
    files = {f"batch_sweep.{end}" for end in ("md", "json", "png", "svg")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    with pytest.raises(ValueError, match=r"needs runs .* at two values of engine\.max_batch_size or more: give engine"):
        batch_sweep.report(runs[:1], tmp_path)


def of_context(folder: Path, tokens: int) -> Run:
    """Two batches of two prompts, which share their rounds."""
    records = []
    for number in range(4):
        fields: dict[str, Any] = {"batch": number // 2, "prompt_tokens": tokens, "tokens": 8}
        records.append(output(f"p{number}", "plain", accepted=(0,) * 8, seconds=2.0, **fields))
        accepted = {128: (2, 2, 1), 4096: (1, 0, 0)}[tokens]
        drafted: dict[str, Any] = {"accepted": accepted, "proposed_depth": (2, 2, 2)}
        records.append(output(f"p{number}", "fast", equals_plain=True, **drafted, **fields))
    return loaded(folder, prompts=4, records=records, config={"dataset": {"tokens": tokens}})


def test_contexts_by_hand(tmp_path: Path, no_pictures: None, capsys: Any) -> None:
    of_contexts = [of_context(tmp_path / "runs" / str(tokens), tokens) for tokens in (4096, 128)]  # in any order
    short, long = rows_of(context.report.frame(of_contexts))
    assert (short[CONTEXT], long[CONTEXT]) == (128, 4096)
    assert short["mean_acceptance_length"] == pytest.approx(1 + 5 / 3) and short["change"] is None
    assert [long[name] for name in ("change", "change_low", "change_high")] == pytest.approx([-4 / 3] * 3)
    assert positions(short) == [1, 2 / 3] and positions(long) == [1 / 3, 0]

    context.report(of_contexts, tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert "fast, T=0: 2.67 tokens per round at 128 tokens of context, 1.33 at 4,096: less (paired -1.33" in said
    line = "| fast | 0 | 4,096 | 1.33 [1.33, 1.33] | -1.33 [-1.33, -1.33] |"
    assert line in (tmp_path / "context.md").read_text()


LENGTHS = "experiments.reporting.studies.two_way.report_lengths"
LABELS = {"a": "chain: none", "b": "chain: Markov", "c": "drawn tree: none"}
ACCEPTED = {"a": (0, 1), "b": (1, 1), "c": (2, 2)}


def run(job: Path, *overrides: str, more: int = 0) -> None:
    """Write a run of three methods on three prompts as Hydra leaves it: greedily, and with less drafted at T = 1."""
    (job / ".hydra").mkdir(parents=True)
    (job / ".hydra" / "config.yaml").write_text("out: ${hydra:runtime.output_dir}\n")
    (job / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    records = []
    for number in range(3):
        records += [output(f"p{number}", "plain", accepted=(0,) * 4, temperature=at) for at in (0.0, 1.0)]
        for method, accepted in ACCEPTED.items():
            drafted: Any = {"proposed_depth": (2, 2), "proposed_nodes": (4, 2)}
            records.append(output(f"p{number}", method, accepted=tuple(more + a for a in accepted), **drafted))
            # Only the last prompt's second round accepts anything more here: not enough to tell methods apart.
            last = (0, int(number == 2 and method != "a"))
            records.append(output(f"p{number}", method, accepted=last, temperature=1.0, **drafted))
    config: Any = {"dataset": {"seed": more}, "sampling": {"max_new_tokens": 4}, "target": {}, "labels": LABELS}
    made(job, *overrides, records=records, config=config, threads=1, series=8)


def test_families_are_columns_and_differences_are_from_the_first_row(tmp_path: Path) -> None:
    run(tmp_path)
    report = Report(LENGTHS, single=True, rows="head", about="Heads")
    report.on_run_end(OmegaConf.create({"hydra": {"run": {"dir": str(tmp_path)}}}))
    text = (tmp_path / "lengths.md").read_text()
    assert text.startswith("Heads. bundled/target, float32, a processor, stdlib, 3 prompts, seed 0, 4 new tokens")
    assert "tokens per round / drafted nodes per round; signed: more than none has in the same column" in text
    assert [line for line in text.split("\n") if line.startswith(("| none", "| Markov", "| head"))] == [
        "| head \\ column | chain | drawn tree |",
        "| none | 1.50 [1.50, 1.50] / 3.0 | 3.00 [3.00, 3.00] / 3.0 |",
        "| Markov | 2.00 [2.00, 2.00] +0.50* / 3.0 | - |",
        "| head \\ column | chain | drawn tree |",
        "| none | 1.00 [1.00, 1.00] / 3.0 | 1.17 [1.00, 1.50] / 3.0 |",
        "| Markov | 1.17 [1.00, 1.50] +0.17 / 3.0 | - |",
    ]
    assert (tmp_path / "lengths.png").exists()


def test_overrides_name_the_columns_of_a_sweep(tmp_path: Path, no_pictures: None, capsys: Any) -> None:
    run(tmp_path / "0", "sampling=code", "mask=true", more=1)
    run(tmp_path / "1", "sampling=code", "mask=false", "dataset.file=${dataset.category}.jsonl")  # as it was typed
    run(tmp_path / "2", "mask=maybe")
    (tmp_path / "2" / "records.jsonl").unlink()
    columns = {"sampling=code": "code", "mask=true": "masked", "mask=false": "free"}
    report = Report(LENGTHS, single=True, rows="drafts", about="Masks", columns=columns)
    report.on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    text = (tmp_path / "lengths.md").read_text()
    assert "stdlib, 3 prompts, seed 0 or stdlib, 3 prompts, seed 1, 4 new" in text
    assert "| drafts \\ column | code, masked | code, free |" in text
    assert "| chain: none | 2.50 [2.50, 2.50] / 3.0 | 1.50 [1.50, 1.50] / 3.0 |" in text
    assert "NO RESULT of job 2" in text and "signed" not in text
    report.options["columns"] = {"sampling=code": "code"}
    report.on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    assert "'chain: none' stands twice in the column 'code': name what differs" in capsys.readouterr().err


def rows(folder: Path, *jobs: str, **facts: Any) -> list[Entry]:
    run = loaded(folder)
    manifests = [run.manifest | {"overrides": job.split()} | facts for job in jobs]
    runs = [replace(run, folder=Path(str(number)), manifest=each) for number, each in enumerate(manifests)]
    return entries_of(runs)


def test_two_settings_make_rows_and_columns_and_what_was_not_given_is_the_configurations(tmp_path: Path) -> None:
    config: dict[str, Any] = {"dataset": {"seed": 0}, "drafter": {"shape": 4, "sampling": "iid"}}
    config |= {"bootstrap": {"confidence": 0.95, "resamples": 100, "seed": 0}, "engine": {"max_batch_size": 1}}
    jobs = [f"drafter.shape={shape} drafter.sampling={law}" for shape in (2, 8) for law in ("iid", "coupled")]
    (grid,) = grids(rows(tmp_path, *jobs, "drafter.sampling=coupled", "", config=config))
    assert (grid.down, grid.across) == ("drafter.shape", "drafter.sampling"), "the one with more values is down"
    assert (grid.rows, grid.columns, grid.fixed) == (("2", "4", "8"), ("iid", "coupled"), {})
    assert set(grid.cells) == {(row, column) for row in "248" for column in ("iid", "coupled")}
    assert grid.cells["4", "iid"]["mean_acceptance_length"] == pytest.approx(1 + (2 + 1 + 0 + 2 + 1 + 1 + 2 + 1) / 9)
    # One setting; a diagonal: three of nine cells.
    for few in (["a=1", "a=2"], ["a=1 b=1", "a=2 b=2", "a=3 b=3"]):
        assert grids(rows(tmp_path, *few)) == []


def test_the_fastest_exact_method_of_a_table_stands_out_if_that_is_sure(tmp_path: Path) -> None:
    found = rows(tmp_path, *(f"a={a} b={b}" for a in (1, 2) for b in "xy"))
    # Put together by hand: without records, intervals that do not overlap make a winner.
    made = [entry._replace(run=replace(entry.run, outputs=entry.run.outputs[:0])) for entry in found]

    def standing_out(low: float, high: float) -> list[str]:
        fast = made[0].row | {"speedup": 3.0, "speedup_low": low, "speedup_high": high}
        broken = made[3].row | {"speedup": 9.0, "speedup_low": 8.0, "speedup_high": 10.0, "competes": False}
        (grid,) = grids([made[0]._replace(row=fast), *made[1:3], made[3]._replace(row=broken)])
        table = two_way_table(grid, 0.95)
        assert [column.heading for column in table.columns] == ["a \\ b", "x", "y"]
        return [cell.stacked for row in table.rows for cell in row if cell.emphasis is not Emphasis.NONE]

    assert standing_out(0.7, 4.2) == [], "chance may have made it the best"
    (best,) = standing_out(2.9, 3.1)
    assert best.splitlines()[1] == "3.00x [2.90, 3.10]", "not the one that is not lossless, which is faster"
