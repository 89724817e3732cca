"""A tree of one static shape, filled level by level."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.drafting.builders.base import Grown, TreeBuilder
from specdec.drafting.drawing import Drawing
from specdec.drafting.draws import drawn, first_arrivals, top
from specdec.drafting.levels import Level, LevelPlan
from specdec.drafting.rating import Rated
from specdec.drafting.scorer import Scorer
from specdec.random import shared_noise
from specdec.tree import DraftTree, TreeShape


class StaticTree(TreeBuilder):
    """Fills a shape that is known before anything is drafted: the scorer is shown all nodes that have children.

    Args:
        shape: What ``TreeShape.of`` takes: a chain's length, branching factors, or paths.
    """

    has_leaf_probs = True

    def __init__(self, shape: TreeShape | int | Sequence[int] | Sequence[Sequence[int]]):
        self.shape = TreeShape.of(shape)
        self.max_nodes = self.max_shown = self.shape.num_nodes
        self.max_depth = self.shape.max_depth
        self.is_chain = self.shape.is_chain
        self.is_paths = self.shape.is_paths
        self.ranks = self.shape.max_children
        self._plans: dict[tuple[torch.device, bool], dict[int, LevelPlan]] = {}

    def bind(self, device: torch.device, *, leaves: bool = False) -> None:
        """Make the tables of every depth."""
        if (device, leaves) not in self._plans:
            self._plans[device, leaves] = LevelPlan.by_depth(self.shape, device, leaves=leaves)

    def grow(self, scorer: Scorer, drawing: Drawing, depth: int) -> Grown:
        """Draft level by level, one call of the scorer for each."""
        rows, vocabulary = drawing.batch, drawing.vocabulary
        plan = self._plans[rows.device, drawing.leaves][depth]
        shape, batch = plan.shape, len(rows)
        marginals = scorer.all_logits(rows, len(plan.levels)) if scorer.per_depth else None
        rater = drawing.rater
        plainly = not drawing.sampled and not drawing.leaves and drawing.sampling.seen is None and rater is None
        if marginals is not None and plainly:
            return _at_once(plan, marginals, drawing)
        if rater is not None:
            rater.begin(shape.num_nodes + 1)
        uniform = drawing.uniforms(shape.num_nodes) if drawing.fresh else None
        tokens = rows.roots.new_zeros(batch, shape.num_nodes + 1)
        tokens[:, 0] = rows.roots
        draft_probs = drawing.room(shape.num_nodes + 1) if drawing.fresh or drawing.leaves else None
        valid = None
        for number, level in enumerate(plan.levels):
            if marginals is not None:
                logits = marginals[:, number : number + 1]
            elif number == 0:
                logits = scorer.root_logits(rows)
            else:
                logits = scorer.level_logits(rows, tokens[:, level.start : level.stop], level.topology, number)
            if level.rows is not None and logits.shape[1] > 1:
                logits = logits.index_select(1, level.rows)
            above = None
            if drawing.sampling.seen is not None:
                above = level.topology.ancestors[0, level.parents].expand(batch, -1, -1)
                logits = logits.expand(-1, len(level.parents), -1)
            scores = drawing.scores(logits, tokens[:, : level.stop], above)
            if rater is not None and level.width and not rater.level(level, tokens[:, : level.stop], scores):
                return _until(number, shape, tokens, valid, drawing, draft_probs, rater.rated)
            q = drawing.distribution(scores) if drawing.sampled or drawing.leaves else None
            if draft_probs is not None and q is not None:
                vocabulary.put(draft_probs, level.parents_at, q)
            if level.width == 0:
                continue
            if q is None or not drawing.sampled:
                tokens[:, level.children_at] = vocabulary.to_target(top(scores, level))
                continue
            children, exists = _drawn(q.expand(-1, len(level.parents), -1), level, uniform, drawing)
            if drawing.greedy is not None:
                children = torch.where(drawing.greedy, top(scores, level), children)
                exists = None if exists is None else exists | drawing.greedy
            tokens[:, level.children_at] = vocabulary.to_target(children)
            if exists is not None:
                valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
                valid[:, level.children_at] = exists & valid[:, level.parent_of]
            elif valid is not None:
                valid[:, level.children_at] = valid[:, level.parent_of]
        if drawing.leaves and draft_probs is not None and (rows.host is None or not rows.host.drafting.all()):
            draft_probs *= rows.drafting[:, None, None]
        law = drawing.law_of(tokens)
        tree = DraftTree.from_shape(shape, tokens, sampling=law, draft_probs=draft_probs, valid=valid)
        return Grown(tree, rated=None if rater is None else rater.rated)


def _until(
    depth: int,
    shape: TreeShape,
    tokens: Int[Tensor, "batch node"],
    valid: Bool[Tensor, "batch node"] | None,
    drawing: Drawing,
    draft_probs: Float[Tensor, "batch node vocab"] | None,
    rated: Rated,
) -> Grown:
    """Returns trees that end at a depth, because nothing deeper is worth drafting."""
    if depth == 0:
        tree = DraftTree.root_only(drawing.batch.roots)
    else:
        shape = shape.cut(depth)
        count = shape.num_nodes + 1
        tokens = tokens[:, :count]
        tree = DraftTree.from_shape(
            shape,
            tokens,
            sampling=drawing.law_of(tokens),
            draft_probs=None if draft_probs is None else draft_probs[:, :count],
            valid=None if valid is None else valid[:, :count],
        )
    return Grown(tree, rated=Rated(rated.cells[:, : tree.width], rated.survival[:, : tree.width]))


def _at_once(plan: LevelPlan, logits: Float[Tensor, "batch depth vocab"], drawing: Drawing) -> Grown:
    """Returns trees of the most probable tokens of every depth, chosen for all nodes together."""
    best = drawing.scores(logits).topk(plan.width, dim=-1).indices
    tokens = drawing.vocabulary.to_target(best[:, plan.level_of, plan.rank_of])
    tokens = torch.cat([drawing.batch.roots[:, None], tokens], dim=1)
    return Grown(DraftTree.from_shape(plan.shape, tokens))


def _drawn(
    q: Float[Tensor, "batch parent column"],
    level: Level,
    uniform: Float[Tensor, "batch draw"] | None,
    drawing: Drawing,
) -> tuple[Int[Tensor, "batch child"], Bool[Tensor, "batch child"] | None]:
    """Returns every parent's children, drawn at random, and which of them exist."""
    if uniform is not None:
        mine = uniform[:, level.children_at.start - 1 : level.children_at.stop - 1]
        return drawn(q, level, mine, drawing.law)
    rows = drawing.batch
    positions = rows.lengths[:, None] + (level.depth + 1)
    return first_arrivals(q, level, shared_noise(rows.keys, positions, q.shape[2]))
