"""Earliest deadline first."""

from dataclasses import dataclass

from specdec.engine.scheduler.base import View, Work
from specdec.engine.scheduler.ranked import Ranked
from specdec.requests import Request


@dataclass(eq=False, kw_only=True)
class Deadline(Ranked):
    """Serves the request first whose ``SamplingParams.deadline`` comes first.

    Attributes:
        patience: Seconds after its arrival that are the deadline of a request without one. With infinity it is served
            after all others, which may be never.
    """

    preempts: bool = True
    patience: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._above_zero("patience")

    def plan(self, view: View) -> Work:
        """Return the plan that serves the nearest deadlines first."""

        def rank(request: Request) -> tuple[float, int]:
            given = request.sampling.deadline
            return request.arrived + (self.patience if given is None else given), request.id

        return self.by_rank(view, rank)
