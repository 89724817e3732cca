"""How long rounds take, by rows and by the size of their drafts: measured once, kept with the results."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

KIND = "calibrated costs of rounds"
"""The mark of the files that ``plan costs=fit`` writes."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions that costs were measured under. Costs of other conditions are refused.

    ``fingerprint`` is of the target's configuration and the storage of its weights: models of one fingerprint cost
    alike. ``quantization`` and ``kv_cache`` are None for the dtype, ``drafter`` where none was measured.
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


def check_conditions(measured: Conditions, here: Conditions, path: str, *, drafter: bool = True) -> None:
    """Refuse costs from a file under other conditions; ``drafter`` says whether the drafter matters."""
    then, now = asdict(measured), asdict(here)
    models = then.pop("model"), now.pop("model")
    different = []
    for name in then:
        if then[name] != now[name] and (drafter or name != "drafter"):
            by_name = name == "fingerprint" and models[0] != models[1]
            there, others = models if by_name else (then[name], now[name])
            different.append(f"{'model' if name == 'fingerprint' else name} is {there} there and {others} here")
    if different:
        raise ValueError(
            f"costs={path} were measured under other conditions ({'; '.join(different)}): calibrate again with "
            f"plan costs=fit"
        )


@runtime_checkable
class RaggedCosts(Protocol):
    """Whatever can say how long rounds take in which every row has a draft of its own length.

    Attributes:
        padded: Whether a round costs what its deepest draft does, however deep the others are.
    """

    @property
    def padded(self) -> bool: ...

    def check_depth(self, depth: int) -> None:
        """Refuse drafts that are deeper than the costs know, by a ``ValueError``."""
        ...

    def ragged(
        self, rows: int, positions: float, *, drafted: Int[np.ndarray, "*size"], deepest: Int[np.ndarray, "*#size"]
    ) -> Float[np.ndarray, "*size"]:
        """Return the seconds of rounds of ``rows`` rows with ``positions`` in the cache, over all rows.

        Args:
            drafted: Drafted tokens, over all rows.
            deepest: Depth of the deepest draft.
        """
        ...


class _Kept:
    """A dataclass that is written to a file as JSON."""

    def save(self: Any, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class RoundCosts(_Kept):
    """Seconds of a round, everything included: drafting, the verify forward, acceptance, commit, the host.

    Attributes:
        rows: Batch sizes that were measured, ascending.
        table: For each of them the seconds of a round whose drafts are 0, 1, 2, … deep; with ``nodes``, of a round that
            verifies so many nodes per row.
        nodes: The numbers of nodes that were measured, ascending from 0; None if it was the depth.
        conditions: Everything that calibrated costs were measured under; None for costs that were measured directly.
    """

    padded = True  # to one depth, with which rounds were measured
    rows: tuple[int, ...]
    table: tuple[tuple[float, ...], ...]
    nodes: tuple[int, ...] | None = None
    device: str = ""
    dtype: str = ""
    drafter: str = ""
    conditions: Conditions | None = None

    def __post_init__(self) -> None:
        flat, widths = [seconds for row in self.table for seconds in row], {len(row) for row in self.table}
        if not flat or len(self.rows) != len(self.table) or len(widths) > 1:
            raise ValueError(
                f"costs of rounds have {len(self.rows)} batch sizes and {len(self.table)} rows of lengths "
                f"{sorted(widths)}: give one row per batch size, all of one length"
            )
        nodes = range(len(self.table[0])) if self.nodes is None else self.nodes
        if list(nodes) != sorted(set(nodes)) or len(nodes) != len(self.table[0]) or nodes[0] != 0:
            raise ValueError(f"costs of rounds have the nodes {nodes}: give ascending numbers from 0, one per time")
        if list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1:
            raise ValueError(f"costs of rounds have the batch sizes {self.rows}: give ascending positive numbers")
        _check_seconds("rounds", flat)

    @property
    def max_depth(self) -> int:
        """The deepest drafts that were measured."""
        return len(self.table[0]) - 1

    def seconds(self, rows: int, depth: int) -> Float[np.ndarray, " depths"]:
        """Return the seconds of a round of ``rows`` rows with drafts of depth 0 to ``depth``.

        Between measured batch sizes it interpolates, beyond them the nearest one counts. A draft never costs more than
        a deeper one: where it was measured so, something else kept the machine busy.

        Raises:
            ValueError: No draft of this depth was measured.
        """
        if self.nodes is not None or depth > self.max_depth:
            known = f"to depth {self.max_depth}" if self.nodes is None else "by the number of nodes"
            asked = f"drafts are {depth} deep" if self.nodes is None else "depths are asked for"
            raise ValueError(
                f"the costs of rounds were measured {known}, and {asked}: measure them with this drafter "
                f"(experiments.calibrate)"
            )
        return self._rising(rows)[: depth + 1]

    def check_depth(self, depth: int) -> None:
        """Refuse drafts that are deeper than those that were measured."""
        self.seconds(self.rows[0], depth)

    def ragged(
        self, rows: int, positions: float, *, drafted: Int[np.ndarray, "*size"], deepest: Int[np.ndarray, "*#size"]
    ) -> Float[np.ndarray, "*size"]:
        """Return the seconds of rounds by their deepest drafts; see ``RaggedCosts``."""
        return self._rising(rows)[deepest]

    def by_nodes(self, rows: int, most: int) -> Float[np.ndarray, " nodes"]:
        """Return the seconds of a round of ``rows`` rows that verifies 0 to ``most`` nodes in each.

        This is the largest convex function that is nowhere above what was measured: every further node costs no less
        than the one before.

        Raises:
            ValueError: No round with so many nodes was measured.
        """
        if self.nodes is None or most > self.nodes[-1]:
            measured = "by the depth of drafts" if self.nodes is None else f"with up to {self.nodes[-1]} nodes"
            raise ValueError(
                f"the costs of rounds were measured {measured}, and trees have {most} nodes: measure them with this "
                f"drafter (experiments.calibrate)"
            )
        hull: list[tuple[float, float]] = []
        for x, y in zip(self.nodes, self._rising(rows).tolist(), strict=True):
            while len(hull) > 1:
                (left, low), (middle, height) = hull[-2:]
                if height < low + (y - low) / (x - left) * (middle - left):
                    break
                hull.pop()  # it is on or above the line between its neighbours
            hull.append((x, y))
        sizes, seconds = zip(*hull, strict=True)
        return np.interp(np.arange(most + 1), sizes, seconds)

    def _rising(self, rows: int) -> Float[np.ndarray, " sizes"]:
        """Return the times of a batch, none of which is more than that of a larger draft."""
        floor = self._floor
        below = max(bisect_right(self.rows, rows) - 1, 0)
        above = min(below + 1, len(self.rows) - 1)
        if rows <= self.rows[below] or below == above:
            return floor[below]
        share = (rows - self.rows[below]) / (self.rows[above] - self.rows[below])
        return floor[below] + share * (floor[above] - floor[below])

    @cached_property
    def _floor(self) -> Float[np.ndarray, "rows sizes"]:
        return np.minimum.accumulate(np.array(self.table)[:, ::-1], axis=1)[:, ::-1]

    @classmethod
    def load(cls, path: str | Path, *, by_nodes: bool = False) -> "RoundCosts":
        """Return what ``save`` has written, or a table in a file of ``plan costs=fit``: by nodes or by depth.

        Raises:
            ValueError: The file cannot be read, or is something else.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if found.get("kind") == KIND:
                found = found["tables"].get("nodes" if by_nodes else "depth")
            if found is not None:
                found["rows"] = tuple(map(int, found["rows"]))
                found["table"] = tuple(tuple(map(float, row)) for row in found["table"])
                if found.get("nodes") is not None:
                    found["nodes"] = tuple(map(int, found["nodes"]))
                if found.get("conditions") is not None:
                    found["conditions"] = Conditions(**found["conditions"])
                return cls(**found)
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} holds no costs of rounds ({error}): give a file that RoundCosts.save wrote"
            ) from error
        raise ValueError(f"the calibrated costs in {path} have no drafter's: calibrate with the drafter")


@dataclass(frozen=True, kw_only=True)
class TreeCosts(_Kept):
    """Seconds of a round, everything included, by the number of nodes and the depth of its trees.

    Between the trees that were measured, a round costs ``c + a · depth + f(nodes)``, where f is a line with bends at
    the measured sizes that never becomes flatter, fitted by least squares of the relative errors with no number below
    0. So a tree never costs less than a smaller one, and a single disturbed measurement counts for little.

    Attributes:
        trees: Nodes and depth of each tree that was measured.
        seconds: Seconds of a round with each of these trees.
        plain: Seconds of a round of plain decoding.
        rows: The batch size.
        threads: How many threads the processor used, which matters where the processor is the device.
    """

    trees: tuple[tuple[int, int], ...]
    seconds: tuple[float, ...]
    plain: float
    device: str = ""
    dtype: str = ""
    target: str = ""
    drafter: str = ""
    rows: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        if not self.trees or len(self.trees) != len(self.seconds):
            raise ValueError(
                f"costs of trees have {len(self.trees)} trees and {len(self.seconds)} times: give one time per tree"
            )
        if not all(nodes >= depth >= 1 for nodes, depth in self.trees):
            raise ValueError("costs of trees have a tree without nodes, or one that is deeper than its nodes are many")
        _check_seconds("trees", (*self.seconds, self.plain))

    def of(self, nodes: int, depth: int) -> float:
        """Return the seconds of a round with a tree of so many nodes and this depth."""
        return float(self._terms(np.array([[nodes, depth]]))[0] @ self._fit)

    @property
    def largest_error(self) -> float:
        """The largest error of the fitted costs at a measured tree, relative to what was measured."""
        return float(np.abs(self._terms(np.array(self.trees)) @ self._fit / np.array(self.seconds) - 1).max())

    @cached_property
    def _fit(self) -> Float[np.ndarray, " terms"]:
        from scipy.optimize import nnls  # takes a while to import

        measured = np.array(self.seconds)
        return nnls(self._terms(np.array(self.trees)) / measured[:, None], np.ones(len(measured)))[0]

    def _terms(self, trees: np.ndarray) -> Float[np.ndarray, "tree term"]:
        bends = np.unique([nodes for nodes, _ in self.trees]).astype(float)[:-1]
        nodes, depth = trees[:, :1].astype(float), trees[:, 1:].astype(float)
        return np.concatenate([np.ones_like(nodes), depth, nodes, np.maximum(nodes - bends, 0)], axis=1)

    @classmethod
    def load(cls, path: str | Path) -> "TreeCosts":
        """Return what ``save`` has written.

        Raises:
            ValueError: The file cannot be read, or is something else.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            trees = tuple((int(nodes), int(depth)) for nodes, depth in found.pop("trees"))
            return cls(trees=trees, seconds=tuple(map(float, found.pop("seconds"))), **found)
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} holds no costs of trees ({type(error).__name__}: {error}): give a file that TreeCosts.save "
                f"wrote, such as the tree_costs.json of replay best=tree"
            ) from error


def smallest(times: Sequence[float]) -> float:
    """Return a round's time free of what else the machine did: the lower quartile of several."""
    return float(np.quantile(times, 0.25))


def _check_seconds(what: str, seconds: Sequence[float]) -> None:
    if not all(0 < time < float("inf") for time in seconds):
        raise ValueError(f"costs of {what} have a time that is no positive number of seconds: measure them again")
