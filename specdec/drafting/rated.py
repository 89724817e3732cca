"""Drafters that know how good a draft is before the target has seen it."""

from abc import abstractmethod

import numpy as np
from jaxtyping import Float

from specdec.batch import Batch
from specdec.interfaces import Drafter


class RatedDrafter(Drafter):
    """A drafter that can say how many tokens of its next draft it expects to be accepted.

    ``ChoiceDrafter`` asks it whether its draft or a model's is the better one.
    """

    @abstractmethod
    def rate(self, slots: Batch) -> Float[np.ndarray, " batch"]:
        """Returns the number of tokens of the draft that ``propose`` would return that are likely to be accepted.

        It draws nothing at random, and changes no draft: ``propose`` may follow, for all rows or some of them.
        """
