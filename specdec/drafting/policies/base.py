"""What a length policy is."""

from abc import ABC, abstractmethod

from jaxtyping import Int
from numpy import ndarray


class LengthPolicy(ABC):
    """Decides before a round how deep each row's drafts may be, from how earlier rounds went.

    That is exact with every rule, however drafts are drawn: whether there is a node of some depth is settled before any
    token of the round is known. What may not be is a length that depends on the very token it cuts off (DSpark, arXiv
    2607.05147, appendix A).
    """

    def bind(self, *, max_batch_size: int, max_depth: int) -> None:
        """Begin with a new engine.

        Args:
            max_batch_size: The number of slots.
            max_depth: The deepest drafts that the drafter makes.
        """
        self._max_depth = max_depth

    def admit(self, slot: int) -> None:  # noqa: B027
        """Begin a request in ``slot``."""

    @abstractmethod
    def depths(self, slots: Int[ndarray, " batch"]) -> Int[ndarray, " batch"]:
        """Returns how deep the drafts for the requests in these slots may be; 0 drafts nothing."""

    def note(  # noqa: B027
        self, slots: Int[ndarray, " batch"], proposed: Int[ndarray, " batch"], accepted: Int[ndarray, " batch"]
    ) -> None:
        """Take note of how a round went.

        Args:
            slots: The slots of its rows.
            proposed: How deep the drafts were.
            accepted: How many tokens of them were accepted.
        """
