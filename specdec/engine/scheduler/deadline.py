"""Earliest deadline first."""

from math import inf

from specdec.engine.scheduler.base import View, Work
from specdec.engine.scheduler.ranked import Ranked
from specdec.requests import Request


class Deadline(Ranked):
    """Serves the request first whose ``SamplingParams.deadline`` comes first; those without one come last, in order.

    Args:
        budget: See ``Ranked``.
        least: See ``Ranked``.
        preempts: See ``Ranked``.
        trims: See ``Ranked``.
    """

    def __init__(self, budget: int = 512, *, least: int = 16, preempts: bool = True, trims: bool = False):
        super().__init__(budget, least=least, preempts=preempts, trims=trims)

    def plan(self, view: View) -> Work:
        def rank(request: Request) -> tuple[float, int]:
            given = request.sampling.deadline
            return inf if given is None else request.arrived + given, request.id

        return self.by_rank(view, rank)
