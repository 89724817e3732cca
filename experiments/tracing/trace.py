"""Traces: every round's draft with p and q, kept so that other rules can be asked about the very same drafts.

A row per request and round, in Parquet files (shards) below the run's folder: whose round it was, what the rule that
ran made of it, the draft tree, and p and q at its nodes (``experiments.tracing.compressed``).
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int

from experiments.tracing.compressed import DROPPED, Packed, depths_of, pack
from specdec.interfaces import Round

FOLDER = "trace"
"""The folder of the shards, below the run's folder."""
LIKELY = 0.01
"""Tokens of at least this probability under p are among those that ``TraceWriter.tokens`` lists."""
_FLUSH = 32 * 2**20  # bytes kept in memory at most before a shard is written


@dataclass(frozen=True)
class TraceKey:
    """Which round of which request, from 0, and what became of it; the rest as in ``Record``.

    Attributes:
        accepted, expected_accepted: What the rule that ran accepted, and its expectation given the draft.
        stop: The node where the accepted path ends, 0 for the root.
        next_token: The recovered or bonus token that followed it.
    """

    method: str
    exactness: str
    temperature: float
    prompt: str
    turn: int
    sample: int
    round: int
    accepted: int
    expected_accepted: float
    stop: int
    next_token: int

    @property
    def place(self) -> tuple[object, ...]:
        """Identifies the row: no two rows of a run have the same place."""
        return self.method, self.temperature, self.prompt, self.turn, self.sample, self.round


_NODES = {
    "tokens": np.int32,
    "parents": np.int16,
    "valid": np.bool_,
    "law": np.int8,
    "counts": np.int32,
    "rest_p": np.float32,
    "rest_q": np.float32,
}
_KEPT = {"ids": np.int32, "p": np.float32, "q": np.float32}
_VERSION, _NEWEST = b"specdec.trace.version", b"3"
_OF_KEY = [field.name for field in fields(TraceKey)]


class TraceWriter:
    """Writes rounds into a run's folder, shard by shard; a shard has its name when it is complete."""

    def __init__(self, folder: Path, *, dropped: float = DROPPED):
        self.folder, self.dropped = folder / FOLDER, dropped
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0
        self.tokens: set[int] = set()  # all that were drafted, or that are likely under p somewhere

    def add(self, seen: Round, keys: Sequence[TraceKey | None]) -> None:
        """Keep the rows of a round that have a key."""
        packed = pack(seen.tree, seen.target_probs, dropped=self.dropped)
        ends = packed.counts.sum(1).cumsum()
        for row, key in enumerate(keys):
            if key is not None:
                part = slice(ends[row] - packed.counts[row].sum(), ends[row])
                nodes = {name: getattr(packed, name)[row].astype(dtype) for name, dtype in _NODES.items()}
                kept = {name: getattr(packed, name)[part].astype(dtype) for name, dtype in _KEPT.items()}
                self._rows.append({**asdict(key), **nodes, **kept})
        self._bytes += sum(getattr(packed, name).nbytes for name in _KEPT)
        self.tokens.update(packed.tokens[packed.valid].tolist(), packed.ids[packed.p >= LIKELY].tolist())
        if self._bytes > _FLUSH:
            self.flush()

    def flush(self) -> None:
        """Write what is still in memory."""
        if not self._rows:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{len(shards(self.folder)):05d}.parquet"
        part = path.with_suffix(".part")
        # Floats compress well byte by byte of equal weight, ascending ids as differences.
        encodings = {"ids": "DELTA_BINARY_PACKED", "p": "BYTE_STREAM_SPLIT", "q": "BYTE_STREAM_SPLIT"}
        pq.write_table(
            pa.Table.from_pylist(self._rows).replace_schema_metadata({_VERSION: _NEWEST}),
            part,
            compression="zstd",
            use_dictionary=False,  # which the encodings below exclude
            column_encoding={f"{name}.list.element": encoding for name, encoding in encodings.items()},
        )
        os.replace(part, path)
        self._rows, self._bytes = [], 0


@dataclass(frozen=True, eq=False)
class TracedRound(Packed):
    """A row of a trace, without a batch; ``ids``, ``p`` and ``q`` are empty where it was read without tables."""

    key: TraceKey

    @property
    def width(self) -> int:
        """Most tokens that were kept at a node."""
        return int(self.counts.max())

    @property
    def depths(self) -> Int[np.ndarray, " node"]:
        """Depth of the nodes, 0 for those that are not drafted."""
        return depths_of(self.parents[None])[0] * self.valid


def packed(rounds: Sequence[TracedRound]) -> Packed:
    """Return some rounds as one batch, nodes padded to the most that any has."""
    most = max(len(traced.tokens) for traced in rounds)
    padding = {"parents": -1, "rest_q": -1}

    def column(name: str) -> np.ndarray:
        rows = [getattr(traced, name) for traced in rounds]
        return np.stack([np.pad(row, (0, most - len(row)), constant_values=padding.get(name, 0)) for row in rows])

    nodes = {name: column(name) for name in _NODES}
    nodes |= {name: nodes[name].astype(np.int64) for name in ("tokens", "parents")}
    return Packed(**nodes, **{name: np.concatenate([getattr(traced, name) for traced in rounds]) for name in _KEPT})


def shards(folder: Path) -> list[Path]:
    """A trace's complete shards, in the order in which they were written."""
    return sorted(folder.glob("[0-9]*.parquet"))


def read_trace(folder: Path, *, tables: bool = True) -> Iterator[list[TracedRound]]:
    """The rounds of a run's trace, a list per shard; with their last attempts, and on request without p and q."""
    paths = shards(folder / FOLDER)
    if not paths:
        raise ValueError(f"{folder} has no trace: make one with experiments.run trace=true")
    newest = {key.place: number for number, path in enumerate(paths) for key in _keys(_read(path, _OF_KEY))}
    absent = {} if tables else {name: np.empty(0, dtype) for name, dtype in _KEPT.items()}
    for number, path in enumerate(paths):
        table = _read(path, [*_OF_KEY, *_NODES, *(_KEPT if tables else ())]).combine_chunks()
        columns = {}
        for name in (*_NODES, *(_KEPT if tables else ())):
            chunk = table.column(name).chunk(0)
            values, begins = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()
            columns[name] = np.split(values, begins[1:-1])
        rounds = [
            TracedRound(key=key, **absent, **{name: parts[row] for name, parts in columns.items()})
            for row, key in enumerate(_keys(table))
            if newest[key.place] == number
        ]
        if rounds:
            yield rounds


def _read(path: Path, columns: Sequence[str]) -> pa.Table:
    try:
        if (pq.read_schema(path).metadata or {}).get(_VERSION) != _NEWEST:
            raise ValueError(f"{path} was made by another version of this program: run it again")
        return pq.read_table(path, columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _keys(table: pa.Table) -> list[TraceKey]:
    return [TraceKey(**row) for row in table.select(_OF_KEY).to_pylist()]
