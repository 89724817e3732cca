"""Drafters that know how good a draft is before the target has seen it."""

from abc import abstractmethod

import numpy as np
from jaxtyping import Float

from specdec.batch import Batch
from specdec.interfaces import Drafter, Session, Sizes
from specdec.target.target import Target


class RatedSession(Session):
    """A session that can say how many tokens of its next draft it expects to be accepted."""

    @abstractmethod
    def rate(self, batch: Batch) -> Float[np.ndarray, " batch"]:
        """Return the number of tokens of the draft that ``propose`` would return that are likely to be accepted.

        It draws nothing at random, and changes no draft: ``propose`` may follow, for all rows or some of them.
        """


class RatedDrafter(Drafter):
    """A drafter whose sessions rate their drafts. ``ChoiceDrafter`` asks whether its draft or a model's is better."""

    @abstractmethod
    def bind(self, target: Target, sizes: Sizes) -> RatedSession:
        """See ``Drafter.bind``."""
