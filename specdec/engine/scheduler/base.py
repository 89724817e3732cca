"""The interface of scheduling policies: who prefills how much, who decodes, how deep, and who gives way."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from specdec.requests import Request


@dataclass(frozen=True, kw_only=True)
class View:
    """The state of an engine that a policy plans from; nothing here may be changed.

    Attributes:
        waiting: Requests without a slot, in the order in which they came.
        running: Requests with a slot, in the order in which they came. Those with tokens ``to_prefill`` cannot take
            part in a round yet.
        free_slots: The number of slots without a request.
        free_pages: The number of free pages; None where every slot has its own row.
        page_size: Positions of a page.
        prefill_chunk: The most tokens of one request that a forward may prefill.
        max_depth: The depth of the deepest drafts.
    """

    waiting: Sequence[Request]
    running: Sequence[Request]
    free_slots: int
    free_pages: int | None = None
    page_size: int = 1
    prefill_chunk: int
    max_depth: int

    @property
    def entering(self) -> list[Request]:
        """The first of the waiting requests, as many as free slots and pages can be given to."""
        entering = list(self.waiting[: self.free_slots])
        if self.free_pages is None:
            return entering
        needed = [-(-(len(each.prompt_ids) + each.sampling.max_new_tokens) // self.page_size) for each in entering]
        return entering[: sum(total <= self.free_pages for total in accumulate(needed))]

    @property
    def prefilling(self) -> list[Request]:
        """Running requests whose tokens are not all in the cache."""
        return [request for request in self.running if request.to_prefill]

    @property
    def decoding(self) -> list[Request]:
        """Running requests that can take part in a round."""
        return [request for request in self.running if not request.to_prefill]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one turn of an engine, in the order in which it is done.

    Attributes:
        preempt: Running requests that give up their slots. They wait again, and their tokens are prefilled again later.
        prefill: Requests and how many of their tokens to prefill, at most the engine's ``prefill_chunk``. A request
            that waits takes a free slot by this.
        decode: Requests that take part in the round that follows; those that are not prefilled by then are left out.
        depth: The depth of the drafts of that round at most; None for as deep as the drafter likes.
    """

    preempt: Sequence[Request] = ()
    prefill: Sequence[tuple[Request, int]] = ()
    decode: Sequence[Request] = field(default=())
    depth: int | None = None


class Scheduler(ABC):
    """Plans the turns of an engine. A policy is a pure function of what it is shown, so one serves any engine.

    A turn in which nothing waits and nothing is to be prefilled may be played without asking, with all requests.
    """

    @abstractmethod
    def plan(self, view: View) -> Work:
        """Return the work of the next turn.

        It must lead on: where requests run or wait, some of them are prefilled or decoded.
        """


def admitted(view: View) -> list[tuple[Request, int]]:
    """Return a chunk for every request that is being prefilled, and for those that free slots can be given to."""
    return [(request, min(view.prefill_chunk, request.to_prefill)) for request in (*view.prefilling, *view.entering)]
