"""What a drafter and a verifier are."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor

from specdec.requests import Request, SamplingParams
from specdec.tree import DraftTree
from specdec.types import Committed, DraftSampling, Exactness, Noise, Verdict

if TYPE_CHECKING:
    from specdec.modeling.target import Target
    from specdec.slots import Slots


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
        is_paths: Its drafts are paths from the root, of one length, that share no other node.
        hidden_layers: Hidden states it wants in ``Committed``: -1 for the normalized last one, which the output
            layer reads, i for the input of decoder layer i (transformers' ``hidden_states[i]``).
        has_leaf_probs: It can give q at the leaves, too: its ``bind`` takes ``leaf_probs=True``, which the engine
            passes where the verifier ``needs_leaf_probs``.
    """

    max_nodes: int
    max_depth: int
    laws: frozenset[DraftSampling]
    is_chain: bool
    is_paths: bool = False
    hidden_layers: tuple[int, ...] = ()
    has_leaf_probs: bool = False

    @abstractmethod
    def bind(self, target: "Target", *, max_batch_size: int, max_length: int) -> None:
        """Check that this drafter fits the target (vocabulary, widths, device) and allocate its state.

        Args:
            target: The target.
            max_batch_size: Slots.
            max_length: Positions of a slot.

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

        Tokens, hidden states and other state come from ``slots`` and from what ``observe`` was told of these slots.

        A row's branches must not be longer than ``slots.max_depth`` says; the engine makes deeper nodes invalid.

        Bound with ``leaf_probs``, ``draft_probs`` has a row for every node, also where nothing can be drafted. For
        greedy requests (``DETERMINISTIC`` rows) it is q at temperature 1; rows not in ``slots.drafting`` are zero.
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
        paths_only: It takes paths from the root that share no other node: siblings below the root only.
        noise: With ``SHARED``, the engine draws the target's token at every node before the rule looks at it:
            ``target_probs`` are one-hot, in plain decoding, too (``specdec.coupling``).
        needs_leaf_probs: It reads q at every node, leaves included; of greedy requests, p and q come at temperature 1.
            A row of zeros is a row that nobody drafts for.
    """

    exactness: Exactness
    laws: frozenset[DraftSampling]
    chain_only: bool = False
    paths_only: bool = False
    noise: Noise = Noise.FRESH
    needs_leaf_probs: bool = False

    def check(self, drafter: Drafter) -> None:
        """Refuse a drafter that this rule is not made for.

        Raises:
            ValueError: Says why, and which verifier fits.
        """
        name = type(self).__name__
        unfit = sorted(law.name for law in drafter.laws - self.laws)
        if unfit:
            fits = "SharedNoiseVerifier" if DraftSampling.COUPLED in drafter.laws else "RejectionVerifier"
            raise ValueError(
                f"{name} is not made for drafts that are {' or '.join(unfit)}, as {type(drafter).__name__} draws them: "
                f"use {fits}, or another sampling in the drafter"
            )
        if self.chain_only and not drafter.is_chain:
            raise ValueError(
                f"{name} takes chains only, and {type(drafter).__name__} drafts trees: "
                f"use RejectionVerifier or TraversalVerifier, or a chain in the drafter"
            )
        if self.paths_only and not (drafter.is_chain or drafter.is_paths):
            raise ValueError(
                f"{name} takes independent paths that share only the root, and {type(drafter).__name__} drafts other "
                f"trees: use TraversalVerifier, or a shape such as (3, 1, 1) in the drafter"
            )
        if self.needs_leaf_probs and not drafter.has_leaf_probs:
            raise ValueError(
                f"{name} reads the draft's probabilities at every node, which {type(drafter).__name__} does not have: "
                f"use RejectionVerifier, or draft with a ModelDrafter"
            )

    def stated_law(
        self, target_probs: Float[Tensor, "*rows vocab"], draft_probs: Float[Tensor, "*rows vocab"]
    ) -> Float[Tensor, "*rows vocab"]:
        """The distribution that the output follows (``EXACT``, ``EXACT_WRT``) or should have followed: p by default.

        Args:
            target_probs: p.
            draft_probs: q.
        """
        return target_probs

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


@dataclass(frozen=True, eq=False)
class Round:
    """What an observer sees of a speculative round (``Engine.on_round``), before its tokens are committed.

    The tensors are the engine's own: an observer copies what it keeps, and changes nothing.

    Attributes:
        tree: What was drafted, with q.
        target_probs: p at every node as the rule was given it: for the two exceptions, see ``Verifier``.
        verdict: What the rule decided.
        requests: Of every row; its ``rounds`` does not count this one yet. None where a row does not speculate.
    """

    tree: DraftTree
    target_probs: Float[Tensor, "batch node vocab"]
    verdict: Verdict
    requests: tuple[Request | None, ...]
