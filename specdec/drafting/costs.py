"""How long rounds take, by rows and by the size of their drafts: measured once, kept with the results."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, combinations
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

KIND = "calibrated costs of rounds"  # the mark of the files that ``plan costs=fit`` writes
_Costs = TypeVar("_Costs")
Counts = Int[np.ndarray, "*size"]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions that costs were measured under; models of one ``fingerprint`` cost alike."""

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
    if then["model"] == now["model"]:  # models of one name may differ
        then["model"], now["model"] = then["fingerprint"], now["fingerprint"]
    elif then["fingerprint"] == now["fingerprint"]:
        now["model"] = then["model"]
    names = [name for name in then if name != "fingerprint" and (drafter or name != "drafter")]
    different = [f"{name} is {then[name]} there and {now[name]} here" for name in names if then[name] != now[name]]
    if different:
        why = "; ".join(different)
        raise ValueError(f"costs={path} were measured under other conditions ({why}): make them anew by plan costs=fit")


@runtime_checkable
class RaggedCosts(Protocol):
    """Seconds of rounds in which every row has a draft of its own length."""

    padded: bool  # whether a round costs what its deepest draft does, however deep the others are

    def check_depth(self, depth: int) -> None:
        """Refuse drafts that are deeper than the costs know."""

    def ragged(self, rows: int, positions: float, *, drafted: Counts, deepest: Any) -> Float[np.ndarray, "*size"]:
        """Return the seconds of rounds with ``positions`` in the cache and ``drafted`` tokens in all rows together."""
        ...


@dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Seconds of a round, everything included: drafting, the verify forward, acceptance, commit, the host.

    ``table`` has for each batch size (``rows``, ascending) the seconds of a round whose drafts are 0, 1, 2, … deep;
    with ``nodes``, ascending from 0, of a round that verifies so many nodes per row. Calibrated costs have the
    ``conditions`` that they were measured under.
    """

    padded = True  # to one depth, with which rounds were measured
    rows: tuple[int, ...]
    table: tuple[tuple[float, ...], ...]
    nodes: tuple[int, ...] | None = None
    device: str = ""
    dtype: str = ""
    target: str = ""
    drafter: str = ""
    threads: int = 1
    conditions: Conditions | None = None

    def __post_init__(self) -> None:
        sizes = len(self.table[0]) if self.table else 0
        nodes, rows, times = [*(self.nodes or range(sizes))], [*self.rows], [*chain(*self.table)]
        ascending = nodes == sorted({0, *nodes}) and rows == sorted({*rows}) and min(rows, default=0) > 0
        alike = [len(row) for row in self.table] == [sizes] * len(rows) and len(nodes) == sizes > 0
        if not (ascending and alike and all(0 < time < float("inf") for time in times)):
            raise ValueError("costs of rounds need ascending rows, nodes from 0, and positive times: measure again")

    @property
    def max_depth(self) -> int:
        return len(self.table[0]) - 1

    def seconds(self, rows: int, depth: int) -> Float[np.ndarray, " depths"]:
        """Return the seconds of a round with drafts of depth 0 to ``depth``; none costs more than a deeper one.

        Between measured batch sizes it interpolates, beyond them the nearest one counts.
        """
        if self.nodes is not None:
            raise self._unknown("depths are asked for")
        if depth > self.max_depth:
            raise self._unknown(f"drafts are {depth} deep")
        return self._rising(rows)[: depth + 1]

    def check_depth(self, depth: int) -> None:
        self.seconds(self.rows[0], depth)

    def ragged(self, rows: int, positions: float, *, drafted: Counts, deepest: Any) -> Float[np.ndarray, "*size"]:
        return self._rising(rows)[deepest]

    def by_nodes(self, rows: int, most: int) -> Float[np.ndarray, " nodes"]:
        """Return the seconds of a round that verifies 0 to ``most`` nodes per row, made convex from below."""
        if self.nodes is None or most > self.nodes[-1]:
            raise self._unknown(f"trees have {most} nodes")
        sizes, times, wanted = np.array(self.nodes), self._rising(rows), np.arange(most + 1)
        seconds = np.interp(wanted, sizes, times)
        for one, other in combinations(range(len(sizes)), 2):  # the lowest line between two that were measured
            inside = slice(sizes[one], sizes[other] + 1)
            line = np.interp(wanted[inside], sizes[[one, other]], times[[one, other]])
            seconds[inside] = np.minimum(seconds[inside], line)
        return seconds

    def _rising(self, rows: int) -> Float[np.ndarray, " sizes"]:
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

    def _unknown(self, wanted: str) -> ValueError:
        by = f"to depth {self.max_depth}" if self.nodes is None else f"by the number of nodes, up to {self.nodes[-1]}"
        return ValueError(f"the costs of rounds were measured {by}, and {wanted}: measure them so with this drafter")

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, *, by_nodes: bool = False) -> "RoundCosts":
        """Read a file of ``save``, or a table in a file of ``plan costs=fit``: by nodes or by depth."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content.get("kind") == KIND:
                content = content["tables"].get("nodes" if by_nodes else "depth")
            if content is not None:
                conditions = content.pop("conditions", None)
                return cls(
                    **{name: _tuples(value) for name, value in content.items()},
                    conditions=None if conditions is None else Conditions(**conditions),
                )
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            remedy = "give a file of plan costs=fit, or the round_costs.json of a run"
            raise ValueError(f"{path} holds no costs of rounds ({error}): {remedy}") from error
        raise ValueError(f"the calibrated costs in {path} have no drafter's: calibrate with the drafter")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def needed(costs: _Costs | None) -> _Costs:
    """Return costs; refuse to go on without any."""
    if costs is None:
        raise ValueError("this policy needs to know how long rounds take: give costs=…, a file of plan costs=fit")
    return costs


def smallest(times: Sequence[float]) -> float:
    """Return a round's time free of what else the machine did: the lower quartile of several."""
    return float(np.quantile(times, 0.25))
