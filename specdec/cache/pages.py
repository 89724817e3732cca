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
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from specdec.arguments import flag, number, whole

_NOTHING = np.zeros(0, dtype=np.int64)
_ROOTS = {False: b"target", True: b"target and drafter"}


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

    Raises:
        ValueError: A number is no count, or pages were given without their size.
    """

    page_size: int | None = None
    pages: int | None = None
    shared: bool = False
    swap: int = 0
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
        if not 0 <= number("reserve", self.reserve) <= 1:
            raise ValueError(f"reserve={self.reserve}: give a share of the output from 0 to 1")

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
    """Counts of sharing, eviction and preemption so far, in tokens unless it says otherwise."""

    queried: int = 0  # of requests when they are first admitted, the last one of each left out
    reused: int = 0  # those of them that were found, and were not prefilled
    evicted_pages: int = 0  # pages whose content was given up for another request's
    preempted: int = 0  # requests that lost their slot
    swapped_out: int = 0  # tokens whose keys and values went to the host's memory
    swapped_in: int = 0  # those that came back
    swap_seconds: float = 0.0  # seconds that both ways took; on a GPU, of the host's alone
    recomputed: int = 0  # tokens that were prefilled again after preemptions

    @property
    def hit_rate(self) -> float | None:
        """``reused`` over ``queried``; None before any was queried."""
        return self.reused / self.queried if self.queried else None


class Placement(NamedTuple):
    """Where a request was placed."""

    slot: int
    reused: int = 0  # its first tokens that are in the caches already
    source: int | None = None  # with rows, the slot whose beginning is to be copied; None for nothing
    pages: Sequence[int] = ()  # in a pool, its pages in order


class Pages(ABC):
    """The pages of all caches of an engine.

    A request ``enter``s a free slot. What is final of it is reported by ``hold``, and stays when it ``leave``s, until
    the memory is needed for another one.

    Attributes:
        counts: What has happened so far.
        page_size: Positions of a page, as far as admission is concerned.
    """

    page_size: int

    def __init__(self, *, shared: bool):
        self.shared, self.counts = shared, PageCounts()

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


class Rows(Pages):
    """A row per slot: the first free one, side by side with those that run; if ``shared``, beginnings are copied."""

    page_size = 1

    def __init__(self, slots: int, *, shared: bool):
        super().__init__(shared=shared)
        self._tokens = [_NOTHING] * slots
        self._drafted = [False] * slots
        self._left: OrderedDict[int, None] = OrderedDict.fromkeys(range(slots))  # the slot that was left first, first

    @property
    def free(self) -> None:
        return None

    def enter(
        self, tokens: Sequence[int], slots: Sequence[int], *, positions: int, drafted: bool, again: int | None
    ) -> Placement:
        """See ``Pages.enter``. The slot that was left first is taken, or the one whose whole content is used."""
        if not self.shared:
            return Placement(slots[0])
        wanted, found, source = np.asarray(tokens[:-1], dtype=np.int64), 0, None
        for slot, known in enumerate(self._tokens):
            if again is not None and (self._drafted[slot] or not drafted):
                count = _common(known, wanted)
                if count > found:
                    found, source = count, slot
        reused = max(min(found - drafted, len(wanted) - (again or 0)), 0)
        oldest = next(slot for slot in self._left if slot in slots)
        slot = oldest
        if source is not None and source in slots and found == len(self._tokens[source]):
            slot = source
        self.counts.evicted_pages += slot != source and len(self._tokens[slot]) > 0
        self._left.move_to_end(slot)
        self._tokens[slot], self._drafted[slot] = wanted[:reused], drafted
        return Placement(slot, reused, source if reused else None)

    def grow(self, slot: int, positions: int) -> Sequence[int]:
        """See ``Pages.grow``: a row has room for everything."""
        return ()

    def hold(self, slot: int, tokens: Int[np.ndarray, " position"], *, drafted: bool) -> None:
        if self.shared:
            self._tokens[slot], self._drafted[slot] = tokens.copy(), drafted

    def kept(self, slot: int) -> int:
        return len(self._tokens[slot])

    def own(self, slot: int) -> int:
        """See ``Pages.own``: all of a row is its own."""
        return 0

    def leave(self, slot: int) -> None:
        self._left.move_to_end(slot)

    def forget(self, slot: int) -> None:
        self._tokens[slot] = _NOTHING

    def forget_all(self) -> None:
        self._tokens = [_NOTHING] * len(self._tokens)


def _common(known: Int[np.ndarray, " one"], wanted: Int[np.ndarray, " other"]) -> int:
    """Return how many first tokens two sequences have in common."""
    count = min(len(known), len(wanted))
    differ = known[:count] != wanted[:count]
    return int(differ.argmax()) if differ.any() else count


@dataclass
class _Row:
    """The pages of a slot in order, a key for each of the first ones that are full, and whether drafts follow it."""

    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    drafted: bool = False


class Pool(Pages):
    """Pages of a few positions, for any slot.

    A full page whose tokens are final is found by a key: a hash of its tokens and of the key of the page before it
    (vLLM's prefix caching). The page that was left first is evicted first, and of a request's pages the last one, so
    that beginnings survive longest.

    ``count`` is the number of pages, ``size`` that of a page's positions.
    """

    def __init__(self, slots: int, *, count: int, size: int, shared: bool):
        super().__init__(shared=shared)
        self.page_size = size
        self._rows = [_Row() for _ in range(slots)]
        self._users = np.zeros(count, dtype=np.int64)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # to be taken first, first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """See ``Pages.free``. Pages that hold something to be shared count as free."""
        return len(self._free)

    def enter(
        self, tokens: Sequence[int], slots: Sequence[int], *, positions: int, drafted: bool, again: int | None
    ) -> Placement:
        slot, found = slots[0], list[int]()
        wanted = np.asarray(tokens[:-1], dtype=np.int64)
        if self.shared and again is not None:
            found = self._find(wanted, drafted=True)
            if not drafted:
                found = max(found, self._find(wanted, drafted=False), key=len)
            found = found[: max(len(wanted) - again, 0) // self.page_size]
        more = -(-positions // self.page_size) - len(found)
        room = len(self._free) - sum(page in self._free for page in found)
        if more > room:
            raise ValueError(f"a request needs {more} pages and {room} are free: admit it later, or raise pages")
        for page in found:
            self._users[page] += 1
            self._free.pop(page, None)
        pages = [*found, *(self._take() for _ in range(more))]
        self._rows[slot] = _Row(pages, [self._key_of[page] for page in found], drafted)
        return Placement(slot, len(found) * self.page_size, None, pages)

    def grow(self, slot: int, positions: int) -> Sequence[int]:
        pages = self._rows[slot].pages
        more = -(-positions // self.page_size) - len(pages)
        if more > len(self._free):
            return ()
        pages += [self._take() for _ in range(more)]
        return pages

    def _take(self) -> int:
        """Return the page that was left first, whose content is given up."""
        page, _ = self._free.popitem(last=False)
        self._users[page] = 1
        if page in self._key_of:
            self._unname(page)
            self.counts.evicted_pages += 1
        return page

    def _find(self, tokens: Int[np.ndarray, " position"], *, drafted: bool) -> list[int]:
        """Return the pages that hold the beginning of these tokens."""
        pages = []
        for key in keys_of(tokens, self.page_size, _ROOTS[drafted], ahead=drafted):
            if key not in self._page_of:
                break
            pages.append(self._page_of[key])
        return pages

    def _unname(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]

    def hold(self, slot: int, tokens: Int[np.ndarray, " position"], *, drafted: bool) -> None:
        """See ``Pages.hold``. Of equal pages the one that is known already is kept."""
        row = self._rows[slot]
        if not self.shared or drafted != row.drafted:
            return
        behind = tokens[len(row.keys) * self.page_size :].astype(np.int64)
        for key in keys_of(behind, self.page_size, row.keys[-1] if row.keys else _ROOTS[drafted], ahead=drafted):
            page = row.pages[len(row.keys)]
            row.keys.append(key)
            if key not in self._page_of:
                self._page_of[key], self._key_of[page] = page, key

    def kept(self, slot: int) -> int:
        return len(self._rows[slot].keys) * self.page_size

    def own(self, slot: int) -> int:
        users = self._users[self._rows[slot].pages]
        return int((users > 1).sum()) * self.page_size  # others use a beginning

    def leave(self, slot: int) -> None:
        row, self._rows[slot] = self._rows[slot], _Row()
        for page in reversed(row.pages):
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page] = None
                self._free.move_to_end(page, last=page in self._key_of)

    def forget(self, slot: int) -> None:
        row = self._rows[slot]
        row.keys.clear()
        for page in row.pages:
            if page in self._key_of:
                self._unname(page)

    def forget_all(self) -> None:
        self._page_of.clear()
        self._key_of.clear()
        for row in self._rows:
            row.keys.clear()


def pages_for(paging: Paging, slots: int) -> Pages:
    """Return the pages of an engine, of a paging that is ``filled_in``."""
    if paging.page_size is None:
        return Rows(slots, shared=paging.shared)
    assert paging.pages is not None, "filled in"
    return Pool(slots, count=paging.pages, size=paging.page_size, shared=paging.shared)


def keys_of(tokens: Int[np.ndarray, " position"], size: int, before: bytes, *, ahead: bool) -> Iterator[bytes]:
    """Yield the key of every full page of tokens, each of which stands for all tokens up to its end.

    Args:
        size: Positions of a page.
        before: The key of the page before the first one.
        ahead: Whether the token behind a page belongs to its key. An entry of a drafter's cache may depend on it, as
            that of an EAGLE head does (SGLang has such keys, too).
    """
    for end in range(size, len(tokens) + (not ahead), size):
        before = blake2b(before + tokens[end - size : end + ahead].tobytes(), digest_size=16).digest()
        yield before
