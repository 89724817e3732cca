"""Arrivals from recorded traffic: public traces in their own formats. None of them has texts."""

import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
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
        blocks = self.blocks and list(compress(self.blocks, chosen))
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


_TABLES = (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ("Timestamp", "Request tokens", "Response tokens"))
_MOONCAKE = ("timestamp", "input_length", "output_length")


def read(path: Path) -> Recorded:
    """Return the requests of a trace's file.

    Raises:
        ValueError: It cannot be read, is empty or unsorted, or a row is malformed (with its line).
    """
    try:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        is_json = text.lstrip().startswith("{")
        first = 1 if is_json else 2  # the line of the first request
        if is_json:
            frame: Any = pandas.DataFrame([json.loads(line) for line in text.splitlines() if line.strip()])
        else:
            frame = pandas.read_csv(io.StringIO(text), dtype=str, keep_default_na=False, index_col=False)
    except (OSError, EOFError, ValueError) as error:  # pandas' and JSON's errors are ValueErrors, too
        known = ", ".join(sorted(_bundled()))
        cause = str(error).strip()
        raise ValueError(f"arrival.path={path}: cannot be read ({cause}), give a file or one of {known}") from error
    columns = next((names for names in (_MOONCAKE, *_TABLES) if set(names) <= set(frame.columns)), None)
    if columns is None or frame.empty:
        wanted = " or ".join(",".join(names) for names in _TABLES)
        raise ValueError(
            f"arrival.path={path}: no requests in known columns: give a trace that begins with {wanted}, or Mooncake's"
        )
    rows = frame[list(columns)]
    numbers = rows.apply(pandas.to_numeric, errors="coerce").set_axis(["time", "inputs", "outputs"], axis=1)
    if columns == _TABLES[0]:
        moments: Any = pandas.to_datetime(rows.TIMESTAMP, errors="coerce", format="ISO8601", utc=True)
        numbers["time"] = (moments - moments.iloc[0]).dt.total_seconds()
    wrong = ~np.isfinite(numbers.to_numpy(np.float64)).all(axis=1) | (numbers[["inputs", "outputs"]] < 0).any(axis=1)
    if wrong.any():
        place = int(np.argmax(wrong))
        given = ",".join(map(str, rows.iloc[place]))
        raise ValueError(f"arrival.path={path}: line {place + first} is {given!r}: give a time and two counts")
    times, blocks = numbers.time.to_numpy(np.float64), None
    if is_json:
        times = _spread(times / 1000)
        blocks = [list(map(int, ids)) for ids in frame.hash_ids] if "hash_ids" in frame else None
    if (falling := np.diff(times) < 0).any():
        later = int(np.argmax(falling)) + 1 + first
        raise ValueError(f"arrival.path={path}: line {later} is earlier than the one before, sort the trace")
    # Some records have answers of no token, which ended before their first one.
    inputs, outputs = (numbers[name].to_numpy(np.int64).clip(1) for name in ("inputs", "outputs"))
    return Recorded(times - times[0], inputs, outputs, blocks)


def _spread(times: Times) -> Times:
    """Return times on Mooncake's grid spread evenly behind their moments; others as they are."""
    if len(times) < 2 or not np.allclose(times % GRID % GRID, 0.0, atol=1e-6):
        return times
    _, where, counts = np.unique(times, return_inverse=True, return_counts=True)
    begins = counts.cumsum() - counts
    return times + GRID * (np.arange(len(times)) - begins[where]) / counts[where]
