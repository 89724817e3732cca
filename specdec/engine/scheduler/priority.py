"""Priorities, which waiting improves."""

from dataclasses import dataclass

from specdec.engine.scheduler.base import View, Work
from specdec.engine.scheduler.ranked import Ranked


@dataclass(eq=False, kw_only=True)
class Priority(Ranked):
    """Serves lower ``SamplingParams.priority`` first; a request that has waited long overtakes others.

    A request's effective priority is ``priority - waited / ageing``. All requests age alike, so their order never
    changes: it is that of ``priority + arrived / ageing``. A request hence waits for those alone that came less than
    ``ageing`` seconds later for every level that they are above it.

    Attributes:
        ageing: Seconds of waiting that are worth one level of priority; infinity for none.
    """

    preempts: bool = True
    ageing: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._above_zero("ageing")

    def plan(self, view: View) -> Work:
        """Return the plan that serves the lowest effective priority first."""
        return self.by_rank(view, lambda each: (each.sampling.priority + each.arrived / self.ageing, each.id))
