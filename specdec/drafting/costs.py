"""How long rounds take, by rows and by the size of their drafts: measured once, kept with the results."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from specdec.roofline.calibrated import CalibratedRounds, Conditions, is_calibrated


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
        conditions: Everything that calibrated costs were measured under; None for costs that were measured directly.
    """

    rows: tuple[int, ...]
    table: tuple[tuple[float, ...], ...]
    nodes: tuple[int, ...] | None = None
    device: str = ""
    dtype: str = ""
    drafter: str = ""
    conditions: Conditions | None = None

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
    def of(cls, costs: CalibratedRounds, *, by_nodes: bool = False, context: float | None = None) -> "RoundCosts":
        """Returns the costs of rounds that follow from calibrated ones.

        Args:
            costs: Calibrated costs, with a drafter's.
            by_nodes: By the number of nodes that are verified of a whole drafted tree; else by depth.
            context: Positions in a row's cache; None for the middle of what was calibrated.

        Raises:
            ValueError: No drafter was calibrated, or the context is outside of what was.
        """
        if not costs.deepest:
            raise ValueError(
                "these calibrated costs have no drafter's, and policies choose by those: calibrate with the drafter"
            )
        least, most = costs.box.batch
        rows = sorted({least, most, *(2**power for power in range(12) if least <= 2**power <= most)})
        at = {"context": costs.middle if context is None else context}
        largest = min(round(costs.nodes_at(costs.deepest)), costs.box.drafted[1])
        nodes = tuple(sorted({*range(min(4, largest) + 1), *range(0, largest, 4), largest})) if by_nodes else None
        if nodes is not None:
            whole = {row: costs.draft(batch=row, drafted=largest, **at) + costs.outside for row in rows}
            table = [[costs.verify(batch=row, drafted=node, **at) + whole[row] for node in nodes] for row in rows]
        else:
            sizes = [(round(costs.nodes_at(depth)), depth) for depth in range(costs.deepest + 1)]
            sizes = [(size, depth) for size, depth in sizes if size <= costs.box.drafted[1]]
            table = [
                [costs.round_seconds(batch=row, drafted=size, depth=depth, **at) for size, depth in sizes]
                for row in rows
            ]
        return cls(
            rows=tuple(rows),
            table=tuple(map(tuple, table)),
            nodes=nodes,
            device=costs.conditions.device,
            dtype=costs.conditions.dtype,
            drafter=costs.conditions.drafter or "",
            conditions=costs.conditions,
        )

    @classmethod
    def load(cls, path: str | Path, *, by_nodes: bool = False) -> "RoundCosts":
        """Returns what ``save`` has written, or what follows from a file of ``experiments.calibrate`` (``of``).

        Args:
            path: The file.
            by_nodes: See ``of``; a file of ``save`` says itself what it is by.

        Raises:
            ValueError: The file cannot be read, or is something else.
        """
        if is_calibrated(path):
            return cls.of(CalibratedRounds.load(path), by_nodes=by_nodes)
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            table = tuple(tuple(float(seconds) for seconds in row) for row in found.pop("table"))
            nodes = found.pop("nodes", None)
            rows = tuple(int(row) for row in found.pop("rows"))
            given = found.pop("conditions", None)
            return cls(
                rows=rows,
                table=table,
                nodes=None if nodes is None else tuple(map(int, nodes)),
                conditions=None if given is None else Conditions(**given),
                **found,
            )
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
