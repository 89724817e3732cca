"""How long rounds take, by rows and by the size of their drafts: measured once, kept with the results."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

KIND = "calibrated costs of rounds"
"""The mark of the files that ``experiments.calibrate`` writes."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What costs were measured on and with. Costs of other conditions are refused.

    Attributes:
        device: The processor's or the GPU's name.
        dtype: What the target computes in.
        model: The target's name.
        fingerprint: Of the target's configuration and the storage of its weights: models of one fingerprint cost alike.
        quantization: Of the target's weights; None for none.
        kv_cache: Format of keys and values; None for the dtype.
        attention: Name of the attention backend.
        executor: What runs forwards.
        threads: Of the processor.
        drafter: What drafted; None where no drafter was measured.
    """

    device: str
    dtype: str
    model: str
    fingerprint: str
    quantization: str | None = None
    kv_cache: str | None = None
    attention: str = ""
    executor: str = ""
    threads: int = 1
    drafter: str | None = None

    def differences(self, here: "Conditions", *, drafter: bool = True) -> list[str]:
        """Returns in words what is different where the costs are to be used; empty if nothing is.

        Args:
            here: The conditions there.
            drafter: Whether the drafter matters.
        """
        names = ["device", "dtype", "fingerprint", "quantization", "kv_cache", "attention", "executor", "threads"]
        names += ["drafter"] if drafter else []
        found = []
        for name in names:
            own, other = getattr(self, name), getattr(here, name)
            if own != other:
                shown = (self.model, here.model) if name == "fingerprint" and self.model != here.model else (own, other)
                found.append(f"{'model' if name == 'fingerprint' else name} is {shown[0]} there and {shown[1]} here")
        return found


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
    def load(cls, path: str | Path, *, by_nodes: bool = False) -> "RoundCosts":
        """Return what ``save`` has written, or one of the tables in a file of ``experiments.calibrate``.

        Args:
            path: The file.
            by_nodes: Which table of a calibrated file: by nodes, else by depth. A file of ``save`` has one.

        Raises:
            ValueError: The file cannot be read, or is something else.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if found.get("kind") == KIND:
                if not found.get("tables"):
                    raise ValueError(
                        f"the calibrated costs in {path} have no drafter's, and policies choose by those: calibrate "
                        f"with the drafter"
                    )
                found = found["tables"]["nodes" if by_nodes else "depth"]
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


def check_conditions(measured: Conditions, here: Conditions, path: str, *, drafter: bool = True) -> None:
    """Refuse to use costs under other conditions than they were measured under.

    Args:
        measured: The conditions of the costs.
        here: The conditions of what is going to run.
        path: Their file, for the message.
        drafter: Whether the drafter matters.

    Raises:
        ValueError: Names what differs.
    """
    different = measured.differences(here, drafter=drafter)
    if different:
        raise ValueError(
            f"costs={path} were measured under other conditions ({'; '.join(different)}): calibrate again with "
            f"experiments.calibrate"
        )
