"""Shortest remaining work first."""

from specdec.arguments import number
from specdec.engine.scheduler.base import View, Work
from specdec.engine.scheduler.ranked import Ranked


class ShortestRemaining(Ranked):
    """Serves the request first that has least to do until its ``max_new_tokens``.

    That is the mean latency's best order where lengths are known, as in a trace that is replayed (``ignore_eos``).
    Where outputs end by themselves, ``max_new_tokens`` is all that is known. Long requests wait as long as shorter
    ones keep coming.

    Args:
        budget: See ``Ranked``.
        least: See ``Ranked``.
        preempts: See ``Ranked``.
        trims: See ``Ranked``.
        prompt_token: Work of a prompt's token, compared with that of an output's token.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        budget: int = 512,
        *,
        least: int = 16,
        trims: bool = False,
        preempts: bool = False,
        prompt_token: float = 0.05,
    ):
        super().__init__(budget, least=least, preempts=preempts, trims=trims)
        self.prompt_token = number("prompt_token", prompt_token, "give a ratio, such as 0.05")
        if not 0 <= self.prompt_token < float("inf"):
            raise ValueError(f"prompt_token={prompt_token}: give a ratio from 0 on")

    def plan(self, view: View) -> Work:
        return self.by_rank(view, lambda each: (each.remaining + self.prompt_token * each.to_prefill, each.id))
