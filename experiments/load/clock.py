"""Which time a load runs in: the real engine's, virtual time, or both, the second to check the first."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.load.dense import Dense
from experiments.load.virtual import Costs
from specdec.arguments import flag, whole
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.rounds import LLAMA_8B_H100
from specdec.shape import TreeShape

PUBLISHED: Mapping[str, Costs] = {"llama_8b_h100": LLAMA_8B_H100}
"""Costs by name that nobody has to measure."""
REAL, RECORD, BOTH, VIRTUAL = "real", "record", "both", "virtual"


class Clock:
    """The time that a load runs in: here, the engine's own.

    Attributes:
        mode: ``REAL``, ``RECORD``, ``BOTH`` or ``VIRTUAL``.
        costs: A file of ``plan costs=fit``, or a name of ``PUBLISHED``; or one for each method, by name.
        traces: A file of dense traces; or one for each method, by name.
        tree: The tree that is drafted in virtual time; None for chains.
        seeds: How many times virtual time is played, with other draws of what is accepted; a load that is in virtual
            time alone also with other arrivals and lengths. All make one result.
        mixed: Whether pieces of prompts share a forward with the round, as in vLLM.
        workers: Processes that play side by side.
    """

    mode = REAL
    costs: Any = None
    traces: Any = None
    tree: TreeShape | None = None
    seeds = 1
    mixed = False
    workers = 1

    def costs_of(self, method: str) -> Costs:
        """Return the costs of a method's rounds. Raises ValueError: there are none, or their file cannot be read."""
        given = _own(self.costs, method, "costs")
        return PUBLISHED[given] if given in PUBLISHED else CalibratedRounds.load(given)

    def traces_of(self, method: str) -> Dense:
        """Return a method's traces. Raises ValueError: there are none, or their file cannot be read."""
        return Dense.load(Path(_own(self.traces, method, "traces")))


class Record(Clock):
    """Plays nothing, and records dense traces of the load's requests."""

    mode = RECORD


class Both(Clock):
    """Plays a load on the engine, records its traces, plays it in virtual time too, and says how far they are apart.

    Args:
        shape: The tree, as ``TreeShape.of`` takes it.

    Raises:
        ValueError: Costs are missing, or a number is no count.
    """

    mode = BOTH

    def __init__(self, costs: Any = None, *, shape: Any = None, seeds: int = 1, workers: int = 1):
        if not costs:
            raise ValueError(
                f"clock={self.mode} needs to know how long rounds take: give clock.costs=FILE of "
                f"plan costs=fit, or {' or '.join(PUBLISHED)}"
            )
        self.costs, self.tree = costs, None if shape is None else TreeShape.of(shape)
        self.seeds, self.workers = whole("clock.seeds", seeds, least=1), whole("clock.workers", workers, least=1)


class Virtual(Both):
    """Plays a load in virtual time: no model runs. Raises ValueError: also where traces are missing."""

    mode = VIRTUAL

    def __init__(
        self,
        costs: Any = None,
        traces: Any = None,
        *,
        shape: Any = None,
        seeds: int = 1,
        mixed: bool = False,
        workers: int = 1,
    ):
        super().__init__(costs, shape=shape, seeds=seeds, workers=workers)
        if not traces:
            raise ValueError(
                "clock=virtual needs to know what is accepted: give clock.traces=FILE, which clock=record writes"
            )
        self.traces, self.mixed = traces, flag("clock.mixed", mixed)


def _own(given: Any, method: str, name: str) -> str:
    if not isinstance(given, Mapping):
        return str(given)
    if method not in given:
        raise ValueError(f"clock.{name} has {', '.join(map(str, given))}, and not {method}: give it, too")
    return str(given[method])
