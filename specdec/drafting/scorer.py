"""What scores the tokens that may follow the nodes of a growing draft tree."""

from abc import ABC, abstractmethod
from collections.abc import Hashable

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specdec.batch import Batch
from specdec.target.runner import ModelRunner
from specdec.topology import Topology
from specdec.types import Outcome


class Scorer(ABC):
    """Gives logits for the children of a draft tree's nodes, level by level, and follows what becomes final.

    A small model, an EAGLE head, an MTP module and a block drafter are scorers; a tree builder asks them. Which nodes
    are asked for, and how their children are chosen, is the builder's business. One tree is grown at a time: first
    ``prepare``, then ``root_logits``, then ``level_logits`` from level to level. All but ``admit``, ``prepare``,
    ``skip`` and ``release`` may be recorded and replayed without its Python.

    Attributes:
        per_depth: Whether the logits depend on the depth alone, whatever was drafted above. ``level_logits`` then
            returns one node's logits for all.
        max_depth: The deepest node that it can score the tokens of; None without a limit.
        has_confidence: Whether it predicts acceptance (``confidence``).
        needs_state: Whether it reads the target's states, of which there are none before a token is committed. Such
            rows get no drafts.
        model: Runs the model that scores, if there is one.
    """

    per_depth: bool = False
    max_depth: int | None = None
    has_confidence: bool = False
    needs_state: bool = False
    model: ModelRunner | nn.Module | None = None

    @abstractmethod
    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        """Return logits for the children of the root."""

    @abstractmethod
    def level_logits(
        self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int
    ) -> Float[Tensor, "batch node vocab"]:
        """Return logits for the children of some nodes of one depth.

        Args:
            batch: The rows.
            tokens: The tokens of these nodes, as the target's ids.
            topology: How all nodes that the scorer has been shown are connected; these are its last ones. The scorer
                numbers nodes in the order in which it is shown them, the root first.
            depth: The depth of these nodes.
        """

    def all_logits(self, batch: Batch, depth: int) -> Float[Tensor, "batch depth vocab"]:
        """Return, in place of ``root_logits`` and ``level_logits``, the logits of the first ``depth`` depths.

        Only a scorer that is ``per_depth`` has this: a builder may then choose all nodes at once.
        """
        raise NotImplementedError(f"{type(self).__name__} scores level by level")

    def confidence(self, tokens: Int[Tensor, "batch node"], depth: int) -> Float[Tensor, "batch node"] | None:
        """Return how likely a child of each node is to be accepted if the node is; known before the child is drawn.

        It may be asked of a tree's nodes once they have been scored.

        Args:
            tokens: The tokens of some nodes of one depth.
            depth: Their depth; 0 for the root.

        Returns:
            Probabilities, not calibrated; None if that is not known.
        """
        return None

    def admit(self, slot: int) -> None:  # noqa: B027
        """Begin a request in an empty slot."""

    def release(self, slot: int) -> None:  # noqa: B027
        """Forget a slot's request."""

    def observe(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None, *, in_place: bool) -> None:  # noqa: B027
        """Take note of tokens that have become final.

        Args:
            outcome: The tokens.
            nodes: After a round, the numbers under which this scorer was shown the nodes of the path; -1 for those that
                it was not shown.
            in_place: Whether these numbers are 1, 2, 3, …, as for a chain.
        """

    def prepare(self, batch: Batch) -> Hashable:
        """Do on the host what must come before a tree is grown; returns everything that a recording of it depends on.

        ``batch.host`` is there, one round late on a GPU.
        """
        return None

    def skip(self, batch: Batch) -> None:  # noqa: B027
        """Note that no tree is grown in this round, which is not recorded."""


class PerDepthScorer(Scorer):
    """A scorer whose logits depend on the depth alone, such as heads that predict all depths at once.

    A subclass gives ``all_logits`` and ``max_depth``.
    """

    per_depth = True
    _logits: Float[Tensor, "batch depth vocab"]

    @abstractmethod
    def all_logits(self, batch: Batch, depth: int) -> Float[Tensor, "batch depth vocab"]:
        """Return the logits of the first ``depth`` depths."""

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        """Return the first depth's logits, after computing all of them."""
        assert self.max_depth is not None, "set by the subclass"
        self._logits = self.all_logits(batch, self.max_depth)
        return self._logits[:, :1]

    def level_logits(
        self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int
    ) -> Float[Tensor, "batch 1 vocab"]:
        """Return one depth's logits, whatever the nodes are."""
        return self._logits[:, depth : depth + 1]


class Reach:
    """How far the rows of a drafting model's cache may have been written, so that they can be cleared.

    A row is cleared when its request ends, because entries may be NaN, which no mask hides.

    Args:
        max_batch_size: The number of slots.
        margin: The most positions that a round writes behind the committed ones.
    """

    def __init__(self, max_batch_size: int, margin: int):
        self._reach = np.zeros(max_batch_size, dtype=np.int64)
        self._margin = margin

    def note(self, slots: Int[np.ndarray, " batch"], lengths: Int[np.ndarray, " batch"]) -> None:
        """Note that some slots hold so many committed positions."""
        self._reach[slots] = lengths

    def take(self, slot: int) -> int:
        """Return the end of what may have been written in a slot, and begin anew.

        The host may be a round late, and a further round may have been played ahead.
        """
        end, self._reach[slot] = int(self._reach[slot]) + 3 * self._margin, 0
        return end


def state_ready(batch: Batch) -> Bool[Tensor, " batch"]:
    """Return which rows have a committed token, and so a state of the target to begin with."""
    return batch.lengths > 0
