"""What scores the tokens that may follow the nodes of a growing draft tree."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.topology import Topology
from specdec.types import Committed, Decided


class Scorer(ABC):
    """Gives logits for the children of a draft tree's nodes, level by level, and follows what becomes final.

    A small model, an EAGLE head, an MTP module and a block drafter are scorers; a tree builder asks them. Which nodes
    are asked for, and how their children are chosen, is the builder's business. One tree is grown at a time: first
    ``root_logits``, then ``level_logits`` from level to level.

    Attributes:
        per_depth: Whether the logits depend on the depth alone, whatever was drafted above. ``level_logits`` then
            returns one node's logits for all.
        max_depth: The deepest node that it can score the tokens of; None without a limit.
        has_confidence: Whether it predicts acceptance (``confidence``).
    """

    per_depth: bool = False
    max_depth: int | None = None
    has_confidence: bool = False

    @abstractmethod
    def root_logits(self, slots: Batch) -> Float[Tensor, "batch 1 vocab"]:
        """Returns logits for the children of the root."""

    @abstractmethod
    def level_logits(
        self, slots: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int
    ) -> Float[Tensor, "batch node vocab"]:
        """Returns logits for the children of some nodes of one depth.

        Args:
            slots: The rows.
            tokens: The tokens of these nodes, as the target's ids.
            topology: How all nodes that the scorer has been shown are connected; these are its last ones. The scorer
                numbers nodes in the order in which it is shown them, the root first.
            depth: The depth of these nodes.
        """

    def all_logits(self, slots: Batch, depth: int) -> Float[Tensor, "batch depth vocab"]:
        """Returns, in place of ``root_logits`` and ``level_logits``, what the first ``depth`` depths are scored by.

        Only a scorer that is ``per_depth`` has this: a builder may then choose all nodes at once.
        """
        raise NotImplementedError(f"{type(self).__name__} scores level by level")

    def confidence(self, tokens: Int[Tensor, "batch node"], depth: int) -> Float[Tensor, "batch node"] | None:
        """Returns how likely a child of each node is to be accepted if the node is; known before the child is drawn.

        It may be asked of a tree's nodes once they have been scored.

        Args:
            tokens: The tokens of some nodes of one depth.
            depth: Their depth; 0 for the root.

        Returns:
            Probabilities, not calibrated; None if that is not known.
        """
        return None

    def ready(self, slots: Batch) -> Bool[Tensor, " batch"] | None:
        """Returns which rows can be drafted for; None for all. A head has nothing to begin with after one token."""
        return None

    def host_ready(self, slots: Batch) -> Bool[np.ndarray, " batch"] | None:
        """Returns what ``ready`` does, on the host, in rounds that are not recorded."""
        return None

    def admit(self, slot: int) -> None:  # noqa: B027
        """Begin a request in an empty slot."""

    def release(self, slot: int) -> None:  # noqa: B027
        """Forget a slot's request."""

    def observe(self, committed: Committed, nodes: Int[Tensor, "batch depth"] | None, *, in_place: bool) -> None:  # noqa: B027
        """Take note of tokens that have become final.

        Args:
            committed: The tokens.
            nodes: After a round, the numbers under which this scorer was shown the nodes of the path; -1 for those that
                it was not shown.
            in_place: Whether these numbers are 1, 2, 3, …, as for a chain.
        """

    def catch_up(self, slots: Batch) -> Hashable:
        """Do on the host what must come before a tree is grown; returns what a recording of it depends on."""
        return None

    def follow(self, decided: Decided, nodes: Int[Tensor, "batch depth"], *, in_place: bool) -> None:  # noqa: B027
        """Do what ``observe`` does after a round, on the device alone (``DeviceDrafter.follow``)."""

    def followed(self, slots: Batch, counts: Int[np.ndarray, " batch"], told: Bool[np.ndarray, " batch"]) -> None:  # noqa: B027
        """Note on the host what ``follow`` has done (``DeviceDrafter.followed``)."""

    @property
    @abstractmethod
    def version(self) -> Hashable:
        """See ``DeviceDrafter.version``."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that hold its state, which tests compare."""
        return []


class PerDepthScorer(Scorer):
    """A scorer whose logits depend on the depth alone, such as heads that predict all depths at once.

    A subclass gives ``all_logits`` and ``max_depth``.
    """

    per_depth = True
    _logits: Float[Tensor, "batch depth vocab"]

    @abstractmethod
    def all_logits(self, slots: Batch, depth: int) -> Float[Tensor, "batch depth vocab"]:
        """Returns the logits of the first ``depth`` depths."""

    def root_logits(self, slots: Batch) -> Float[Tensor, "batch 1 vocab"]:
        """Returns the first depth's logits, after computing all of them."""
        assert self.max_depth is not None, "set by the subclass"
        self._logits = self.all_logits(slots, self.max_depth)
        return self._logits[:, :1]

    def level_logits(
        self, slots: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int
    ) -> Float[Tensor, "batch 1 vocab"]:
        """Returns one depth's logits, whatever the nodes are."""
        return self._logits[:, depth : depth + 1]
