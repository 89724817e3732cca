"""Rounds read back from a trace, node by node, and traces of other versions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from omegaconf import DictConfig

from experiments.results.records import read_records
from experiments.results.sources import Source
from experiments.run import run
from experiments.tracing.outputs import outputs_of
from experiments.tracing.rounds import read_rounds
from experiments.tracing.trace import FOLDER, read_trace, shards
from tests.experiments.runs import local
from tests.experiments.showcase import OUTPUT, ROUNDS, tables, write_run

Configure = Callable[..., DictConfig]
TREE = ["drafter.shape=[2,1]", "drafter.sampling=without_replacement"]


def test_a_round_is_read_as_it_was(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    ((key, rounds),) = read_rounds(folder, lambda key: key[2] == "p1").items()
    assert key == ("model", 1.0, "p1", 0, 0)
    assert [[node.odds.token for node in each.nodes] for each in rounds] == [tokens for tokens, *_ in ROUNDS]
    assert [[node.parent for node in each.nodes] for each in rounds] == [parents for _, parents, *_ in ROUNDS]
    assert [each.path for each in rounds] == [(1, 2), (1,), (2,)]
    assert [each.next.token for each in rounds] == [4, 7, 1]
    assert [each.at_leaf for each in rounds] == [True, False, True]
    assert [node.depth for node in rounds[2].nodes] == [0, 1, 1, 2]
    p, q = tables(1)
    assert rounds[1].nodes[3].odds.p == pytest.approx(float(p[1, 6]))
    assert rounds[1].nodes[3].odds.q == pytest.approx(float(q[1, 6]))
    assert rounds[1].next.p == pytest.approx(float(p[1, 7]))
    best = [odds.token for odds in rounds[1].likely[1]]
    assert best == p[1].argsort(descending=True)[:5].tolist()
    assert len(rounds[1].likely) == 2, "the root and one accepted node"


def test_sources_follow_from_the_trace(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    records = [record for record in read_records(folder / "records.jsonl") if record.method == "model"]
    outputs, notes = outputs_of(folder, records)
    a, r, b = Source.ACCEPTED, Source.RECOVERED, Source.BONUS
    assert notes == []
    for output in outputs:
        assert [token.source for token in output.tokens] == [a, a, b, a, r, a, b]
        assert tuple(token.token for token in output.tokens) == OUTPUT


def test_without_a_trace_the_sources_of_a_tree_are_open(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", trace=False)
    records = [record for record in read_records(folder / "records.jsonl") if record.method == "model"]
    outputs, (note,) = outputs_of(folder, records)
    a, b, e = Source.ACCEPTED, Source.BONUS, Source.EITHER
    assert [token.source for token in outputs[0].tokens] == [a, a, b, a, e, a, e]
    assert "trace=true" in note


def test_what_a_run_traces_leads_to_its_output(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, capsys: Any
) -> None:
    """Accepted nodes and following tokens, one round after the other, are the output of the engine."""
    sampled = ["sampling.temperature=1", "engine.max_batch_size=2", "trace=true"]
    run(configure("run", *tiny, *local(saved, "model"), *sampled, *TREE))
    folder = tmp_path / "out"
    records = [record for record in read_records(folder / "records.jsonl") if record.method == "model"]
    outputs, notes = outputs_of(folder, records)
    assert not notes
    assert sum(sum(output.record.accepted) for output in outputs) > 0
    for output in outputs:
        emitted = []
        for each in output.rounds:
            emitted += [each.nodes[node].odds.token for node in each.path] + [each.next.token]
        assert tuple(emitted[: len(output.tokens)]) == output.record.token_ids
        for before, after in zip(output.rounds, output.rounds[1:], strict=False):
            assert after.nodes[0].odds.token == before.next.token, "the root is the last token"


@pytest.mark.parametrize("version", [None, b"3"])
def test_a_trace_of_another_version_is_refused(tmp_path: Path, version: bytes | None) -> None:
    folder = write_run(tmp_path / "run")
    for path in shards(folder / FOLDER):
        named = {b"specdec.trace.version": version} if version else None
        pq.write_table(pq.read_table(path).replace_schema_metadata(named), path)
    with pytest.raises(ValueError, match=r"was made by another version of this program: run it again"):
        list(read_trace(folder))
