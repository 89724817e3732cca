"""Traces of whole runs: what they hold, that they change nothing, and what is left of them."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from experiments.results.records import Record, read_records
from experiments.run import run
from experiments.tracing.rounds import outputs_of
from experiments.tracing.scoring import find_drafts, score
from experiments.tracing.trace import FOLDER, read_trace, shards
from specdec.types import DraftSampling
from tests.experiments.made_runs import write_run
from tests.experiments.runs import Configure, Stop, local
from verifiers import RejectionVerifier

pytestmark = pytest.mark.usefixtures("no_pictures")
SAMPLED = ["sampling.temperature=1", "engine.max_batch_size=2"]
TREE = ["drafter.shape=[2,1]", "drafter.sampling=without_replacement"]


def drafting(folder: Path) -> list[Record]:
    return [record for record in read_records(folder / "records.jsonl") if record.method != "plain"]


def rows(folder: Path) -> list[Any]:
    return [traced.key for shard in read_trace(folder) for traced in shard]


def test_a_trace_has_every_round_leads_to_the_output_and_changes_nothing(configure, saved, tiny, tmp_path) -> None:
    words = [*tiny, *local(saved, "model"), *SAMPLED, *TREE]
    made = run(configure("run", *words, "trace=true", "trace_dropped=0"))
    assert made.rows[1]["distance_tv"] is None, "the rule is exact"
    run(configure("run", *words, f"out={tmp_path / 'blind'}"))
    folder = tmp_path / "out"
    records = drafting(folder)
    assert [record.token_ids for record in records] == [record.token_ids for record in drafting(tmp_path / "blind")]
    assert not (tmp_path / "blind" / FOLDER).exists()

    keys = rows(folder)
    logged = {(r.prompt, number): value for r in records for number, value in enumerate(r.expected_accepted)}
    assert {(key.prompt, key.round) for key in keys} == logged.keys()
    assert all(key.expected_accepted == pytest.approx(logged[key.prompt, key.round], abs=1e-5) for key in keys)
    assert {(key.exactness, key.temperature) for key in keys} == {("exact", 1.0)}

    (drafts,) = find_drafts(folder)
    assert drafts.laws == {DraftSampling.WITHOUT_REPLACEMENT}
    (found,) = score(drafts, {"rejection": RejectionVerifier()})
    assert len(found.accepted) == sum(len(record.accepted) for record in records)
    assert found.accepted.sum() == pytest.approx(sum(sum(record.expected_accepted) for record in records), abs=1e-3)

    # Accepted nodes and following tokens, one round after the other, are the output of the engine.
    outputs, notes = outputs_of(folder, records)
    assert not notes and sum(sum(output.record.accepted) for output in outputs) > 0
    for output in outputs:
        taken = ((*(each.nodes[node] for node in each.path), each.next) for each in output.rounds)
        emitted = [token.token for tokens in taken for token in tokens]
        assert tuple(emitted[: len(output.tokens)]) == output.record.token_ids
        for before, after in zip(output.rounds, output.rounds[1:], strict=False):
            assert after.nodes[0].token == before.next.token, "the root is the last token"


@pytest.mark.full
def test_a_resumed_run_has_no_round_twice(configure, saved: Path, tiny: list[str], tmp_path: Path, monkeypatch) -> None:
    overrides = [*tiny, *local(saved, "ngram"), "trace=true"]
    with monkeypatch.context() as patch:
        Stop(patch, KeyboardInterrupt(), {3})
        with pytest.raises(KeyboardInterrupt):
            run(configure("run", *overrides))
    # An attempt that had traced a batch, and not recorded it.
    first = shards(tmp_path / "out" / FOLDER)[0]
    (first.parent / "00007.parquet").write_bytes(first.read_bytes())
    run(configure("run", *overrides, "resume=true"))
    keys = rows(tmp_path / "out")
    assert len({key.place for key in keys}) == len(keys)
    assert len(keys) == sum(len(record.accepted) for record in drafting(tmp_path / "out"))
    (drafts,) = find_drafts(tmp_path / "out")
    assert drafts.laws == {DraftSampling.DETERMINISTIC}


@pytest.mark.full
def test_a_lossy_rule_logs_its_divergence(configure: Configure, saved: Path, tiny: list[str], tmp_path: Path) -> None:
    plain, method = run(configure("run", *tiny, *local(saved, "medusa"), *SAMPLED, "verifier=typical")).rows
    assert plain["distance_tv"] is None and method["distance_tv"] > 0.01
    for record in drafting(tmp_path / "out"):
        assert len(record.distance_tv) == len(record.accepted) == len(record.distance_kl)


def test_a_trace_that_is_missing_damaged_or_of_another_version_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no trace: make one with experiments\.run trace=true"):
        next(read_trace(tmp_path))
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "00000.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"00000\.parquet is damaged"):
        next(read_trace(tmp_path))
    folder = write_run(tmp_path / "run")
    for named in (None, {b"specdec.trace.version": b"2"}):
        for path in shards(folder / FOLDER):
            pq.write_table(pq.read_table(path).replace_schema_metadata(named), path)
        with pytest.raises(ValueError, match=r"was made by another version of this program: run it again"):
            list(read_trace(folder))
