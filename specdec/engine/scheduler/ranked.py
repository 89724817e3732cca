"""Policies that serve requests by rank, within a budget of tokens per turn.

Rounds come first, and pieces of prompts fill the rest of the budget (chunked prefill; Sarathi-Serve, Agrawal et al.
2024, arXiv 2403.02310). A decoding request counts as its root and the nodes of its largest draft.
"""

import heapq
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import inf
from typing import Any, ClassVar

from specdec.arguments import flag, number, whole
from specdec.engine.scheduler.base import Scheduler, View, Work, within_memory
from specdec.requests import Request


@dataclass(eq=False)
class TokenBudget(Scheduler):
    """Lets all requests decode that can, and fills the rest of a turn's budget with pieces of the oldest prompts.

    Requests are admitted as long as the rounds of all of them leave ``least`` tokens of the budget. A single request
    is served even where its draft alone exceeds that. Other policies override ``rank``.

    Attributes:
        preempts: Whether a waiting request takes the slot and the pages of a running one that ranks behind it. Without
            it, only those give way who lack memory for their next round.
        trims: Whether drafts are made less deep where those of all decoding requests exceed the budget (trees: to the
            root alone), instead of admitting fewer requests. Sampled outputs then follow the same law with other
            random numbers, depending on the load.
    """

    positive: ClassVar[tuple[tuple[str, float], ...]] = ()  # attributes that are above 0, and their largest values
    budget: int = 512  # tokens per turn
    _: KW_ONLY
    least: int = 16  # tokens of the budget that rounds leave to prompts, so that a prompt is not held up for ever
    preempts: bool = False
    trims: bool = False

    def __post_init__(self) -> None:
        self.budget, self.least = whole("budget", self.budget, least=1), whole("least", self.least, least=1)
        self.preempts, self.trims = flag("preempts", self.preempts), flag("trims", self.trims)
        if self.least >= self.budget:
            raise ValueError(f"least={self.least}: rounds need some of budget={self.budget}, give less than that")
        for name, most in self.positive:
            setattr(self, name, number(name, getattr(self, name)))
            if not 0 < getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)}: give a number above 0{', or .inf' * (most == inf)}")

    def rank(self, request: Request) -> Any:
        """Return a request's rank, lower ones first; no two have the same. By default they stand as they came."""
        return request.id

    def plan(self, view: View) -> Work:
        """Return the plan that serves the lowest ranks first."""
        rank = self.rank
        stay, leave = within_memory(view, sorted(view.running, key=rank))
        new: list[Request] = []
        if not leave and view.waiting:
            most = view.free_slots
            if self.preempts and (most or min(map(rank, view.waiting)) < rank(stay[-1])):  # seldom: it sorts
                most += len(stay)
            new, leave = self._admitted(view, heapq.nsmallest(most, view.waiting, key=rank), stay)
            stay = stay[: len(stay) - len(leave)]
        prompts = [request for request in stay if request.to_prefill] + new
        decode = [request for request in stay if not request.to_prefill]
        return self._within_budget(view, decode, sorted(prompts, key=rank), leave)

    def _admitted(
        self, view: View, waiting: Sequence[Request], stay: Sequence[Request]
    ) -> tuple[list[Request], list[Request]]:
        """Return the waiting requests that enter, in order, and the last running ones, which give way to them."""
        entered, left, others, rank = list[Request](), list[Request](), list(stay), self.rank
        cost = (lambda request: 1) if self.trims else view.tokens
        slots, tokens = view.free_slots, self.budget - self.least - sum(map(cost, stay))
        pages = inf if view.free_pages is None else view.free_pages - sum(map(view.pages_needed, stay))
        prompts = [request for request in stay if request.to_prefill]
        for request in waiting:
            needed, costs, victims = view.pages_needed(request), cost(request), list[Request]()
            while slots < 1 or pages < needed or tokens < costs:
                if not (self.preempts and others and rank(others[-1]) > rank(request)):
                    break
                ahead = sum(min(p.to_prefill, view.prefill_chunk) for p in prompts if rank(p) < rank(request))
                if ahead >= self.budget:
                    break  # its prompt would not begin in this turn
                victims.append(others.pop())
                slots, pages, tokens = slots + 1, pages + view.freed(victims[-1]), tokens + cost(victims[-1])
            alone = not entered and not others
            if slots < 1 or pages < needed or (tokens < costs and not alone):
                break
            entered.append(request)
            prompts.append(request)
            left += victims
            slots, pages, tokens = slots - 1, pages - needed, tokens - costs
        return entered, left

    def _within_budget(
        self, view: View, decode: list[Request], prompts: Sequence[Request], leave: Sequence[Request]
    ) -> Work:
        spare, depth = min(self.least, sum(request.to_prefill for request in prompts)), None
        used = sum(map(view.tokens, decode))
        if self.trims and used > self.budget - spare:
            depth = max((self.budget - spare) // len(decode) - 1, 0)
            used = sum(view.tokens(request, depth) for request in decode)
            if used > self.budget - spare:
                depth, used = 0, len(decode)
        left, chunks = max(self.budget - used, spare), list[tuple[Request, int]]()
        for request in prompts:
            tokens = min(request.to_prefill, view.prefill_chunk, left)
            if request.to_prefill and not tokens:
                break
            chunks.append((request, tokens))
            left -= tokens
            costs = view.tokens(request, depth)
            if tokens == request.to_prefill and left >= costs:
                decode.append(request)
                left -= costs
        return Work(preempt=leave, prefill=chunks, decode=decode, depth=depth)


@dataclass(eq=False, kw_only=True)
class ShortestRemaining(TokenBudget):
    """Serves the request first that has least to do until its ``max_new_tokens``, less what waiting makes up for.

    That is the mean latency's best order where lengths are known, as in a trace that is replayed (``ignore_eos``).
    Where outputs end by themselves, ``max_new_tokens`` is all that is known.

    Attributes:
        ageing: Seconds of waiting that make up for one more output token to do. With infinity, a long request waits as
            long as shorter ones keep coming.
    """

    positive = (("ageing", inf), ("prompt_token", 1e9))
    prompt_token: float = 0.05  # work of a prompt's token, compared with that of an output's token
    ageing: float = 0.1

    def rank(self, request: Request) -> tuple[float, int]:
        work = request.remaining + self.prompt_token * request.to_prefill
        return work + 1 / self.ageing * request.arrived, request.id


@dataclass(eq=False, kw_only=True)
class Deadline(TokenBudget):
    """Serves the request first whose ``SamplingParams.deadline`` comes first.

    Attributes:
        patience: Seconds after its arrival that are the deadline of a request without one. With infinity it is served
            after all others, which may be never.
    """

    positive = (("patience", inf),)
    preempts: bool = True
    patience: float = 60.0

    def rank(self, request: Request) -> tuple[float, int]:
        deadline = request.sampling.deadline
        return request.arrived + (self.patience if deadline is None else deadline), request.id


@dataclass(eq=False, kw_only=True)
class Priority(TokenBudget):
    """Serves lower ``SamplingParams.priority`` first; a request that has waited long overtakes others.

    A request's effective priority is ``priority - waited / ageing``. All requests age alike, so their order never
    changes: a request waits for those alone that came less than ``ageing`` seconds later for every level above it.
    """

    positive = (("ageing", inf),)
    preempts: bool = True
    ageing: float = 10.0  # seconds of waiting that are worth one level of priority; infinity for none

    def rank(self, request: Request) -> tuple[float, int]:
        return request.sampling.priority + request.arrived / self.ageing, request.id


@dataclass(eq=False, kw_only=True)
class Tiers(TokenBudget):
    """Serves real-time requests (``priority`` of 0 or lower) as if the others were not there.

    A batch request gets slots, pages and tokens that no real-time request wants, and gives them back when one comes.

    Attributes:
        batch_rows: The most batch requests in a round in which a real-time request takes part, because every row makes
            the round longer; None for any number.
        patience: Seconds of waiting after which a batch request is served like a real-time one; infinity for never.
    """

    positive = (("patience", inf),)
    preempts: bool = field(default=True, init=False)
    batch_rows: int | None = None
    patience: float = inf

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batch_rows = None if self.batch_rows is None else whole("batch_rows", self.batch_rows, least=0)

    def plan(self, view: View) -> Work:
        work = super().plan(view)
        batch = [request for request in work.decode if request.sampling.priority > 0]
        if self.batch_rows is None or len(batch) in (0, len(work.decode)):
            return work
        left_out = {request.id for request in sorted(batch, key=self.rank)[self.batch_rows :]}
        return replace(work, decode=[request for request in work.decode if request.id not in left_out])

    def rank(self, request: Request) -> tuple[float, int]:
        """Real-time requests in their order; batch requests as if they had come ``patience`` later."""
        if request.sampling.priority <= 0:
            return request.arrived, request.id
        return request.arrived + self.patience if self.patience < inf else inf, request.id
