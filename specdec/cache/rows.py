"""A row of memory per slot, which is one page: a shared beginning is copied once (``specdec.cache.pages``)."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from specdec.cache.kept_states import KeptStates
from specdec.cache.pages import Pages, Placement

_NOTHING = np.zeros(0, dtype=np.int64)


class Rows(Pages):
    """A row per slot.

    Args:
        shared: Whether beginnings are copied from other slots. Without it, the first free slot is taken, so that the
            running ones lie side by side.
    """

    page_size = 1

    def __init__(self, slots: int, *, shared: bool, states: KeptStates | None = None):
        super().__init__(shared=shared, states=states)
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
        wanted, found, source = np.asarray(tokens[:-1]), 0, None
        for slot, known in enumerate(self._tokens):
            if again is not None and (self._drafted[slot] or not drafted):
                count = _common(known, wanted)
                if count > found:
                    found, source = count, slot
        most = max(min(found - drafted, len(wanted) - (again or 0)), 0)
        reused, state = self.with_state(wanted, most, drafted=drafted)
        oldest = next(slot for slot in self._left if slot in slots)
        slot = oldest
        if source is not None and source in slots and found == len(self._tokens[source]):
            slot = source
        self.counts.evicted_pages += slot != source and len(self._tokens[slot]) > 0
        self._left.move_to_end(slot)
        self._tokens[slot], self._drafted[slot] = wanted[:reused], drafted
        return Placement(slot, reused, source if reused else None, state=state, found=most)

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
        super().forget_all()
        self._tokens = [_NOTHING] * len(self._tokens)


def _common(known: Int[np.ndarray, " one"], wanted: Int[np.ndarray, " other"]) -> int:
    """Return how many first tokens two sequences have in common."""
    count = min(len(known), len(wanted))
    differ = known[:count] != wanted[:count]
    return int(differ.argmax()) if differ.any() else count
