"""Arrivals from recorded traffic: public traces in their own formats. None of them has texts."""

import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pandas
from jaxtyping import Float, Int

from experiments.load.arrivals import Arrivals, Times

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

    above_zero = ("scale",)
    path: str = "azure_conversation"
    scale: float = 1.0
    window: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.window
        numbers = isinstance(given, Sequence) and len(given) == 2 and all(isinstance(end, int | float) for end in given)
        if given is not None and not (numbers and 0 <= given[0] < given[1]):
            shown = list(given) if numbers else given
            raise ValueError(f"arrival.window={shown}: give [from, to] in seconds, the first one smaller, or null")

    @cached_property
    def recorded(self) -> Recorded:
        """The requests in the window, the first of which comes at 0."""
        found = read(_bundled().get(self.path, Path(self.path).expanduser()))
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


def _bundled() -> dict[str, Path]:
    return {each.name.split(".")[0]: each for each in BUNDLED.glob("*.csv.gz")}


def read(path: Path) -> Recorded:
    """Return the requests of a trace's file.

    Raises:
        ValueError: It cannot be read, is empty or unsorted, or a row is malformed (with its line).
    """
    try:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        known = ", ".join(sorted(_bundled()))
        raise ValueError(f"arrival.path={path}: cannot be read ({error}), give a file or one of {known}") from error
    header = text.lstrip().partition("\n")[0]
    if not header:
        raise ValueError(f"arrival.path={path}: the trace is empty, give one with requests")
    found, lines = _mooncake(path, text) if header.startswith("{") else _table(path, text, header)
    if not len(found.times):
        raise ValueError(f"arrival.path={path}: the trace has no requests, give one with requests")
    falling = np.flatnonzero(np.diff(found.times) < 0)
    if len(falling):
        raise ValueError(
            f"arrival.path={path}: line {lines[falling[0] + 1]} is earlier than the one before, sort the trace"
        )
    # Some records have answers of no token, which ended before their first one.
    return found._replace(
        times=found.times - found.times[0], inputs=found.inputs.clip(1), outputs=found.outputs.clip(1)
    )


_TABLES = (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ("Timestamp", "Request tokens", "Response tokens"))


def _table(path: Path, text: str, header: str) -> tuple[Recorded, Sequence[int]]:
    """Return the requests of a table, and their lines."""
    time = header.split(",")[0].strip()
    columns = next((each for each in _TABLES if each[0] == time), ())
    if not columns or any(name not in header for name in columns):
        wanted = " or ".join(",".join(names) for names in _TABLES)
        raise ValueError(f"arrival.path={path}: its first line is {header.strip()!r}, and a trace begins with {wanted}")
    try:
        frame: Any = pandas.read_csv(io.StringIO(text), dtype=str, keep_default_na=False, index_col=False)
    except pandas.errors.ParserError as error:
        raise ValueError(f"arrival.path={path}: {str(error).strip()}, give a time and two counts") from error
    numbers: Any = pandas.DataFrame()
    if time == "TIMESTAMP":
        moments: Any = pandas.to_datetime(frame[time], errors="coerce", format="ISO8601", utc=True)
        numbers["time"] = (moments - moments.iloc[0]).dt.total_seconds() if len(frame) else []
    else:
        numbers["time"] = pandas.to_numeric(frame[time], errors="coerce")
    for name, column in zip(("inputs", "outputs"), columns[1:], strict=True):
        numbers[name] = pandas.to_numeric(frame[column], errors="coerce")
    sound = np.isfinite(numbers.to_numpy(dtype=np.float64)).all(axis=1)
    wrong = np.flatnonzero(~sound | (numbers[["inputs", "outputs"]] < 0).any(axis=1))
    if len(wrong):
        given = ",".join(frame[list(columns)].iloc[wrong[0]])
        raise ValueError(f"arrival.path={path}: line {wrong[0] + 2} is {given!r}: give a time and two counts")
    inputs, outputs = (numbers[name].to_numpy().astype(np.int64) for name in ("inputs", "outputs"))
    return Recorded(numbers.time.to_numpy(dtype=np.float64), inputs, outputs), range(2, len(frame) + 2)


def _mooncake(path: Path, text: str) -> tuple[Recorded, Sequence[int]]:
    """Return the requests of JSON Lines, and their lines."""
    rows, lines = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            counts = int(row["input_length"]), int(row["output_length"])
            rows.append((float(row["timestamp"]) / 1000, *counts, [int(each) for each in row.get("hash_ids", ())]))
            if not np.isfinite(rows[-1][0]) or min(counts) < 0:
                raise ValueError("a time without end, or fewer than 0 tokens")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"arrival.path={path}: line {number} is {line[:60]!r}: give Mooncake's fields") from error
        lines.append(number)
    on_grid = np.array([row[0] for row in rows], dtype=np.float64)
    is_grid = len(on_grid) > 1 and np.allclose(on_grid % GRID % GRID, 0.0, atol=1e-6)
    spread = on_grid + GRID * _place_in_group(on_grid) if is_grid else on_grid
    inputs, outputs = (np.array([row[place] for row in rows], dtype=np.int64) for place in (1, 2))
    return Recorded(spread, inputs, outputs, [row[3] for row in rows]), lines


def _place_in_group(times: Times) -> Times:
    """Return where each request stands among those of its moment, from 0 to below 1."""
    _, where, counts = np.unique(times, return_inverse=True, return_counts=True)
    begins = np.concatenate([[0], counts.cumsum()[:-1]])
    return (np.arange(len(times)) - begins[where]) / counts[where]
