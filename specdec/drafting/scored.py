"""A drafter made of a scorer and a tree builder: all that is common to drafters with a model of their own."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from specdec.arguments import instance
from specdec.arguments import number as checked_number
from specdec.batch import Batch
from specdec.drafting.builders.base import Grown, TreeBuilder
from specdec.drafting.drawing import Drawing
from specdec.drafting.on_device import DeviceDrafter
from specdec.drafting.policies.nodes import NodePolicy
from specdec.drafting.pruning import without_tail
from specdec.drafting.scorer import Scorer
from specdec.drafting.vocabulary import VocabularyMap
from specdec.requests import GREEDY_BELOW, SamplingParams
from specdec.tree import DraftTree
from specdec.types import Committed, Decided, DraftSampling


class ScoredDrafter(DeviceDrafter):
    """Drafts with a scorer, whose logits a tree builder turns into trees.

    A subclass loads a model, and in its ``bind`` calls ``begin`` with a scorer for it.

    Args:
        tree: The tree builder.
        sampling: How siblings are drawn for sampled requests: ``"iid"``, ``"without_replacement"``,
            ``"deterministic"`` (the most probable tokens) or ``"coupled"`` (the first to arrive in the race that the
            target watches). Greedy requests always get the most probable tokens.
        temperature: The drafter's own; None follows each request. 0 means ``"deterministic"``.

    Raises:
        ValueError: An argument is of the wrong type or out of its range, or the tree cannot be drawn by this law.
    """

    def __init__(self, tree: TreeBuilder, sampling: DraftSampling | str, temperature: float | None):
        self.tree = tree
        self.sampling = law_of(sampling)
        if temperature is not None:
            remedy = "give 0 (top-k), a positive number, or None (the request's)"
            temperature = checked_number("drafter temperature", temperature, remedy)
            if not 0 <= temperature < float("inf"):
                raise ValueError(f"drafter temperature={temperature}: {remedy}")
        if temperature is not None and temperature < GREEDY_BELOW:
            self.sampling = DraftSampling.DETERMINISTIC
        self.temperature = temperature
        self.max_nodes = tree.max_nodes
        self.max_depth = tree.max_depth
        self.is_chain = tree.is_chain
        self.is_paths = tree.is_paths
        self.has_leaf_probs = tree.has_leaf_probs
        self.laws = tree.laws(self.sampling)
        self.policy: NodePolicy | None = None

    def prune_by(self, policy: NodePolicy) -> "ScoredDrafter":
        """Let a policy choose, in every round, which nodes of the trees are verified; before ``bind``.

        Args:
            policy: Serves this drafter alone, because it has state.

        Returns:
            This drafter.
        """
        instance("policy", policy, NodePolicy, "a NodePolicy, such as ConfidenceNodes()")
        self.policy = policy
        self.adapts = policy.adapts
        # Their drafts are no longer as deep in all paths.
        self.is_paths = False
        return self

    def begin(
        self,
        scorer: Scorer,
        vocabulary: VocabularyMap,
        device: torch.device,
        *,
        max_batch_size: int,
        leaf_probs: bool = False,
    ) -> None:
        """Begin with a new engine; ``bind`` calls it.

        Args:
            scorer: Scores from now on.
            vocabulary: Translates its columns.
            device: Where trees are grown.
            max_batch_size: The number of slots.
            leaf_probs: See ``Drafter``.

        Raises:
            ValueError: The trees are deeper than the scorer can score.
        """
        if scorer.max_depth is not None and self.max_depth + leaf_probs > scorer.max_depth:
            raise ValueError(
                f"the tree is {self.max_depth} deep and {type(self).__name__} drafts at most {scorer.max_depth} tokens "
                f"ahead: give a shallower tree"
            )
        self.tree.bind(device, leaves=leaf_probs)
        if self.policy is not None:
            self.policy.bind(self.tree, scorer, device, max_batch_size=max_batch_size)
        self.scorer, self._vocabulary, self._leaf_probs = scorer, vocabulary, leaf_probs
        with torch.inference_mode(False):
            # Where the scorer was shown the nodes of every slot's last tree; see ``Grown.nodes``.
            self._nodes = torch.full((max_batch_size, self.max_nodes + 1), -1, dtype=torch.long, device=device)

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Begin with an empty row."""
        self.scorer.admit(slot)

    def release(self, slot: int) -> None:
        """Forget the row."""
        self.scorer.release(slot)

    @torch.inference_mode()
    def observe(self, committed: Committed) -> None:
        """Show the scorer what became final."""
        nodes = None if committed.path is None else self._shown(committed.slots, committed.path)
        self.scorer.observe(committed, nodes, in_place=self.tree.in_place)
        if self.policy is not None and committed.path is not None:
            self.policy.count(committed.slots, committed.path)

    @torch.inference_mode()
    def propose(self, slots: Batch) -> DraftTree:
        """Grow trees as deep as any row has room for."""
        ready = self.scorer.host_ready(slots)
        drafts = slots.host_drafting if ready is None else slots.host_drafting & ready
        depth = min(self.max_depth, int(np.where(drafts, slots.host_max_depth, 0).max()))
        if depth == 0 and not self._leaf_probs:
            if self.policy is not None:
                self.policy.skip(slots.index)
            return DraftTree.root_only(slots.roots)
        self.prepare(slots)
        return self.trimmed(self._grown(slots, max(depth, 1)))

    def trimmed(self, tree: DraftTree) -> DraftTree:
        """Returns the trees without the nodes that the policy has left out of all rows."""
        return tree if self.policy is None else without_tail(tree)

    @property
    def version(self) -> Hashable:
        """The scorer's and the policy's."""
        return self.scorer.version if self.policy is None else (self.scorer.version, self.policy.version)

    def prepare(self, slots: Batch) -> Hashable:
        """Catch up with what was committed meanwhile."""
        if self.policy is not None:
            self.policy.prepare(len(slots))
        return self.scorer.catch_up(slots)

    @torch.inference_mode()
    def draft(self, slots: Batch) -> DraftTree:
        """Grow trees of full depth."""
        return self._grown(slots, self.max_depth)

    def follow(self, decided: Decided) -> None:
        """Show the scorer, on the device, what became final."""
        self.scorer.follow(decided, self._shown(decided.slots, decided.path), in_place=self.tree.in_place)
        if self.policy is not None:
            self.policy.count(decided.slots, decided.path, decided.told)

    def followed(self, slots: Batch, counts: np.ndarray, told: np.ndarray) -> None:
        """Note what became final."""
        self.scorer.followed(slots, counts, told)

    def _grown(self, slots: Batch, depth: int) -> DraftTree:
        policy, leaves = self.policy, self._leaf_probs
        rater = None if policy is None else policy.rater(self.scorer, slots, may_stop=not leaves)
        drawing = Drawing.of(slots, self._vocabulary, self.sampling, self.temperature, leaves=leaves, rater=rater)
        grown = self.tree.grow(self.scorer, drawing, depth)
        ready = self.scorer.ready(slots)
        if policy is not None:
            grown = policy.prune(grown, slots, slots.drafting if ready is None else slots.drafting & ready)
        self._note(grown, slots)
        if ready is not None and self._leaf_probs and grown.tree.draft_probs is not None:
            grown.tree.draft_probs.mul_(ready[:, None, None])  # rules with leaves take a row without drafts by this
        return _without(grown.tree, ready)

    def _note(self, grown: Grown, slots: Batch) -> None:
        """Remember where the scorer was shown the nodes, at an address that stays."""
        if grown.nodes is not None:
            self._nodes[slots.index, : grown.nodes.shape[1]] = grown.nodes

    def _shown(self, slots: Int[Tensor, " batch"], path: Int[Tensor, "batch depth"]) -> Int[Tensor, "batch depth"]:
        """Returns the scorer's numbers of the nodes of a path."""
        if not self.tree.renumbers and (self.policy is None or self.tree.is_chain):
            return path
        return self._nodes[slots].gather(1, path.clamp(min=0)).where(path >= 0, -1)


def _without(tree: DraftTree, ready: Tensor | None) -> DraftTree:
    """Returns the trees, of the root alone in rows that are not ready."""
    if ready is None:
        return tree
    return tree.limited(torch.where(ready, tree.max_depth, 0))


def law_of(sampling: DraftSampling | str) -> DraftSampling:
    """Returns a law by its name.

    Raises:
        ValueError: Lists the names.
    """
    choices = (
        DraftSampling.IID,
        DraftSampling.WITHOUT_REPLACEMENT,
        DraftSampling.DETERMINISTIC,
        DraftSampling.COUPLED,
    )
    for law in choices:
        if sampling is law or (isinstance(sampling, str) and sampling.upper() == law.name):
            return law
    raise ValueError(f"drafter sampling={sampling!r}: give one of {', '.join(law.name.lower() for law in choices)}")
