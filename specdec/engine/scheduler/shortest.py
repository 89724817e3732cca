"""Shortest remaining work first, which waiting makes shorter."""

from dataclasses import dataclass

from specdec.engine.scheduler.base import View, Work
from specdec.engine.scheduler.ranked import Ranked
from specdec.requests import Request


@dataclass(eq=False, kw_only=True)
class ShortestRemaining(Ranked):
    """Serves the request first that has least to do until its ``max_new_tokens``.

    That is the mean latency's best order where lengths are known, as in a trace that is replayed (``ignore_eos``).
    Where outputs end by themselves, ``max_new_tokens`` is all that is known.

    Attributes:
        prompt_token: Work of a prompt's token, compared with that of an output's token.
        ageing: Seconds of waiting that make up for one more output token to do. With infinity, a long request waits as
            long as shorter ones keep coming.
    """

    prompt_token: float = 0.05
    ageing: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._above_zero("ageing")
        self._above_zero("prompt_token", most=1e9)

    def plan(self, view: View) -> Work:
        """Return the plan that serves the least work first, less what waiting makes up for."""
        weight, rate = self.prompt_token, 1 / self.ageing

        def rank(request: Request) -> tuple[float, int]:
            return request.remaining + weight * request.to_prefill + rate * request.arrived, request.id

        return self.by_rank(view, rank)
