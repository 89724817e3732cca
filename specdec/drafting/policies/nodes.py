"""Node policies: they decide which nodes of a drafted tree are verified."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.arguments import flag, number, whole
from specdec.batch import Batch
from specdec.drafting.builders.base import Grown, TreeBuilder
from specdec.drafting.calibration import SOURCES, Calibration, Rated, Rater, source_of
from specdec.drafting.costs import RoundCosts, needed
from specdec.drafting.scorer import Scorer
from specdec.drafting.vocabulary import VocabularyMap
from specdec.host import can_look
from specdec.tree import DraftTree


class Learning(TypedDict, total=False):
    """The arguments of ``NodePolicy``."""

    source: str
    calibration: str | Path | None
    learn: bool
    explore: int


class NodePolicy(ABC):
    """Leaves out nodes of a tree by how likely they are to be accepted, in the round in which they are drafted.

    A node is never left out for its own token, nor for what was drawn behind it (DSpark, arXiv 2607.05147, appendix A);
    where no token was drawn at random, nothing is forbidden. See ``ScoredDrafter.pruned_by``.

    Args:
        source: Where confidence comes from (``Rater``), or ``"auto"`` for the drafter's confidence head if it has one,
            and ``"top"`` otherwise. In trees of the most probable paths it is the probability of the node itself.
        calibration: A file of an earlier run; None to begin with the confidence as it is.
        learn: Whether to go on counting. Drafts then depend on other requests.
        explore: Every so many rounds nothing is left out, or nothing would be learned of nodes that are. 0 for never.
    """

    unseen: ClassVar[tuple[str, ...]] = ("learn", "explore")  # whose change a recording would not see

    def __init__(
        self, *, source: str = "auto", calibration: str | Path | None = None, learn: bool = True, explore: int = 32
    ):
        if source not in SOURCES:
            raise ValueError(f"source={source!r}: give one of {', '.join(SOURCES)}")
        self.source, self.path = source, calibration
        self.learn, self.explore = flag("learn", learn), whole("explore", explore, least=0)

    @property
    def adapts(self) -> bool:
        return self.learn

    @property
    def _spares(self) -> Bool[Tensor, "1"] | bool:
        return self.learn and self.explore > 0 and (self._played + 1) % self.explore == 0

    @property
    def version(self) -> Hashable:
        return tuple(getattr(self, name) for name in self.unseen)

    def bind(self, builder: TreeBuilder, scorer: Scorer, device: torch.device, *, max_batch_size: int) -> None:
        self._used = "node" if builder.rates_nodes else source_of(self.source, scorer)
        self._builder = builder
        self.calibration = Calibration(builder.max_depth, builder.ranks, device)
        if self.path is not None:
            self.calibration.load(self.path, source=self._used)
        with torch.inference_mode(False):
            # Cells, parents and survival of the nodes of every slot's last draft.
            self._noted = torch.full((3, max_batch_size, builder.max_nodes + 1), -1, dtype=torch.float64, device=device)
            self._played = torch.zeros(1, dtype=torch.long, device=device)

    def prepare(self, rows: int) -> None: ...  # noqa: B027

    def rater(self, scorer: Scorer, batch: Batch, vocabulary: VocabularyMap, *, may_stop: bool) -> Rater:
        return Rater(scorer, self._used, self.calibration, batch, self._least() if may_stop else None)

    def prune(self, grown: Grown, batch: Batch, drafting: Bool[Tensor, " batch"]) -> Grown:
        """Return rated trees, nodes to be verified first, the others invalid; note them for ``count``."""
        tree, rated = grown.tree, grown.rated
        assert rated is not None, "builders rate the nodes when they are asked to"
        there = tree.valid & drafting[:, None] & (tree.depth <= batch.max_depth[:, None])
        there[:, 0].fill_(True)  # (an assignment would make a tensor on the host)
        survival, order = rated.survival.where(there, -1.0), None
        if not (self._builder.ordered or tree.in_line):
            survival, order = survival.sort(dim=-1, descending=True, stable=True)
        kept = self.kept(survival, batch) & (survival >= 0)
        if (spares := self._spares) is not False:
            kept |= spares & (survival >= 0)
        kept[:, 0].fill_(True)
        valid = kept if order is None else torch.zeros_like(kept).scatter_(1, order, kept)
        if self._builder.ordered and not tree.in_line:
            order = (~valid).long().argsort(dim=-1, stable=True)
        tree = replace(tree, valid=valid, tokens=tree.tokens.where(valid, tree.tokens[:, :1]))
        cells, survival, nodes = rated.cells.where(valid, -1), rated.survival, grown.nodes
        if order is not None:
            tree, cells, survival = reordered(tree, order), cells.gather(1, order), survival.gather(1, order)
        if not self._builder.is_chain:
            index = torch.arange(tree.width, device=valid.device).expand_as(valid) if order is None else order
            nodes = index if nodes is None else nodes.gather(1, index)
        self.skip(batch.slots)
        self._noted[:, batch.slots, : tree.width] = torch.stack([cells.double(), tree.parents.double(), survival])
        return Grown(tree, nodes, Rated(cells, survival))

    @abstractmethod
    def kept(self, survival: Float[Tensor, "batch node"], batch: Batch) -> Bool[Tensor, "batch node"]:
        """Return which nodes are verified; it may not depend on those behind. ``survival`` is negative for none."""

    def skip(self, slots: Int[Tensor, " batch"]) -> None:
        self._noted[0].index_fill_(0, slots, -1)

    def count(self, slots: Tensor, path: Int[Tensor, "batch depth"], decided: Bool[Tensor, " batch"]) -> None:
        """Count what was accepted of the last drafts: a path of nodes per row, without the root, -1 padded."""
        cells, parents, survival = self._noted[:, slots]
        cells = cells.long().where(decided[:, None], -1)
        nodes = cells.shape[1]
        on_path = torch.zeros(len(cells), nodes + 1, dtype=torch.bool, device=cells.device)
        on_path.scatter_(1, path.where(path >= 0, nodes), True)
        on_path = on_path[:, :nodes]
        on_path[:, 0].fill_(True)
        tried = on_path.gather(1, parents.long().clamp(min=0))
        self.calibration.count(cells, survival.clamp(min=0), tried, on_path, learn=self.learn)
        self.skip(slots)
        self._played += 1

    def save(self, path: str | Path, **facts: Any) -> None:
        self.calibration.save(path, policy=type(self).__name__, source=self._used, **facts)

    def _least(self) -> float | None:
        """Return the survival that a node must reach to be verified, if that is known before."""
        return None


class ConfidenceNodes(NodePolicy):
    """Verifies the nodes whose estimated survival reaches a threshold, and drafts no further than there are any.

    Survival is the product of calibrated confidences down the path (DSpark, arXiv 2607.05147, section 3; AdaEDL, arXiv
    2410.18351, stops by the entropy of q). ``threshold`` is the least survival, from 0 (all nodes) to 1.
    """

    unseen = ("learn", "explore", "threshold")

    def __init__(self, threshold: float = 0.15, **learning: Unpack[Learning]):
        super().__init__(**learning)
        remedy = "give a probability from 0 (all nodes) to 1, such as 0.15"
        self.threshold = number("threshold", threshold, remedy, lambda share: 0 <= share <= 1)

    def kept(self, survival: Float[Tensor, "batch node"], batch: Batch) -> Bool[Tensor, "batch node"]:
        return survival >= self.threshold

    def _least(self) -> float | None:
        if (spares := self._spares) is not False and (not can_look(self._played) or spares):
            return None  # this may be a round in which nothing is left out
        return self.threshold


class CostAwareNodes(NodePolicy):
    """Verifies nodes in the order of their survival while the expected tokens per measured second grow.

    With n nodes in each of B rows, a round emits B + Σ survival expected tokens in C(B, n) seconds (``RoundCosts``).
    All rows take the first n after which one more node per row would lower the ratio, not the largest ratio of all: so
    whether there is a node does not depend on those behind it (DSpark, arXiv 2607.05147, appendix A and algorithm 1).
    Nothing is lost, as costs are made convex. Costs of None are set before the policy is used.
    """

    unseen = ("learn", "explore", "costs")

    def __init__(self, costs: RoundCosts | str | Path | None = None, **learning: Unpack[Learning]):
        super().__init__(**learning)
        self.costs = RoundCosts.load(costs, by_nodes=True) if isinstance(costs, str | Path) else costs

    @property
    def adapts(self) -> bool:
        return True

    def bind(self, builder: TreeBuilder, scorer: Scorer, device: torch.device, *, max_batch_size: int) -> None:
        needed(self.costs).by_nodes(1, builder.max_nodes)
        super().bind(builder, scorer, device, max_batch_size=max_batch_size)
        self._seconds: dict[tuple[RoundCosts, int], Tensor] = {}

    def prepare(self, rows: int) -> None:
        costs = needed(self.costs)
        if (costs, rows) not in self._seconds:
            with torch.inference_mode(False):
                seconds = torch.from_numpy(costs.by_nodes(rows, self._builder.max_nodes)).to(self._noted.device)
                self._seconds[costs, rows] = seconds

    def kept(self, survival: Float[Tensor, "batch node"], batch: Batch) -> Bool[Tensor, "batch node"]:
        seconds = self._seconds[needed(self.costs), len(batch)][: survival.shape[1]]
        emitted = survival.clamp(min=0).sum(0).cumsum(0)  # the root, which is certain, stands for the token after it
        speed = emitted / seconds
        pays = (speed[1:] > speed[:-1]).long().cumprod(0) > 0
        return torch.nn.functional.pad(pays, (1, 0), value=True).expand_as(survival)


class FirstNodes(NodePolicy):
    """Verifies so many nodes in every round, the most likely ones, or with None all: to measure what nodes cost."""

    unseen = ("nodes",)

    def __init__(self, nodes: int | None = None):
        super().__init__(learn=False)
        self.nodes = None if nodes is None else whole("nodes", nodes, least=0)

    def kept(self, survival: Float[Tensor, "batch node"], batch: Batch) -> Bool[Tensor, "batch node"]:
        count = survival.shape[1] if self.nodes is None else self.nodes + 1
        return (torch.arange(survival.shape[1], device=survival.device) < count).expand_as(survival)


class LoopedNodes(NodePolicy):
    """Drafts another stage if the last one's Σ log q is at least ``gate``; if not, all stages are verified together.

    DLoop (arXiv 2610.07659) without its training, for chains, in stages of ``stage`` tokens; the paper's gates are -0.5
    and -0.75 nats. q is the drafter's at temperature 1. The stage that ends a draft is kept: to discard it would look
    at its own tokens, which biases the output.
    """

    unseen = ("gate", "stage")

    def __init__(self, gate: float = -0.75, stage: int = 2):
        super().__init__(learn=False)
        remedy = "give a sum of log-probabilities, at most 0, such as -0.75"
        self.gate = number("gate", gate, remedy, lambda nats: nats <= 0)
        self.stage = whole("stage", stage, least=1)

    def bind(self, builder: TreeBuilder, scorer: Scorer, device: torch.device, *, max_batch_size: int) -> None:
        if not builder.is_chain or builder.reorders_nodes:
            raise ValueError("policy=looped drafts stages of a chain, and these drafts are trees: give drafter.shape=8")
        super().bind(builder, scorer, device, max_batch_size=max_batch_size)

    def rater(self, scorer: Scorer, batch: Batch, vocabulary: VocabularyMap, *, may_stop: bool) -> Rater:
        return _Stages(self, scorer, batch, vocabulary, may_stop)

    def kept(self, survival: Float[Tensor, "batch node"], batch: Batch) -> Bool[Tensor, "batch node"]:
        return survival > 0


class _Stages(Rater):
    """Rates nodes 1 while drafting goes on, and 0 behind the stage that ended it."""

    def __init__(self, policy: LoopedNodes, scorer: Scorer, batch: Batch, vocabulary: VocabularyMap, may_stop: bool):
        super().__init__(scorer, "top", policy.calibration, batch, 1.0 if may_stop else None)
        self._policy, self._vocabulary, self._sum = policy, vocabulary, torch.zeros(len(batch), 1, device=batch.device)
        self._goes = torch.ones_like(self._sum)

    def confidence(self, tokens: Tensor, scores: Tensor, depth: int) -> Float[Tensor, "batch 1"]:
        if depth:
            self._sum = self._sum + self._logs.gather(-1, self._vocabulary.to_drafter(tokens)[..., None])[..., 0]
            if depth % self._policy.stage == 0:
                self._goes, self._sum = self._goes * (self._sum >= self._policy.gate), torch.zeros_like(self._sum)
        self._logs = scores.float().log_softmax(-1)
        return self._goes

    def nodes(self, confidence: Tensor, parents: Tensor, depth: Tensor, rank: Tensor) -> Rated:
        return Rated(torch.full_like(parents, -1), confidence)


def reordered(tree: DraftTree, order: Int[Tensor, "batch node"]) -> DraftTree:
    """Return the same trees with their nodes in another order, the root first and every parent before its children."""
    number = torch.empty_like(order).scatter_(1, order, torch.arange(tree.width, device=order.device).expand_as(order))
    above = tree.parents.gather(1, order)
    q = tree.draft_probs
    return DraftTree.build(
        tree.tokens.gather(1, order),
        number.gather(1, above.clamp(min=0)).where(above >= 0, -1),
        valid=tree.valid.gather(1, order),
        sampling=tree.law.gather(1, order) if tree.only_law is None else tree.only_law,
        draft_probs=None if q is None else q.gather(1, order[:, :, None].expand(-1, -1, q.shape[2])),
        max_depth=tree.max_depth,
        max_children=tree.max_children,
    )
