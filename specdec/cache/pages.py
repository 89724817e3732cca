"""Where the keys and values of requests are, in the host's numbers alone: pages, who uses them, and what they hold.

A *page* is a piece of memory for some positions, in every cache of an engine: the target's, and those of the drafting
session. All of them number pages alike, so what a request shares in the target's cache it shares in the drafter's.
There are two ways to place requests:

* **Rows**: every slot is one page, of all its positions. A beginning that another slot holds is copied, once, when a
  request is admitted. Attention reads rows without a table and without a copy, so this is the way of CPUs.
* **A pool**: pages of a few positions, with a table per slot. A beginning that others have computed is used where it
  lies, by any number of requests.

Only what is final is shared, in a pool by whole pages. So no shared page is ever written, and none has to be copied on
a write.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from specdec.arguments import flag, number, whole
from specdec.cache.kept_states import KeptStates

_ROWS_EVERY = 8
"""Positions from one boundary to the next in rows, which have no pages."""


@dataclass(frozen=True, kw_only=True)
class Paging:
    """How the caches of an engine are divided (``Engine``'s ``cache``).

    Attributes:
        page_size: Positions of a page; None makes every slot a row of its own.
        pages: The number of pages; None for as many as all slots can fill. With fewer, a request waits until there are
            enough for it.
        reserve: The share of the output still wanted for which an admitted request gets pages at once. With 1, the
            worst case, no request ever lacks a page. With less, more requests run side by side and get further pages
            as they grow; where there are none, the scheduler takes other requests' slots away (``preempted``).
        shared: Keep the keys and values of requests, and use them for later ones that begin with the same tokens. This
            makes measurements depend on what was decoded before.
        swap: Bytes of the host's memory for the keys and values of preempted requests. Where they do not fit, the
            request's tokens are prefilled again.
        states: How many states of recurrent layers are kept for what is shared, each as large as that of a row. A
            beginning without one is prefilled again from the last boundary of pages that has one.

    Raises:
        ValueError: A number is no count, or pages were given without their size.
    """

    page_size: int | None = None
    pages: int | None = None
    shared: bool = False
    swap: int = 0
    states: int = 16
    reserve: float = 1.0

    def __post_init__(self) -> None:
        if self.page_size is not None:
            whole("page_size", self.page_size, least=1)
        if self.pages is not None:
            whole("pages", self.pages, least=1)
            if self.page_size is None:
                raise ValueError(f"pages={self.pages} without a page_size: give one, such as 16; a row is one page")
        flag("shared", self.shared)
        whole("swap", self.swap, least=0)
        whole("states", self.states, least=0)
        if not 0 <= number("reserve", self.reserve) <= 1:
            raise ValueError(f"reserve={self.reserve}: give a share of the output from 0 to 1")

    @property
    def boundaries(self) -> int | None:
        """Positions between the boundaries at which states are worth keeping; None if none are."""
        return (self.page_size or _ROWS_EVERY) if self.shared or self.swap else None

    def filled_in(self, *, slots: int, max_length: int) -> "Paging":
        """Return the same with a number of pages, for an engine of these sizes.

        Raises:
            ValueError: There are too few pages for the longest request.
        """
        if self.page_size is None:
            return self
        longest = -(-max_length // self.page_size)
        count = slots * longest if self.pages is None else self.pages
        if count < longest:
            raise ValueError(
                f"pages={count} of page_size={self.page_size} are too few for max_length={max_length}: give at least "
                f"{longest}, or a lower max_length"
            )
        return replace(self, pages=count)


@dataclass
class PageCounts:
    """What sharing, eviction and preemption have done so far, in tokens unless it says otherwise.

    Attributes:
        queried: Tokens of admitted requests that could have been found, the last one of each left out. Those of
            requests that come back after a preemption do not count, as it is their own work that they find.
        reused: Those that were found, and were not prefilled.
        evicted_pages: Pages whose content was given up for another request's.
        preempted: Requests that lost their slot.
        swapped_out: Tokens whose keys and values went to the host's memory.
        swapped_in: Those that came back.
        swap_seconds: Seconds that both ways took. On a GPU, of the host's alone.
        recomputed: Tokens that were prefilled again after preemptions.
    """

    queried: int = 0
    reused: int = 0
    evicted_pages: int = 0
    preempted: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    swap_seconds: float = 0.0
    recomputed: int = 0

    @property
    def hit_rate(self) -> float | None:
        """``reused`` over ``queried``; None before any was queried."""
        return self.reused / self.queried if self.queried else None


class Placement(NamedTuple):
    """Where a request was placed.

    Attributes:
        slot: Its slot.
        reused: How many of its first tokens are in the caches already.
        source: With rows, the slot whose beginning is to be copied; None for nothing.
        pages: In a pool, its pages in order.
        state: The number of the kept states that are those behind what is reused; None if there are no states.
        found: How much could be reused if there were states behind it.
    """

    slot: int
    reused: int = 0
    source: int | None = None
    pages: Sequence[int] = ()
    state: int | None = None
    found: int = 0


class Pages(ABC):
    """The pages of all caches of an engine.

    A request ``enter``s a free slot. What is final of it is reported by ``hold``, and stays when it ``leave``s, until
    the memory is needed for another one.

    Attributes:
        counts: What has happened so far.
        page_size: Positions of a page, as far as admission is concerned.
        states: The states that are kept, for models with recurrent layers; None for others.
    """

    page_size: int

    def __init__(self, *, shared: bool, states: KeptStates | None = None):
        self.shared, self.states = shared, states
        self.counts = PageCounts()

    def with_state(self, tokens: Int[np.ndarray, " position"], found: int, *, drafted: bool) -> tuple[int, int | None]:
        """Return how many of the tokens that were found can be reused, and the number of the states behind them."""
        if self.states is None or (self.states.drafts and not drafted):
            return found, None
        return self.states.find(tokens[:found], drafted=drafted)

    @property
    @abstractmethod
    def free(self) -> int | None:
        """The number of pages without a user; None where every free slot has its own."""

    @abstractmethod
    def enter(
        self, tokens: Sequence[int], slots: Sequence[int], *, positions: int, drafted: bool, again: int | None
    ) -> Placement:
        """Place a request.

        Args:
            tokens: Its tokens so far. The last one is the root of its next round, and is not looked for.
            slots: The free slots.
            positions: The number of committed positions that it gets pages for.
            drafted: Whether the drafting session follows it, and so needs its own part of what is shared.
            again: How many of the last tokens before the root are to be prefilled all the same (``Session.lookback``);
                None to share nothing.

        Raises:
            ValueError: There are not enough free pages.
        """

    @abstractmethod
    def grow(self, slot: int, positions: int) -> Sequence[int]:
        """Return the pages of a slot, which has now room for so many committed positions; none if there are too few."""

    @abstractmethod
    def hold(self, slot: int, tokens: Int[np.ndarray, " position"], *, drafted: bool) -> None:
        """Note that the first tokens of a slot's request are final in all caches, or in the target's alone."""

    @abstractmethod
    def kept(self, slot: int) -> int:
        """Return how many of a slot's first positions hold what may be shared, so that they must not be cleared."""

    @abstractmethod
    def own(self, slot: int) -> int:
        """Return the first position of a slot that no other request uses."""

    @abstractmethod
    def leave(self, slot: int) -> None:
        """Free a slot. What it holds may still be found."""

    @abstractmethod
    def forget(self, slot: int) -> None:
        """Let nothing that a slot holds be found by later requests."""

    @abstractmethod
    def forget_all(self) -> None:
        """Let nothing be found any more, because what the caches hold has changed."""
        if self.states is not None:
            self.states.clear()
