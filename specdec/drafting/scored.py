"""A drafter made of a scorer and a tree builder: all that is common to drafters with a model of their own."""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.arguments import instance, number
from specdec.batch import Batch
from specdec.drafting.builders.base import TreeBuilder
from specdec.drafting.builders.static import StaticTree
from specdec.drafting.drawing import Drawing
from specdec.drafting.policies.nodes import NodePolicy
from specdec.drafting.scorer import Scorer
from specdec.drafting.vocabulary import Ids, VocabularyMap
from specdec.host import can_look
from specdec.interfaces import Description, Drafter, Session, Sizes
from specdec.requests import GREEDY_BELOW, SamplingParams
from specdec.target.target import Target
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.tree_parts import size_for
from specdec.types import DraftSampling, Outcome


class ScoredDrafter(Drafter):
    """Drafts with a scorer, whose logits a tree builder turns into trees; ``bind`` makes a ``ScoredSession`` of it.

    Args:
        sampling: How siblings are drawn for sampled requests: ``"iid"``, ``"without_replacement"``, ``"deterministic"``
            (the most probable tokens, which greedy requests always get) or ``"coupled"`` (``SharedNoiseVerifier``).
        temperature: The drafter's own; None follows each request. 0 means ``"deterministic"``.

    Attributes:
        policy: Chooses which nodes are verified (``pruned_by``); None for all.
    """

    at_once: bool = False  # whether one forward scores all depths

    def __init__(self, tree: TreeBuilder, sampling: DraftSampling | str, temperature: float | None):
        self.tree = tree
        self.sampling = law_of(sampling)
        if temperature is not None:
            remedy = "give 0 (top-k), a positive number, or None (the request's)"
            temperature = number("drafter temperature", temperature, remedy, lambda value: 0 <= value < float("inf"))
            self.sampling = DraftSampling.DETERMINISTIC if temperature < GREEDY_BELOW else self.sampling
        self.temperature = temperature
        self.max_nodes, self.max_depth, self.laws = tree.max_nodes, tree.max_depth, tree.laws(self.sampling)
        self.is_chain, self.is_paths, self.has_leaf_probs = tree.is_chain, tree.is_paths, tree.has_leaf_probs
        self.policy: NodePolicy | None = None

    def describe(self, target: Target | None = None) -> Description:
        return replace(super().describe(target), at_once=self.at_once)

    def along(self, ahead: Callable[[int], Tensor]) -> Drafter:
        if not (isinstance(self.tree, StaticTree) and self.is_chain and self.policy is None):
            return super().along(ahead)
        twin, law = copy.copy(self), DraftSampling.IID
        twin.tree, twin.sampling, twin.laws = StaticTree(self.max_depth, ahead), law, frozenset([law])
        return twin

    def pruned_by(self, policy: NodePolicy) -> "ScoredDrafter":
        """Return the same drafter with a policy that chooses, in every round, which nodes of the trees are verified."""
        instance("policy", policy, NodePolicy, "a NodePolicy, such as ConfidenceNodes()")
        if not self.tree.pruned:
            raise ValueError(f"{type(self.tree).__name__} takes no policy that leaves out nodes: give tree=sampled")
        twin = copy.copy(self)
        twin.policy, twin.adapts = policy, policy.adapts
        twin.is_paths = False  # their drafts are no longer as deep in all paths
        return twin


class ScoredSession(Session):
    """The drafts of a scorer in one engine; ``ids`` are the tokens that may be drafted (``VocabularyMap``)."""

    def __init__(
        self,
        drafter: ScoredDrafter,
        scorer: Scorer,
        target: Target,
        sizes: Sizes,
        *,
        ids: Ids | None = None,
        hidden_layers: Sequence[int] = (),
    ):
        leaves = sizes.leaf_probs
        if scorer.max_depth is not None and drafter.max_depth + leaves > scorer.max_depth:
            most = f"{type(drafter).__name__} drafts at most {scorer.max_depth} tokens ahead"
            raise ValueError(f"the tree is {drafter.max_depth} deep and {most}: give a shallower tree")
        if drafter.tree.asks_twice and not (scorer.per_depth or scorer.cheap_levels):
            names = type(drafter.tree).__name__, type(drafter).__name__
            remedy = "draft with a block drafter, Medusa, Hydra or ReDrafter, or give tree=sampled"
            raise ValueError("{} scores a level twice, and each time {} runs its model: {}".format(*names, remedy))
        self.hidden_layers = tuple(hidden_layers)
        self.drafter, self.tree, self.scorer = drafter, drafter.tree, scorer
        self.models, self.caches, self.lookback = scorer.models, scorer.caches, scorer.lookback
        self.max_depth = drafter.max_depth
        self._leaves, device = leaves, target.device
        self.vocabulary = VocabularyMap(scorer.vocab_size, target.vocab_size, None if ids is None else ids.to(device))
        self._every = True  # whether every row that drafts has a state to begin with
        self.tree.bind(device, leaves=leaves)
        self.policy = copy.copy(drafter.policy)
        if self.policy is not None:
            self.policy.bind(self.tree, scorer, device, max_batch_size=sizes.max_batch_size)
        with torch.inference_mode(False):
            # Where the scorer was shown the nodes of every slot's last tree; see ``Grown.nodes``.
            shape = sizes.max_batch_size, drafter.max_nodes + 1
            self._nodes = torch.full(shape, -1, dtype=torch.long, device=device)

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self.scorer.admit(slot, len(prompt_ids) - 1)

    def held(self, slot: int, length: int) -> int:
        return self.scorer.held(slot, length)

    def release(self, slot: int) -> None:
        self.scorer.release(slot)

    @torch.inference_mode()
    def observe(self, outcome: Outcome) -> None:
        slots, path = outcome.slots, outcome.path
        self.scorer.observe(outcome, None if path is None or self.tree.is_chain else self._shown(slots, path))
        if self.policy is not None and path is not None:
            self.policy.count(slots, path, outcome.counts > 0)

    @torch.inference_mode()
    def prepare(self, batch: Batch) -> Hashable:
        host = batch.on_host
        if self.scorer.needs_state:
            self._every = bool(((host.lengths > 0) | ~host.drafting).all())
        key = None
        if self.policy is not None:
            self.policy.prepare(len(batch))
            key = self.policy.version
        return self.scorer.prepare(batch), key, self._every

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree:
        depth = self.max_depth
        if batch.host is not None:
            room = batch.host if not self.scorer.needs_state else batch.host.begun
            depth = min(depth, room.deepest)
            if depth == 0 and not self._leaves:
                if self.policy is not None:
                    self.policy.skip(batch.slots)
                self.scorer.skip(batch)
                return DraftTree.root_only(batch.roots)
        tree = self._grown(batch, max(depth, 1))
        return tree if batch.host is None else self.trimmed(tree)

    def trimmed(self, tree: DraftTree) -> DraftTree:
        return without_tail(tree) if self.tree.ends or self.policy is not None else tree

    def _grown(self, batch: Batch, depth: int) -> DraftTree:
        policy, leaves, drafter = self.policy, self._leaves, self.drafter
        rater = None if policy is None else policy.rater(self.scorer, batch, self.vocabulary, may_stop=not leaves)
        drawing = Drawing.of(batch, self.vocabulary, drafter.sampling, drafter.temperature, leaves=leaves, rater=rater)
        grown = self.tree.grow(self.scorer, drawing, depth)
        ready: Bool[Tensor, " batch"] | None = None if self._every else batch.lengths > 0  # rows with a target's state
        if policy is not None:
            grown = policy.prune(grown, batch, batch.drafting if ready is None else batch.drafting & ready)
        if grown.nodes is not None:
            self._nodes[batch.slots, : grown.nodes.shape[1]] = grown.nodes  # at an address that stays
        if ready is not None and leaves and grown.tree.draft_probs is not None:
            grown.tree.draft_probs.mul_(ready[:, None, None])  # rules with leaves take a row without drafts by this
        tree = grown.tree
        return tree if ready is None else tree.limited(torch.where(ready, tree.max_depth, 0))

    def _shown(self, slots: Int[Tensor, " batch"], path: Int[Tensor, "batch depth"]) -> Int[Tensor, "batch depth"]:
        if not self.tree.reorders_nodes and (self.policy is None or self.tree.is_chain):
            return path
        return self._nodes[slots].gather(1, path.clamp(min=0)).where(path >= 0, -1)


def law_of(sampling: DraftSampling | str) -> DraftSampling:
    """A law by its name."""
    name = sampling.name if isinstance(sampling, DraftSampling) else str(sampling).upper()
    if name not in DraftSampling.__members__:
        names = ", ".join(name.lower() for name in DraftSampling.__members__)
        raise ValueError(f"drafter sampling={sampling!r}: give one of {names}")
    return DraftSampling[name]


def without_tail(tree: DraftTree) -> DraftTree:
    """Return the trees without the columns behind the last valid node of any row, rounded up to one of few sizes."""
    columns = torch.arange(tree.width, device=tree.tokens.device)
    needed = int((columns * tree.valid).amax())
    in_line = tree.in_line or needed == 0
    count = 1 + (needed if in_line else min(size_for(needed), tree.width - 1))
    if count == tree.width and not tree.in_line:
        return tree
    law = tree.law[:, :count] if tree.only_law is None else tree.only_law
    q = None if tree.draft_probs is None else tree.draft_probs[:, :count]
    tokens, valid = tree.tokens[:, :count], tree.valid[:, :count]
    if in_line:
        whole = can_look(valid) and bool(valid.all())
        topology = Topology.chain(count, tokens.device)
        return DraftTree.of_topology(topology, tokens, sampling=law, draft_probs=q, valid=None if whole else valid)
    return DraftTree.build(
        tokens,
        tree.parents[:, :count],
        valid=valid,
        sampling=law,
        draft_probs=q,
        max_depth=min(tree.max_depth, count - 1),
        max_children=min(tree.max_children, count - 1),
    )
