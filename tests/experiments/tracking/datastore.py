"""Reads the file that wandb writes offline, independently of wandb's own writer.

The file is a log of records in the format of LevelDB's logs: after a header of seven bytes come blocks of 32 KiB, in
them chunks of a checksum (4 bytes), a length (2) and a kind (1): whole, first, middle or last part of a record. A
record is a message of wandb's own protocol.
"""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK, _CHUNK = 7, 32 * 1024, 7
_WHOLE, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file, in order."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), _HEADER, b""
    assert data[:4] == b":W&B", "the file's mark"
    while at + _CHUNK <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _CHUNK:
            at += left  # no room for a chunk: the rest of the block is padding
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + _CHUNK + length > len(data):
            return  # still being written
        parts += data[at + _CHUNK : at + _CHUNK + length]
        at += _CHUNK + length
        if kind in (_WHOLE, _LAST):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def _ended(path: Path) -> list[Any]:
    """The records of a run that has ended: wandb's service writes the last block a little after it has said so."""
    limit = time.monotonic() + 60.0
    while time.monotonic() < limit:
        found = list(records(path))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"the run in {path} has not ended")


class Datastore:
    """What one run has left in its ``.wandb`` file: metrics have an axis and a summary, artifacts sizes of files."""

    config: dict[str, Any]
    summary: dict[str, Any]
    metrics: dict[str, tuple[str, list[str]]]
    history: list[dict[str, Any]]
    artifacts: list[tuple[str, str, dict[str, int]]]
    files: list[str]

    def __init__(self, folder: Path):
        (path,) = folder.glob("*run-*/*.wandb")
        self.run: Any = None
        self.config, self.summary, self.metrics = {}, {}, {}
        self.history, self.artifacts, self.files = [], [], []
        self.exit_code: int | None = None
        for record in _ended(path):
            self._take(record)

    def _take(self, record: Any) -> None:
        kind = record.WhichOneof("record_type")
        if kind == "run":
            self.run = record.run
            self.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            row = {_key(item): json.loads(item.value_json) for item in record.history.item}
            self.history.append({key: value for key, value in row.items() if not key.startswith("_")})
        elif kind == "summary":
            self.summary |= {_key(item): json.loads(item.value_json) for item in record.summary.update}
        elif kind == "metric":
            chosen = [field.name for field, value in record.metric.summary.ListFields() if value]
            self.metrics[record.metric.name] = (record.metric.step_metric, chosen)
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            self._take_artifact(record.request.log_artifact.artifact)
        elif kind == "artifact":
            self._take_artifact(record.artifact)
        elif kind == "files":
            self.files += [file.path for file in record.files.files]
        elif kind == "exit":
            self.exit_code = record.exit.exit_code

    def _take_artifact(self, artifact: Any) -> None:
        contents = {entry.path: entry.size for entry in artifact.manifest.contents}
        self.artifacts.append((artifact.name, artifact.type, contents))

    def line(self, name: str) -> list[tuple[float, float]]:
        """The points of a metric: place on its axis, value."""
        axis, _ = self.metrics[name]
        return [(row[axis], row[name]) for row in self.history if name in row]


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)
