"""The plan that policies share which serve requests by rank, within a budget of tokens per turn.

Rounds come first, and pieces of prompts fill the rest of the budget (chunked prefill; Sarathi-Serve, Agrawal et al.
2024, arXiv 2403.02310). A decoding request counts as its root and the depth of its drafts.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from specdec.arguments import flag, whole
from specdec.engine.scheduler.base import Scheduler, View, Work, entering, within_memory
from specdec.requests import Request

Rank = Callable[[Request], Any]
"""Returns what sorts requests: lower ones are served first. No two requests may have the same."""


class Ranked(Scheduler):
    """A policy with a budget of tokens per turn, of which rounds take what they need.

    Args:
        budget: Tokens per turn.
        least: Tokens of prompts that are prefilled in any turn that has some, so that a prompt is not held up for ever
            where rounds use up the budget.
        preempts: Whether a waiting request takes the slot and the pages of a running one that ranks behind it. Without
            it, only those give way who lack memory for their next round.
        trims: Whether drafts are made less deep where those of all decoding requests exceed the budget. Sampled
            outputs then follow the same law with other random numbers, depending on the load.

    Raises:
        ValueError: A number is no count.
    """

    def __init__(self, budget: int = 512, *, least: int = 16, preempts: bool = False, trims: bool = False):
        self.budget, self.least = whole("budget", budget, least=1), whole("least", least, least=1)
        self.preempts, self.trims = flag("preempts", preempts), flag("trims", trims)

    def by_rank(self, view: View, rank: Rank) -> Work:
        """Return the plan that serves requests in this order."""
        stay, leave = within_memory(view, sorted(view.running, key=rank))
        new: list[Request] = []
        if not leave and view.waiting:
            most = view.free_slots + (len(stay) if self.preempts else 0)
            waiting = heapq.nsmallest(most, view.waiting, key=rank)
            new = entering(view, waiting, stay)
            if self.preempts:
                new, leave = _instead(view, waiting, new, stay, rank)
                stay = stay[: len(stay) - len(leave)]
        prompts = sorted((request for request in (*stay, *new) if request.to_prefill or request.slot < 0), key=rank)
        return self._within_budget(view, [request for request in stay if not request.to_prefill], prompts, leave)

    def _within_budget(
        self, view: View, decode: list[Request], prompts: Sequence[Request], leave: Sequence[Request]
    ) -> Work:
        spare = min(self.least, sum(request.to_prefill for request in prompts))
        rows, depth = len(decode), view.max_depth
        if self.trims and rows * (1 + depth) > self.budget - spare:
            depth = max((self.budget - spare) // rows - 1, 0)
        left = max(self.budget - rows * (1 + depth), spare)
        chunks = []
        for request in prompts:
            tokens = min(request.to_prefill, view.prefill_chunk, left)
            if request.to_prefill and not tokens:
                break
            chunks.append((request, tokens))
            left -= tokens
            if tokens == request.to_prefill and left >= 1 + depth:
                decode.append(request)
                left -= 1 + depth
        return Work(preempt=leave, prefill=chunks, decode=decode, depth=depth if depth < view.max_depth else None)


def _instead(
    view: View, waiting: Sequence[Request], new: list[Request], stay: Sequence[Request], rank: Rank
) -> tuple[list[Request], list[Request]]:
    """Return the waiting requests that enter, the first of which do so anyway, and the running ones that give way."""
    entered, left = list(new), list[Request]()
    slots, pages = view.free_slots - len(new), 0
    if view.free_pages is not None:
        pages = view.free_pages - sum(map(view.pages_needed, (*stay, *new)))
    others = list(stay)
    for request in waiting[len(new) :]:
        needed, victims = view.pages_needed(request), list[Request]()
        while (slots + len(victims) < 1 or pages < needed) and others and rank(others[-1]) > rank(request):
            victims.append(others.pop())
            pages += victims[-1].pages + view.pages_needed(victims[-1]) if view.free_pages is not None else 0
        if slots + len(victims) < 1 or pages < needed:
            break  # nobody gives way for a request that cannot enter all the same
        entered.append(request)
        left += victims
        slots, pages = slots + len(victims) - 1, pages - needed
    return entered, left
