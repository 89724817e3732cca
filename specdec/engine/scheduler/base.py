"""Scheduling policies: who prefills how much, who decodes, how deep, and who gives way. First come, first served."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from math import ceil

from specdec.requests import Request


@dataclass(frozen=True, kw_only=True)
class View:
    """The state of an engine that a policy plans from; nothing here may be changed.

    Attributes:
        running: Requests with a slot, in the order in which they came. Those with tokens ``to_prefill`` cannot take
            part in a round yet.
        reserve: The share of its output for which a request gets pages when it is admitted (``Paging.reserve``).
        shared: Returns how many of a running request's pages others use, too, which its leaving does not free.
    """

    now: float = 0.0  # the time, on the clock of ``Request.arrived``
    waiting: Sequence[Request]  # requests without a slot, in the order in which they came
    running: Sequence[Request]
    free_slots: int
    free_pages: int | None = None  # None where every slot has its own row
    page_size: int = 1  # positions of a page
    reserve: float = 1.0
    prefill_chunk: int  # the most tokens of one request that a forward may prefill
    max_depth: int  # the depth of the deepest drafts
    max_nodes: int | None = None  # the nodes of the largest drafts; None for those of a chain, as many as they are deep
    shared: Callable[[Request], int] = lambda request: 0

    def tokens(self, request: Request, depth: int | None = None) -> int:
        """Return how many tokens a request's next round verifies at most: its root, and the nodes of its draft.

        A tree's count in full where drafts are cut to a ``depth``: nobody knows how many of them are deeper.
        """
        if depth == 0 or not request.speculate or request.remaining == 1:
            return 1
        nodes = self.max_depth if self.max_nodes is None else self.max_nodes
        return 1 + (nodes if depth is None or nodes > self.max_depth else min(nodes, depth))

    def positions(self, request: Request) -> int:
        """Return how many positions a request gets pages for: to be admitted, or to play this round and another one.

        The host may be a round late, so that the next one has begun before it knows how this one has ended.
        """
        ahead = 2 * (1 + self.max_depth * request.speculate)
        if request.slot < 0:
            ahead = max(ahead, ceil(self.reserve * request.remaining))
        return request.length + min(ahead, request.remaining)

    def pages_needed(self, request: Request) -> int:
        """Return how many more pages a request needs, to be admitted or for its next round; what is shared counts."""
        if self.free_pages is None:
            return 0
        return max(-(-self.positions(request) // self.page_size) - request.pages, 0)

    def freed(self, request: Request) -> int:
        """Return how many more pages there are for others if a running request leaves: its own, and those it needs."""
        return request.pages - self.shared(request) + self.pages_needed(request)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one turn of an engine, in the order in which it is done.

    Attributes:
        preempt: Running requests that give up their slots. They wait again, and their tokens are prefilled again later.
        prefill: Requests and how many of their tokens to prefill, at most the engine's ``prefill_chunk``. A request
            that waits takes a free slot by this.
        decode: Requests that take part in the round that follows. Those that have no slot by then, are not
            prefilled, or lack pages for it are left out.
    """

    preempt: Sequence[Request] = ()
    prefill: Sequence[tuple[Request, int]] = ()
    decode: Sequence[Request] = ()
    depth: int | None = None  # the depth of the drafts of that round at most; None for as deep as the drafter likes


class Scheduler(ABC):
    """Plans the turns of an engine, from what it is shown alone.

    A turn in which nothing waits and nothing is to be prefilled may be played without asking, with all requests.
    """

    @abstractmethod
    def plan(self, view: View) -> Work:
        """Return the work of the next turn.

        It must lead on: where requests run or wait, some of them are prefilled or decoded.
        """


def within_memory(view: View, running: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Divide running requests, the most important first, into those that stay and those that give way.

    As many give way, the last first, as it takes to have pages for the next rounds of the others.
    """
    stay, leave = list(running), list[Request]()
    if view.free_pages is not None and view.reserve < 1:
        lacking = sum(map(view.pages_needed, stay)) - view.free_pages
        while lacking > 0 and len(stay) > 1:
            leave.append(stay.pop())
            lacking -= view.freed(leave[-1])
    return stay, leave


def entering(view: View, waiting: Iterable[Request], stay: Sequence[Request]) -> list[Request]:
    """Return the first waiting requests, as many as slots and pages are free beside the running ones that stay."""
    first = list(islice(waiting, view.free_slots))
    if view.free_pages is None:
        return first
    free = view.free_pages - sum(map(view.pages_needed, stay))
    return first[: sum(total <= free for total in accumulate(map(view.pages_needed, first)))]


class FirstCome(Scheduler):
    """Gives free slots to the requests that have waited longest, prefills a chunk of each new prompt, decodes the rest.

    A request whose last chunk is prefilled takes part in the round of the same turn. Nobody enters where somebody gives
    way.
    """

    def plan(self, view: View) -> Work:
        stay, leave = within_memory(view, view.running)
        new = [] if leave else entering(view, view.waiting, stay)
        prefilling = [request for request in stay if request.to_prefill]
        chunks = [(request, min(view.prefill_chunk, request.to_prefill)) for request in (*prefilling, *new)]
        return Work(preempt=leave, prefill=chunks, decode=[*stay, *new])


class PrefillFirst(Scheduler):
    """Prefills as long as there is a prompt to prefill and a slot for it, and decodes only then.

    First tokens come soonest, and the running requests wait for it.
    """

    def plan(self, view: View) -> Work:
        work = FirstCome().plan(view)
        return replace(work, decode=()) if any(tokens for _, tokens in work.prefill) else work
