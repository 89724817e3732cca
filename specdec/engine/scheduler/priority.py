"""Priorities, which waiting improves."""

from specdec.arguments import number
from specdec.engine.scheduler.base import View, Work
from specdec.engine.scheduler.ranked import Ranked


class Priority(Ranked):
    """Serves lower ``SamplingParams.priority`` first; a request that has waited long overtakes others.

    A request's effective priority is ``priority - waited / ageing``. All requests age alike, so their order never
    changes: it is that of ``priority + arrived / ageing``. A request hence waits for those alone that came less than
    ``ageing`` seconds later for every level that they are above it.

    Args:
        budget: See ``Ranked``.
        least: See ``Ranked``.
        preempts: See ``Ranked``.
        trims: See ``Ranked``.
        ageing: Seconds of waiting that are worth one level of priority; infinity for none.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self, budget: int = 512, *, least: int = 16, trims: bool = False, preempts: bool = True, ageing: float = 10.0
    ):
        super().__init__(budget, least=least, preempts=preempts, trims=trims)
        self.ageing = number("ageing", ageing, "give seconds, such as 10")
        if not self.ageing > 0:
            raise ValueError(f"ageing={ageing}: give seconds above 0, or .inf for no ageing")

    def plan(self, view: View) -> Work:
        return self.by_rank(view, lambda each: (each.sampling.priority + each.arrived / self.ageing, each.id))
