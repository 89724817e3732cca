"""A tree of one static shape, filled level by level, and the laws by which a level's children are drawn."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.coupling import race
from specdec.drafting.builders.base import Grown, TreeBuilder
from specdec.drafting.builders.sampled import without_replacement
from specdec.drafting.calibration import Rated, Rater
from specdec.drafting.drawing import Drawing
from specdec.drafting.scorer import Level, LevelPlan, Scorer
from specdec.filters import first_largest
from specdec.random import draw, shared_noise
from specdec.topology import Topology
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling


class StaticTree(TreeBuilder):
    """Fills a shape, as ``TreeShape.of`` takes it; ``ahead`` returns the rows' tokens where only q is wanted."""

    has_leaf_probs = True

    def __init__(self, shape: TreeShape | int | Sequence[Any], ahead: Callable[[int], Tensor] | None = None):
        self.shape, self._ahead = TreeShape.of(shape), ahead
        self.max_nodes = self.max_shown = self.shape.num_nodes
        self.max_depth, self.ranks = self.shape.max_depth, self.shape.max_children
        self.is_chain, self.is_paths = self.shape.is_chain, self.shape.is_paths
        self._plans: dict[tuple[torch.device, bool], dict[int, LevelPlan]] = {}

    def bind(self, device: torch.device, *, leaves: bool = False) -> None:
        if (device, leaves) not in self._plans:
            self._plans[device, leaves] = LevelPlan.by_depth(self.shape, device, leaves=leaves)

    def grow(self, scorer: Scorer, drawing: Drawing, depth: int) -> Grown:
        rows, vocabulary, rater = drawing.batch, drawing.vocabulary, drawing.rater
        plan = self._plans[rows.device, drawing.leaves][depth]
        shape, batch = plan.shape, len(rows)
        logits_of = scorer.levels(rows, len(plan.levels))
        sure = [torch.ones(batch, 1, device=rows.device)]  # the confidence in every node's parent
        uniform = drawing.uniforms(shape.num_nodes) if drawing.fresh else None
        tokens = rows.roots.new_zeros(batch, shape.num_nodes + 1)
        tokens[:, 0] = rows.roots
        if self._ahead is not None:
            tokens[:, 1:] = self._ahead(shape.num_nodes)
        draft_probs = drawing.room(shape.num_nodes + 1) if drawing.fresh or drawing.leaves else None
        valid = None
        for number, level in enumerate(plan.levels):
            logits = logits_of(tokens[:, level.start : level.stop], level.topology, number)
            if level.rows is not None and logits.shape[1] > 1:
                logits = logits.index_select(1, level.rows)
            above = None
            if drawing.by_path:
                above = level.topology.ancestors[0, level.parents].expand(batch, -1, -1)
                logits = logits.expand(-1, len(level.parents), -1)
            scores = drawing.scores(logits, tokens[:, : level.stop], above)
            if rater is not None and level.width:
                confidence = rater.confidence(tokens.index_select(1, level.parents), scores, level.depth)
                sure.append(confidence.expand(-1, len(level.parents)).index_select(1, level.row_of))
                if rater.least is not None and not rater.pays(_rated(plan, sure, rater).survival[:, level.children_at]):
                    sure.pop()  # nothing deeper is worth drafting
                    if number == 0:
                        return Grown(DraftTree.root_only(rows.roots), rated=_rated(plan, sure, rater))
                    shape, count = shape.cut(number), level.children_at.start
                    tokens, valid = tokens[:, :count], None if valid is None else valid[:, :count]
                    draft_probs = None if draft_probs is None else draft_probs[:, :count]
                    break
            q = drawing.distribution(scores) if drawing.sampled or drawing.leaves else None
            if draft_probs is not None and q is not None:
                vocabulary.put(draft_probs, slice(level.start, level.stop) if level.rows is None else level.parents, q)
            if level.width == 0 or self._ahead is not None:
                continue
            if q is None or not drawing.sampled:
                tokens[:, level.children_at] = vocabulary.to_target(top(scores, level))
                continue
            children, exists = _children(q.expand(-1, len(level.parents), -1), level, uniform, drawing)
            if drawing.greedy is not None:
                children = torch.where(drawing.greedy, top(scores, level), children)
                exists = None if exists is None else exists | drawing.greedy
            tokens[:, level.children_at] = vocabulary.to_target(children)
            if exists is not None and valid is None:
                valid = torch.ones_like(tokens, dtype=torch.bool)
            if valid is not None:
                above = valid[:, level.parent_of]
                valid[:, level.children_at] = above if exists is None else exists & above
        if drawing.leaves and draft_probs is not None and (rows.host is None or not rows.host.drafting.all()):
            draft_probs *= rows.drafting[:, None, None]
        law = drawing.law_of(tokens)
        tree = DraftTree.from_shape(shape, tokens, sampling=law, draft_probs=draft_probs, valid=valid)
        return Grown(tree, rated=None if rater is None else _rated(plan, sure, rater))


def _rated(plan: LevelPlan, sure: list[Tensor], rater: Rater) -> Rated:
    confidence, topology = torch.cat(sure, dim=1), Topology.of_shape(plan.shape, sure[0].device)
    tables = (topology.parents, topology.depth, plan.rank_of)
    return rater.nodes(confidence, *(table[:, : confidence.shape[1]].expand_as(confidence) for table in tables))


def top(scores: Float[Tensor, "batch parent vocab"], level: Level) -> Int[Tensor, "batch child"]:
    """Return every parent's most probable tokens, in order, for its children; one row of scores serves all parents."""
    shared = scores.shape[1] == 1
    if level.one_each and level.most == 1:
        best = first_largest(scores)
        return best.expand(-1, len(level.parents)) if shared else best
    best = scores.topk(level.most, dim=-1).indices
    return best[:, 0, level.chosen_of] if shared else best[:, level.row_of, level.chosen_of]


def _children(
    q: Float[Tensor, "batch parent column"], level: Level, uniform: Float[Tensor, "batch draw"] | None, drawing: Drawing
) -> tuple[Int[Tensor, "batch child"], Bool[Tensor, "batch child"] | None]:
    """Return every parent's children, and which of them exist; None if all do."""
    at = slice(None), level.row_of, level.rank_of
    if uniform is not None:
        mine = uniform[:, level.children_at.start - 1 : level.children_at.stop - 1]
        if drawing.law is DraftSampling.IID or level.width == 1:
            return draw(q if level.one_each else q.index_select(1, level.row_of), mine), None
        each = mine.new_zeros(len(q), q.shape[1], level.width)
        each[at] = mine
        tokens, own = without_replacement(q, each)
        return tokens[at], own[at] > 0
    rows = drawing.batch
    positions = rows.lengths[:, None] + (level.depth + 1)
    # COUPLED: the first children in the race that the target watches.
    noise = drawing.vocabulary.columns(shared_noise(rows.keys, positions, drawing.vocabulary.target))
    arrivals = race(q, noise)
    if level.one_each:
        return arrivals.argmax(-1), None
    earliest, token = arrivals.topk(level.width, dim=-1)
    return token[at], earliest[at] > 0
