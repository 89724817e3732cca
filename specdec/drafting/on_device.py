"""Drafters whose rounds need nothing from the host, so that whole rounds can be recorded."""

from abc import abstractmethod
from collections.abc import Hashable

import numpy as np
from jaxtyping import Bool, Int

from specdec.batch import Batch
from specdec.interfaces import Drafter
from specdec.tree import DraftTree
from specdec.types import Decided


class DeviceDrafter(Drafter):
    """A drafter that can also draft, and follow what was accepted, with tensors alone.

    In a recorded round the engine calls ``prepare``, replays ``draft`` and ``follow`` among the other stages, and calls
    ``followed`` when it knows what has happened. In other rounds it calls ``propose`` and ``observe``, as of any
    drafter; both kinds of rounds may alternate.
    """

    @property
    @abstractmethod
    def version(self) -> Hashable:
        """Differs after a change of the drafter that a recording would not see, such as new weights."""

    @abstractmethod
    def prepare(self, slots: Batch) -> Hashable:
        """Do on the host what must come before a recorded ``draft``.

        Returns:
            What ``draft`` and ``follow`` depend on besides tensors that stay where they are: a recording is used again
            for as long as this is equal.
        """

    @abstractmethod
    def draft(self, slots: Batch) -> DraftTree:
        """Returns what ``propose`` does, of one size whatever the values.

        Args:
            slots: The rows, of which the host knows only the slots (``Batch.on_device``).
        """

    def trimmed(self, tree: DraftTree) -> DraftTree:
        """Returns the trees that ``draft`` gave without columns that nobody needs, outside of a recording.

        A drafter that looks at values here makes the host wait for the draft.
        """
        return tree

    @abstractmethod
    def follow(self, decided: Decided) -> None:
        """Take note, on the device, of what a round has decided; rows that were not ``told`` stay as they are."""

    @abstractmethod
    def followed(self, slots: Batch, counts: Int[np.ndarray, " batch"], told: Bool[np.ndarray, " batch"]) -> None:
        """Take note, on the host, of what ``follow`` has done on the device.

        Args:
            slots: The rows, whose host numbers are those from before the round.
            counts: The number of tokens that became final in each row.
            told: See ``Decided``.
        """
