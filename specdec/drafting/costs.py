"""How long rounds take, by rows and by the size of their drafts: measured once, kept with the results."""

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
        table: For each of them the seconds of a round whose drafts are 0, 1, 2, … deep; with ``nodes``, of a round that
            verifies so many nodes per row.
        nodes: The numbers of nodes that were measured, ascending from 0; None if it was the depth.
        device: What it was measured on.
        dtype: The target's.
        drafter: What drafted.
    """

    rows: tuple[int, ...]
    table: tuple[tuple[float, ...], ...]
    nodes: tuple[int, ...] | None = None
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
        if self.nodes is not None and (
            len(self.nodes) != len(self.table[0]) or list(self.nodes) != sorted(set(self.nodes)) or self.nodes[0] != 0
        ):
            raise ValueError(
                f"costs of rounds have the numbers of nodes {self.nodes} and {len(self.table[0])} times for each batch "
                f"size: give ascending numbers from 0, one per time"
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
        if self.nodes is not None:
            raise ValueError(
                "these costs of rounds are by the number of nodes, and depths are asked for: measure them with "
                "drafters.round_costs.measure_costs"
            )
        if depth > self.max_depth:
            raise ValueError(
                f"the costs of rounds were measured to depth {self.max_depth}, and drafts are {depth} deep: measure "
                f"them with this drafter"
            )
        return self._rising(rows)[: depth + 1]

    def by_nodes(self, rows: int, most: int) -> Float[np.ndarray, " nodes"]:
        """Returns the seconds of a round that verifies 0 to ``most`` nodes in every row.

        Times between measured numbers are interpolated, and steps of the curve are taken away: it is the largest convex
        function that is nowhere above what was measured. So every further node costs no less than the one before.

        Args:
            rows: The number of rows in the batch.
            most: The largest number of nodes.

        Raises:
            ValueError: No round with so many nodes was measured.
        """
        if self.nodes is None or most > self.nodes[-1]:
            measured = "by the depth of drafts" if self.nodes is None else f"with up to {self.nodes[-1]} nodes"
            raise ValueError(
                f"the costs of rounds were measured {measured}, and trees have {most} nodes: measure them with this "
                f"drafter (drafters.round_costs.measure_node_costs)"
            )
        hull: list[tuple[float, float]] = []
        for point in zip(self.nodes, self._rising(rows).tolist(), strict=True):
            while len(hull) > 1 and _above(hull[-1], hull[-2], point):
                hull.pop()
            hull.append(point)
        sizes, seconds = zip(*hull, strict=True)
        return np.interp(np.arange(most + 1), sizes, seconds)

    def _rising(self, rows: int) -> Float[np.ndarray, " sizes"]:
        """Returns the times of a batch, none of which is more than that of a larger draft."""
        table = np.minimum.accumulate(np.array(self.table)[:, ::-1], axis=1)[:, ::-1]
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
            nodes = found.pop("nodes", None)
            rows = tuple(int(row) for row in found.pop("rows"))
            return cls(rows=rows, table=table, nodes=None if nodes is None else tuple(map(int, nodes)), **found)
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} holds no costs of rounds ({error}): give a file that RoundCosts.save wrote"
            ) from error


def _above(point: tuple[float, float], left: tuple[float, float], right: tuple[float, float]) -> bool:
    """Returns whether a point is on or above the line between two others."""
    slope = (right[1] - left[1]) / (right[0] - left[0])
    return point[1] >= left[1] + slope * (point[0] - left[0])


def smallest(times: Sequence[float]) -> float:
    """Returns a round's time free of what else the machine did: the lower quartile of several."""
    return float(np.quantile(times, 0.25))
