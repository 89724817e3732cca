"""A pool of pages of a few positions, which requests share where they lie (``specdec.cache.pages``)."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from jaxtyping import Int

from specdec.cache.kept_states import KeptStates
from specdec.cache.pages import Pages, Paging, Placement
from specdec.cache.rows import Rows

_ROOTS = {False: b"target", True: b"target and drafter"}


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

    Args:
        count, size: The number of pages, and that of a page's positions.
    """

    def __init__(self, slots: int, *, count: int, size: int, shared: bool, states: KeptStates | None = None):
        super().__init__(shared=shared, states=states)
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
        most = len(found) * self.page_size
        reused, state = self.with_state(wanted, most, drafted=drafted)
        found = found[: reused // self.page_size]
        more = -(-positions // self.page_size) - len(found)
        room = len(self._free) - sum(page in self._free for page in found)
        if more > room:
            raise ValueError(f"a request needs {more} pages and {room} are free: admit it later, or raise pages")
        for page in found:
            self._users[page] += 1
            self._free.pop(page, None)
        pages = [*found, *(self._take() for _ in range(more))]
        self._rows[slot] = _Row(pages, [self._key_of[page] for page in found], drafted)
        return Placement(slot, reused, None, pages, state, most)

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
        super().forget_all()
        self._page_of.clear()
        self._key_of.clear()
        for row in self._rows:
            row.keys.clear()


def pages_for(paging: Paging, slots: int, *stateful: bool) -> Pages:
    """Return the pages of an engine, of a paging that is ``filled_in``.

    Args:
        *stateful: Of the target's cache and of each of the drafting session's, whether its model has recurrent layers.
    """
    states = KeptStates(paging.states, drafts=not stateful[0]) if any(stateful) else None
    if paging.page_size is None:
        return Rows(slots, shared=paging.shared, states=states)
    assert paging.pages is not None, "filled in"
    return Pool(slots, count=paging.pages, size=paging.page_size, shared=paging.shared, states=states)


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
