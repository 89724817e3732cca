"""Rounds read back from a trace, node by node, and traces of other versions."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from experiments.results.records import read_records
from experiments.results.sources import Source
from experiments.tracing.outputs import outputs_of
from experiments.tracing.rounds import read_rounds
from experiments.tracing.trace import FOLDER, read_trace, shards
from tests.experiments.showcase import OUTPUT, ROUNDS, tables, write_run


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


def test_sources_follow_from_the_trace_and_are_open_without_one(tmp_path: Path) -> None:
    a, r, b, e = Source.ACCEPTED, Source.RECOVERED, Source.BONUS, Source.EITHER
    for trace, sources in ((True, [a, a, b, a, r, a, b]), (False, [a, a, b, a, e, a, e])):
        folder = write_run(tmp_path / str(trace), trace=trace)
        records = [record for record in read_records(folder / "records.jsonl") if record.method == "model"]
        outputs, notes = outputs_of(folder, records)
        assert notes == [] if trace else "trace=true" in notes[0]
        for output in outputs:
            assert [token.source for token in output.tokens] == sources
            assert tuple(token.token for token in output.tokens) == OUTPUT


def test_a_trace_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for named in (None, {b"specdec.trace.version": b"3"}):
        for path in shards(folder / FOLDER):
            pq.write_table(pq.read_table(path).replace_schema_metadata(named), path)
        with pytest.raises(ValueError, match=r"was made by another version of this program: run it again"):
            list(read_trace(folder))
