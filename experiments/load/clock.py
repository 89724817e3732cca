"""Which time a load runs in: the real engine's, virtual time, or both, the second to check the first."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.load.dense import Dense
from experiments.load.virtual import Costs
from specdec.drafting.policies.lengths import LengthPolicy
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.published import LLAMA_8B_H100
from specdec.shape import TreeShape

PUBLISHED: Mapping[str, Costs] = {"llama_8b_h100": LLAMA_8B_H100}
"""Costs by name that nobody has to measure."""
REAL, RECORD, BOTH, VIRTUAL = "real", "record", "both", "virtual"


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The time that a load runs in.

    Attributes:
        mode: ``"real"`` plays it on the engine. ``"record"`` plays nothing, and records dense traces of its requests.
            ``"both"`` plays it on the engine, records the traces, plays it in virtual time too, and says how far the
            two are apart. ``"virtual"`` needs no model: it plays with traces and costs that are there.
        costs: A file of ``experiments.calibrate``, or ``llama_8b_h100``; or one for each method, by name.
        traces: A file of dense traces; or one for each method, by name.
        shape: The tree that is drafted, in virtual time: what ``TreeShape.of`` takes. None for chains.
        seeds: How many times virtual time is played, with other arrivals, lengths and acceptances each. All of them
            are one result.
        mixed: Whether pieces of prompts share a forward with the round, as in vLLM.
        workers: Processes that play side by side.

    Raises:
        ValueError: A value is unknown, or missing for this mode.
    """

    mode: str = REAL
    costs: Any = None
    traces: Any = None
    shape: Any = None
    seeds: int = 1
    mixed: bool = False
    workers: int = 1

    def __post_init__(self) -> None:
        if self.mode not in (REAL, RECORD, BOTH, VIRTUAL):
            raise ValueError(f"clock.mode={self.mode!r}: give {REAL}, {RECORD}, {BOTH} or {VIRTUAL}")
        if self.mode in (BOTH, VIRTUAL) and not self.costs:
            raise ValueError(
                f"clock={self.mode} needs to know how long rounds take: give clock.costs=FILE of "
                f"experiments.calibrate, or {' or '.join(PUBLISHED)}"
            )
        if self.mode == VIRTUAL and not self.traces:
            raise ValueError(
                "clock=virtual needs to know what is accepted: give clock.traces=FILE, which clock=record writes"
            )
        for name in ("seeds", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"clock.{name}={getattr(self, name)}: give at least 1")

    def costs_of(self, method: str) -> Costs:
        """Return the costs of a method's rounds.

        Raises:
            ValueError: There are none, or their file cannot be read.
        """
        given = _own(self.costs, method, "costs")
        return PUBLISHED[given] if given in PUBLISHED else CalibratedRounds.load(given)

    def traces_of(self, method: str) -> Dense:
        """Return a method's traces.

        Raises:
            ValueError: There are none, or their file cannot be read.
        """
        return Dense.load(Path(_own(self.traces, method, "traces")))

    @property
    def tree(self) -> TreeShape | None:
        """The shape as one."""
        return None if self.shape is None else TreeShape.of(self.shape)


def _own(given: Any, method: str, name: str) -> str:
    if not isinstance(given, Mapping):
        return str(given)
    if method not in given:
        raise ValueError(f"clock.{name} has {', '.join(map(str, given))}, and not {method}: give it, too")
    return str(given[method])


def with_costs(policy: LengthPolicy | None, costs: Costs) -> LengthPolicy | None:
    """Return a policy that decides by these costs, where it decides by costs and was not given any."""
    if policy is not None and getattr(policy, "costs", costs) is None:
        policy.costs = costs  # pyright: ignore[reportAttributeAccessIssue]
    return policy
