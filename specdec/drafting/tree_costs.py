"""How long rounds take, by the number of nodes and the depth of their trees: measured once, kept, interpolated."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float
from scipy.optimize import nnls

from specdec.drafting.best_shapes import PlannedShape


@dataclass(frozen=True, kw_only=True)
class TreeCosts:
    """Seconds of a round, everything included: drafting, the verify forward, acceptance, commit, the host.

    Between the trees that were measured, a round is taken to cost ``c + a · depth + f(nodes)``, where f is a line with
    bends at the measured sizes that never becomes flatter: a forward costs the same for few nodes and then more and
    more, and every level of the tree takes a call of the drafter. The numbers are fitted to the measured rounds by
    least squares of the relative errors, none of them below 0. So a tree never costs less than a smaller one, and a
    single disturbed measurement counts for little.

    Attributes:
        trees: Nodes and depth of each tree that was measured.
        seconds: Seconds of a round with each of these trees.
        plain: Seconds of a round of plain decoding.
        device: What it was measured on.
        dtype: The target's.
        target, drafter: What verified and drafted.
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
        if not all(0 < seconds < float("inf") for seconds in (*self.seconds, self.plain)):
            raise ValueError("costs of trees have a time that is no positive number of seconds: measure them again")

    def of(self, nodes: int, depth: int) -> float:
        """Returns the seconds of a round with a tree of so many nodes and this depth."""
        return float(self._terms(np.array([[nodes, depth]]))[0] @ self._fit)

    @property
    def largest_error(self) -> float:
        """The largest error of the fitted costs at a measured tree, relative to what was measured."""
        measured = np.array(self.seconds)
        return float(np.abs(self._terms(np.array(self.trees)) @ self._fit / measured - 1).max())

    @cached_property
    def _fit(self) -> Float[np.ndarray, " terms"]:
        measured = np.array(self.seconds)
        return nnls(self._terms(np.array(self.trees)) / measured[:, None], np.ones(len(measured)))[0]

    @cached_property
    def _bends(self) -> Float[np.ndarray, " bends"]:
        return np.unique([nodes for nodes, _ in self.trees]).astype(float)[:-1]

    def _terms(self, trees: np.ndarray) -> Float[np.ndarray, "tree term"]:
        nodes, depth = trees[:, :1].astype(float), trees[:, 1:].astype(float)
        return np.concatenate([np.ones_like(nodes), depth, nodes, np.maximum(nodes - self._bends, 0)], axis=1)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "TreeCosts":
        """Returns what ``save`` has written.

        Raises:
            ValueError: The file cannot be read, or is something else.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            trees = tuple((int(nodes), int(depth)) for nodes, depth in found.pop("trees"))
            return cls(trees=trees, seconds=tuple(map(float, found.pop("seconds"))), **found)
        except (OSError, KeyError, TypeError, AttributeError, UnicodeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} holds no costs of trees ({type(error).__name__}: {error}): give a file that TreeCosts.save "
                f"wrote, such as the tree_costs.json of experiments.optimize_tree"
            ) from error


def fastest(planned: Sequence[PlannedShape], costs: TreeCosts) -> PlannedShape:
    """Returns the tree with the most expected tokens per second; of equal ones, that with the fewest nodes."""
    return max(planned, key=lambda each: (each.tokens / costs.of(each.nodes, each.depth), -each.nodes))
