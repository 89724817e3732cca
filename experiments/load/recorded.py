"""Arrivals from recorded traffic: public traces in their own formats. None of them has texts."""

import gzip
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pandas
from jaxtyping import Float, Int

from experiments.load.arrivals import Arrivals, Times, check_above_zero

BUNDLED = Path(__file__).parent / "traces"
"""Azure's traces of 2023 (CC-BY 4.0; see the file ATTRIBUTION there)."""
GRID = 3.0
"""Seconds between the timestamps of Mooncake's traces."""
BLOCK = 512
"""Tokens of a block in Mooncake's traces."""


class Recorded(NamedTuple):
    """What a trace says of requests.

    Attributes:
        times: Seconds since the first one.
        inputs: Tokens of the prompts.
        outputs: Tokens of the answers.
        blocks: Numbers of the blocks of each prompt, equal where the tokens up to there are; None where none are told.
    """

    times: Float[np.ndarray, " request"]
    inputs: Int[np.ndarray, " request"]
    outputs: Int[np.ndarray, " request"]
    blocks: list[list[int]] | None = None

    def rows(self, chosen: Any) -> "Recorded":
        """Return some of the requests, by a mask."""
        blocks = None if self.blocks is None else [each for each, keep in zip(self.blocks, chosen, strict=True) if keep]
        return Recorded(self.times[chosen], self.inputs[chosen], self.outputs[chosen], blocks)


@dataclass(frozen=True)
class Trace(Arrivals):
    """Requests as they came somewhere else.

    Formats, found by the columns: Azure 2023 and 2024 (``TIMESTAMP, ContextTokens, GeneratedTokens``), BurstGPT
    (``Timestamp, …, Request tokens, Response tokens, …``), Mooncake (JSON Lines with ``timestamp`` in milliseconds,
    ``input_length``, ``output_length``, ``hash_ids`` of blocks of 512 tokens; its timestamps stand on a grid of three
    seconds, within which requests are spread evenly).

    Args:
        path: The file, or ``azure_code`` or ``azure_conversation`` for Azure's of 2023, which are bundled.
        scale: The rate is multiplied by this.
        window: The part of the trace to take, in its own seconds from its beginning; None for all.
    """

    path: str = "azure_conversation"
    scale: float = 1.0
    window: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_above_zero(scale=self.scale)
        if self.window is not None and not (len(self.window) == 2 and 0 <= self.window[0] < self.window[1]):
            raise ValueError(f"arrival.window={list(self.window)}: give two times in seconds, the first one smaller")

    @cached_property
    def recorded(self) -> Recorded:
        """The requests in the window, the first of which comes at 0.

        Raises:
            ValueError: The file cannot be read, is empty or unsorted, or a row is malformed.
        """
        found = read(_place(self.path))
        if self.window is not None:
            found = found.rows((found.times >= self.window[0]) & (found.times < self.window[1]))
            if not len(found.times):
                raise ValueError(f"arrival.window={list(self.window)}: nothing arrives then in {self.path}")
        return found._replace(times=(found.times - found.times[0]) / self.scale)

    @property
    def rate(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Requests per second, the scale included."""
        times = self.recorded.times
        return (len(times) - 1) / float(times[-1]) if len(times) > 1 and times[-1] else 1.0

    def at_rate(self, rate: float) -> Self:
        """Return the trace, faster or slower."""
        return replace(self, scale=self.scale * rate / self.rate)

    def times(self, rng: np.random.Generator, count: int) -> Times:
        return self.recorded.times[:count]


def _place(path: str) -> Path:
    bundled = {each.name.split(".")[0]: each for each in BUNDLED.glob("*.csv.gz")}
    return bundled.get(path, Path(path).expanduser())


def read(path: Path) -> Recorded:
    """Return the requests of a trace's file.

    Raises:
        ValueError: It cannot be read, is empty or unsorted, or a row is malformed (with its line).
    """
    try:
        first = _first_line(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"arrival.path={path}: cannot be read ({error}), give a trace's file") from error
    if not first.strip():
        raise ValueError(f"arrival.path={path}: the trace is empty, give one with requests")
    found = _mooncake(path) if first.lstrip().startswith("{") else _table(path, first)
    if not len(found.times):
        raise ValueError(f"arrival.path={path}: the trace has no requests, give one with requests")
    falling = np.flatnonzero(np.diff(found.times) < 0)
    if len(falling):
        raise ValueError(
            f"arrival.path={path}: request {falling[0] + 2} is earlier than the one before, sort the trace"
        )
    least = min(found.inputs.min(), found.outputs.min())
    if least < 0:
        raise ValueError(f"arrival.path={path}: a request has {least} tokens, give counts")
    # Some records have answers of no token, which ended before their first one.
    return found._replace(
        times=found.times - found.times[0], inputs=found.inputs.clip(1), outputs=found.outputs.clip(1)
    )


def _first_line(path: Path) -> str:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return file.readline()


_NAMES = {
    "TIMESTAMP": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "Timestamp": ("Timestamp", "Request tokens", "Response tokens"),
}


def _table(path: Path, header: str) -> Recorded:
    time = header.split(",")[0].strip()
    columns = _NAMES.get(time, ())
    if not columns or any(name not in header for name in columns):
        wanted = " or ".join(",".join(names) for names in _NAMES.values())
        raise ValueError(f"arrival.path={path}: its first line is {header.strip()!r}, and a trace begins with {wanted}")
    frame: Any = pandas.read_csv(path, usecols=list(columns), dtype=str, keep_default_na=False)
    numbers: Any = pandas.DataFrame()
    if time == "TIMESTAMP":
        moments: Any = pandas.to_datetime(frame[time], errors="coerce", format="ISO8601", utc=True)
        numbers["time"] = (moments - moments.iloc[0]).dt.total_seconds() if len(frame) else []
    else:
        numbers["time"] = pandas.to_numeric(frame[time], errors="coerce")
    for name, column in zip(("inputs", "outputs"), columns[1:], strict=True):
        numbers[name] = pandas.to_numeric(frame[column], errors="coerce")
    wrong = np.flatnonzero(numbers.isna().any(axis=1))
    if len(wrong):
        given = ",".join(frame.iloc[wrong[0]])
        raise ValueError(f"arrival.path={path}: line {wrong[0] + 2} is {given!r}: give a time and two counts")
    inputs, outputs = (numbers[name].to_numpy().astype(np.int64) for name in ("inputs", "outputs"))
    return Recorded(numbers.time.to_numpy(dtype=np.float64), inputs, outputs)


def _mooncake(path: Path) -> Recorded:
    times, inputs, outputs, blocks = [], [], [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            times.append(float(row["timestamp"]) / 1000)
            inputs.append(int(row["input_length"]))
            outputs.append(int(row["output_length"]))
            blocks.append([int(each) for each in row.get("hash_ids", ())])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"arrival.path={path}: line {number} is {line[:60]!r}: give Mooncake's fields") from error
    on_grid = np.array(times, dtype=np.float64)
    spread = on_grid + GRID * _place_in_group(on_grid) if len(on_grid) > 1 and _is_grid(on_grid) else on_grid
    return Recorded(spread, np.array(inputs, np.int64), np.array(outputs, np.int64), blocks)


def _is_grid(times: Times) -> bool:
    return bool(np.allclose(times % GRID % GRID, 0.0, atol=1e-6))


def _place_in_group(times: Times) -> Times:
    """Return where each request stands among those of its moment, from 0 to below 1."""
    _, where, counts = np.unique(times, return_inverse=True, return_counts=True)
    begins = np.concatenate([[0], counts.cumsum()[:-1]])
    return (np.arange(len(times)) - begins[where]) / counts[where]
