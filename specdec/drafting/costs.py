"""How long rounds take, by rows and by the depth of their drafts: measured once, kept with the results."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Seconds of a round, everything included: drafting, the verify forward, acceptance, commit, the host.

    Attributes:
        rows: Batch sizes that were measured, ascending.
        table: For each of them the seconds of a round whose drafts are 0, 1, 2, … deep.
        device: What it was measured on.
        dtype: The target's.
        drafter: What drafted.
    """

    rows: tuple[int, ...]
    table: tuple[tuple[float, ...], ...]
    device: str = ""
    dtype: str = ""
    drafter: str = ""

    def __post_init__(self) -> None:
        flat = [seconds for row in self.table for seconds in row]
        widths = {len(row) for row in self.table}
        if not flat or len(self.rows) != len(self.table) or len(widths) > 1:
            raise ValueError(
                f"costs of rounds have {len(self.rows)} batch sizes and {len(self.table)} rows of lengths "
                f"{sorted(widths)}: give one row per batch size, all of one length"
            )
        if list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1:
            raise ValueError(f"costs of rounds have the batch sizes {self.rows}: give ascending positive numbers")
        if not all(0 < seconds < float("inf") for seconds in flat):
            raise ValueError("costs of rounds have a time that is no positive number of seconds: measure them again")

    @property
    def max_depth(self) -> int:
        """The deepest drafts that were measured."""
        return len(self.table[0]) - 1

    def seconds(self, rows: int, depth: int) -> Float[np.ndarray, " depths"]:
        """Returns the seconds of a round with drafts of depth 0 to ``depth``.

        Between measured batch sizes it interpolates, beyond them the nearest one counts. A draft never costs more than
        a deeper one: where it was measured so, something else kept the machine busy.

        Args:
            rows: The number of rows in the batch.
            depth: The deepest draft, at most ``max_depth``.

        Raises:
            ValueError: No draft of this depth was measured.
        """
        if depth > self.max_depth:
            raise ValueError(
                f"the costs of rounds were measured to depth {self.max_depth}, and drafts are {depth} deep: measure "
                f"them with this drafter"
            )
        table = np.minimum.accumulate(np.array(self.table)[:, ::-1], axis=1)[:, ::-1][:, : depth + 1]
        return np.array([np.interp(rows, self.rows, column) for column in table.T])

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "RoundCosts":
        """Returns what ``save`` has written.

        Raises:
            ValueError: The file cannot be read, or is something else.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            table = tuple(tuple(float(seconds) for seconds in row) for row in found.pop("table"))
            return cls(rows=tuple(int(row) for row in found.pop("rows")), table=table, **found)
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} holds no costs of rounds ({error}): give a file that RoundCosts.save wrote"
            ) from error


def smallest(times: Sequence[float]) -> float:
    """Returns a round's time free of what else the machine did: the lower quartile of several."""
    return float(np.quantile(times, 0.25))
