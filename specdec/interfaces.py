"""What a drafter and a verifier are."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor

from specdec.requests import SamplingParams
from specdec.tree import DraftTree
from specdec.types import Committed, DraftSampling, Exactness

if TYPE_CHECKING:
    from specdec.slots import Slots
    from specdec.target import Target


class Drafter(ABC):
    """Proposes token trees.

    The engine calls ``bind`` once; then, for every request, ``admit``, ``observe`` after every prefill chunk and
    every round, and ``release``; and ``propose`` once per round for all rows together. A drafter never touches
    the target's cache or the output.

    Attributes:
        max_nodes: Drafted nodes per row at most (root not counted).
        max_depth: Depth of a branch at most.
        laws: The laws by which it draws tokens for a *sampled* request. Greedy requests may always get
            ``DETERMINISTIC`` nodes besides.
        is_chain: No node has two children.
        hidden_layers: Hidden states it wants in ``Committed``: -1 for the normalized last one, which the output
            layer reads, i for the input of decoder layer i (transformers' ``hidden_states[i]``).
    """

    max_nodes: int
    max_depth: int
    laws: frozenset[DraftSampling]
    is_chain: bool
    hidden_layers: tuple[int, ...] = ()

    @abstractmethod
    def bind(self, target: "Target", *, max_batch_size: int, max_length: int) -> None:
        """Check that this drafter fits the target (vocabulary, widths, device) and allocate its state.

        Raises:
            ValueError: It does not fit.
        """

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:  # noqa: B027
        """A request begins in ``slot``; ``observe`` will report its prompt."""

    def observe(self, committed: Committed) -> None:  # noqa: B027
        """Tokens became final."""

    @abstractmethod
    def propose(self, slots: "Slots") -> DraftTree:
        """Draft for every row of ``slots`` (rows that are not ``slots.drafting`` may hold anything valid).

        A row's branches must not be longer than ``slots.max_depth`` says; the engine makes deeper nodes invalid.
        """

    def release(self, slot: int) -> None:  # noqa: B027
        """The request in ``slot`` has ended."""


class Verifier(ABC):
    """An acceptance rule, as two pure functions of the tables.

    Both compute in the dtype of ``target_probs``, for all rows at once, and use no randomness, so a rule's exact
    output law can be enumerated.

    Attributes:
        exactness: What it promises.
        laws: The drafting it is exact for.
        chain_only: It takes no tree with siblings.
    """

    exactness: Exactness
    laws: frozenset[DraftSampling]
    chain_only: bool = False

    def check(self, drafter: Drafter) -> None:
        """Refuse a drafter that this rule is not made for.

        Raises:
            ValueError: Says why, and which verifier fits.
        """
        name = type(self).__name__
        unfit = sorted(law.name for law in drafter.laws - self.laws)
        if unfit:
            fits = "TargetWalkVerifier" if DraftSampling.COUPLED in drafter.laws else "RejectionVerifier"
            raise ValueError(
                f"{name} is not made for drafts that are {' or '.join(unfit)}, as {type(drafter).__name__} draws them: "
                f"use {fits}, or another sampling in the drafter"
            )
        if self.chain_only and not drafter.is_chain:
            raise ValueError(
                f"{name} takes chains only, and {type(drafter).__name__} drafts trees: "
                f"use RejectionVerifier or TraversalVerifier, or a chain in the drafter"
            )

    @abstractmethod
    def stop_law(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch node"]:
        """Probability, given this tree, that the accepted path ends at each node.

        The root's entry is the probability that nothing is accepted; invalid nodes have zero; rows sum to one.
        """

    @abstractmethod
    def next_law(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        stop: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """Law of the token that follows a path that ends at ``stop``: a residual, or p after a leaf."""
