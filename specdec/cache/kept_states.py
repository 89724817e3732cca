"""Which states of recurrent layers are kept: behind which tokens, and under which number.

Keys and values of a beginning can be used at any length, a state only where it was kept. Few are worth it: behind the
last boundary of a prompt, behind the last one of an output, and where a prompt goes another way than one before it,
which is where others will part, too (Marconi: Pan et al. 2024, arXiv 2411.19379).
"""

from collections import OrderedDict

import numpy as np
from jaxtyping import Int


class KeptStates:
    """The numbers of the states that are kept, by the tokens before them. That used longest ago is given up first.

    Args:
        count: How many there is room for.
        drafts: Whether only the drafting session has states, so that other requests need none.
    """

    def __init__(self, count: int, *, drafts: bool = False):
        self.drafts = drafts
        self._free = list(range(count))
        self._numbers: OrderedDict[tuple[bool, bytes], int] = OrderedDict()

    def find(self, tokens: Int[np.ndarray, " position"], *, drafted: bool) -> tuple[int, int | None]:
        """Return the length of the longest beginning of these tokens that has states, and their number.

        Args:
            drafted: Whether the drafting session needs its part, too.
        """
        given = _spelled(tokens)
        fits = [key for key in self._numbers if given.startswith(key[1]) and key[0] >= drafted]
        if not fits:
            return 0, None
        best = max(fits, key=lambda key: len(key[1]))
        self._numbers.move_to_end(best)
        return len(best[1]) // _SIZE, self._numbers[best]

    def keep(self, tokens: Int[np.ndarray, " position"], *, drafted: bool) -> int | None:
        """Return the number under which the states behind these tokens are to be kept; None if that is not to be done.

        Args:
            drafted: Whether they have the drafting session's part.
        """
        key = drafted, _spelled(tokens)
        if key in self._numbers:
            self._numbers.move_to_end(key)
            return None
        if self._free:
            number = self._free.pop()
        elif self._numbers:
            _, number = self._numbers.popitem(last=False)
        else:
            return None
        self._numbers[key] = number
        return number

    def forget(self, tokens: Int[np.ndarray, " position"]) -> None:
        """Give up the states behind all beginnings of these tokens, because they may be wrong."""
        given = _spelled(tokens)
        for key in [key for key in self._numbers if given.startswith(key[1])]:
            self._free.append(self._numbers.pop(key))

    def clear(self) -> None:
        """Give up all of them."""
        self._free += self._numbers.values()
        self._numbers.clear()


_SIZE = 8


def _spelled(tokens: Int[np.ndarray, " position"]) -> bytes:
    """Return tokens as bytes, eight for each."""
    return tokens.astype("<i8").tobytes()
