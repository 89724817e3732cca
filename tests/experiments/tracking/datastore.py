"""Reads the file that wandb writes offline, independently of wandb's own writer.

The file is a log of records in the format of LevelDB's logs: after a header of seven bytes come blocks of 32 KiB, in
them chunks of a checksum (4 bytes), a length (2) and a kind (1): whole, first, middle or last part of a record. A
record is a message of wandb's own protocol.
"""

import json
import struct
import time
from collections.abc import Iterable, Iterator
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

    def __init__(self, folder: Path):
        (path,) = folder.glob("*run-*/*.wandb")
        known = _ended(path)

        def of(kind: str) -> list[Any]:
            return [getattr(record, kind) for record in known if record.WhichOneof("record_type") == kind]

        self.run, self.exit_code = of("run")[-1], of("exit")[-1].exit_code
        self.config = _values(item for run in of("run") for item in run.config.update)
        self.summary = _values(item for summary in of("summary") for item in summary.update)
        self.history = [_values(row.item) for row in of("history")]
        self.axes = {metric.name: metric.step_metric for metric in of("metric")}
        artifacts = [*of("artifact"), *(request.log_artifact.artifact for request in of("request"))]
        self.artifacts = {
            artifact.type: {entry.path: entry.size for entry in artifact.manifest.contents} for artifact in artifacts
        }
        self.files = [file.path for files in of("files") for file in files.files]

    def line(self, name: str) -> list[tuple[float, float]]:
        """The points of a metric: place on its axis, value."""
        return [(row[self.axes[name]], row[name]) for row in self.history if name in row]


def _values(items: Iterable[Any]) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
