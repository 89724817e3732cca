"""Trees that grow by their best nodes: a loop over levels, and rules for what is expanded and what is kept.

``ExpansionTree`` keeps the most probable paths (EAGLE-2, Li et al. 2024, arXiv 2406.16858, section 4). A path's score
is the product of its probabilities at temperature 1. With ``width`` no less than ``nodes``, and logits that depend on
the depth alone, these are exactly the best paths (DDTree, arXiv 2604.12989). ``BeamSearchTree`` keeps the beams that a
search ends with, their common beginnings as one node each (ReDrafter, arXiv 2403.09919, section 3.2).
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.arguments import number, whole
from specdec.drafting.builders.base import Grown, TreeBuilder
from specdec.drafting.drawing import Drawing
from specdec.drafting.scorer import LevelScores, Scorer
from specdec.kernels import usable
from specdec.shape import MOST_NODES
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import DraftSampling

_LEAST = 1e-9  # A token's cost in nats is at least this, so that no child scores as high as its parent.


class Front(NamedTuple):
    """The nodes that are expanded at one level.

    Attributes:
        worth: What they are chosen by; the root is certain.
        numbers: Their numbers as candidates: the root is 0, and candidate i is number i + 1.
        above: Their parents, by the numbers under which the scorer was shown these; -1 for the root.
    """

    tokens: Int[Tensor, "batch front"]
    worth: Float[Tensor, "batch front"]
    numbers: Int[Tensor, "batch front"]
    above: Int[Tensor, "batch front"]


class Scored(NamedTuple):
    """A front at ``depth``, and what its nodes are expanded by.

    Attributes:
        scores: Those of all nodes, or of one for all, if they depend on the depth alone.
        q: What children are drawn from, each with its number of ``uniform``; None where nothing is drawn.
        first: The number under which the first node was shown.
        offered: The number of candidates before the children.
    """

    front: Front
    scores: Float[Tensor, "batch scored column"]
    q: Float[Tensor, "batch front column"] | None
    uniform: Float[Tensor, "batch front child"] | None
    depth: int
    first: int
    offered: int
    last: bool


class Offers(NamedTuple):
    """The children of a front, parent by parent in the order in which they were drawn: candidates of the tree.

    ``worth`` is what they are kept by, ``q`` what a parent's children were drawn from, and ``confidence`` the one in a
    parent's children.
    """

    token: Int[Tensor, "batch candidate"]
    worth: Float[Tensor, "batch candidate"]
    q: Float[Tensor, "batch front column"] | None = None
    confidence: Float[Tensor, "batch front"] | None = None


class BeamTree(TreeBuilder):
    """Expands the best nodes of every level, and keeps the best of all nodes that these offer.

    At every level ``width`` nodes are expanded, each of which offers ``children`` (None: as many). A subclass says what
    the root is worth and a node that must not be drafted, and how many children are drawn, if not all.
    """

    reorders_nodes = True
    takes = (DraftSampling.DETERMINISTIC,)
    draws: int | None = None
    certain, impossible, depth_cost = 0.0, -torch.inf, 0.0

    def __init__(self, nodes: int, depth: int, width: int, children: int | None = None):
        self.max_nodes = whole("nodes", nodes, least=1)
        self.max_depth = whole("depth", depth, least=1)
        self.width = whole("width", width, least=1)
        self.children = self.width if children is None else whole("children", children, least=1)
        offered = self.offered(self.max_depth)
        if nodes > min(offered, MOST_NODES):
            raise ValueError(
                f"a tree of nodes={nodes}, and {self.max_depth} levels of width={self.width} offer {offered} (at most "
                f"{MOST_NODES} are allowed): give fewer nodes, or a larger depth or width"
            )
        self.max_shown = self.width * (self.max_depth - 1)
        self.is_chain, self.ranks = self.children == 1, 1 if self.rates_nodes else self.children

    def offered(self, depth: int) -> int:
        return self.children * (1 + self.width * (depth - 1))

    def grow(self, scorer: Scorer, drawing: Drawing, depth: int) -> Grown:
        logits_of = scorer.levels(drawing.batch, depth)
        return self.kept(*self.search(self.expand, logits_of, scorer.per_depth, drawing, depth), drawing)

    @abstractmethod
    def expand(self, scored: Scored, drawing: Drawing) -> tuple[Offers, Front | None]:
        """Return the children of a front's nodes and, but for the last level, those that are expanded next."""

    def search(
        self, expand: Callable[..., Any], logits_of: LevelScores, per_depth: bool, drawing: Drawing, depth: int
    ) -> tuple[list[Offers], list[Front]]:
        rows, rater = drawing.batch, drawing.rater
        uniform = drawing.uniforms(self.offered(depth)) if drawing.sampled else None
        zero = torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device)
        front = Front(rows.roots[:, None], torch.full_like(zero, self.certain, dtype=torch.float64), zero, zero - 1)
        fronts, levels = [front], list[Offers]()
        first = offered = 0  # nodes that were shown, and candidates, of the levels before
        for level in range(depth):
            topology, paths, parents = None, (None, None), front.tokens.shape[1]
            if drawing.by_path or (level and not per_depth):
                topology = Topology(torch.cat([each.above for each in fronts], 1), level, self.width if level else 0)
            logits = logits_of(front.tokens, topology, level)
            if drawing.by_path and topology is not None:
                above = topology.ancestors[:, -parents:].expand(len(rows), -1, -1)
                paths = torch.cat([each.tokens for each in fronts], dim=1), above
                logits = logits.expand(-1, parents, -1)
            scores, q, mine = drawing.scores(logits, *paths), None, None
            if uniform is not None:
                q = drawing.distribution(scores).expand(-1, parents, -1)
                children = min(self.children, scores.shape[2])
                mine = uniform[:, offered : offered + parents * children].view(len(rows), parents, children)
            offers, below = expand(Scored(front, scores, q, mine, level, first, offered, level + 1 == depth), drawing)
            if rater is not None and not self.rates_nodes:
                confidence = rater.confidence(front.tokens, scores, level).expand(-1, parents)
                offers = offers._replace(confidence=confidence)
            levels.append(offers)
            first, offered = first + parents, offered + offers.token.shape[1]
            if below is not None:
                front = below
                fronts.append(front)
        return levels, fronts

    def kept(self, levels: list[Offers], fronts: list[Front], drawing: Drawing) -> Grown:
        """Return the trees of the best candidates."""
        rows = drawing.batch
        # Where a row ends, other rows may go on: what is too deep for it must not take the place of what is not.
        room = rows.max_depth[:, None] > torch.arange(len(levels), device=rows.device)
        room = torch.cat([room[:, depth, None].expand_as(each.worth) for depth, each in enumerate(levels)], dim=1)
        token = torch.cat([offers.token for offers in levels], dim=1)
        worth = torch.cat([offers.worth for offers in levels], dim=1).where(room, self.impossible)
        worth.nan_to_num_(nan=self.impossible, neginf=self.impossible)
        children = levels[0].token.shape[1]
        candidates = torch.cat([front.numbers for front in fronts], dim=1)
        parent = candidates.repeat_interleave(children, dim=1)
        place = worth.sort(dim=-1, descending=True, stable=True).indices[:, : self.max_nodes]
        place = place if self.ordered else place.sort(dim=-1).values
        worth, count = worth.gather(1, place), place.shape[1]
        root = torch.zeros_like(place[:, :1])
        number = torch.cat([root, 1 + place], dim=1)
        index = torch.arange(max(1 + count, candidates.shape[1]), device=rows.device).expand(len(rows), -1)
        at = number.new_full((len(rows), 1 + token.shape[1]), count)
        above = at.scatter(1, number, index[:, : 1 + count]).gather(1, parent.gather(1, place))
        above = above.minimum(index[:, :count])  # impossible candidates, which fill up, may have lost their parents
        shown = at.fill_(-1).scatter_(1, candidates, index[:, : candidates.shape[1]])
        tokens = torch.cat([rows.roots[:, None], token.gather(1, place)], dim=1)
        nodes = shown.gather(1, number)
        tree = DraftTree.build(
            tokens,
            torch.cat([root - 1, above], dim=1),
            valid=torch.cat([root == 0, worth > self.impossible], dim=1),
            sampling=drawing.law_of(tokens, None if self.draws is None else (number - 1) % children < self.draws),
            draft_probs=_draft_probs(levels, nodes, drawing) if drawing.sampled else None,
            max_depth=min(len(levels), count),
            max_children=min(children, count),
        )
        if drawing.rater is None:
            return Grown(tree, nodes)
        if self.rates_nodes:
            logs = torch.nn.functional.pad(worth, (1, 0)) + self.depth_cost * tree.depth
            return Grown(tree, nodes, drawing.rater.paths(logs, tree))
        confidence = torch.cat([offers.confidence for offers in levels if offers.confidence is not None], dim=1)
        rated = confidence.gather(1, place // children), place % children
        sure, rank = (torch.nn.functional.pad(values, (1, 0)) for values in rated)
        return Grown(tree, nodes, drawing.rater.nodes(sure, tree.parents, tree.depth, rank))


class ExpansionTree(BeamTree):
    """Drafts the most probable paths, ``DETERMINISTIC``; EAGLE's ``total_tokens`` counts the root, too.

    DARTree (arXiv 2608.13524) lets a node offer more ``children`` than nodes are expanded, takes probabilities
    ``among`` so many tokens (chosen before a head corrects them; here after), and keeps nodes by score - ``depth_cost``
    · depth, in nats.
    """

    rates_nodes = True

    def __init__(
        self,
        nodes: int = 59,
        depth: int = 8,
        width: int = 10,
        *,
        children: int | None = None,
        among: int | None = None,
        depth_cost: float = 0.0,
    ):
        super().__init__(nodes, depth, width, children)
        self.among = None if among is None else whole("among", among, least=self.children)
        remedy = "give a number of nats from 0 (none), such as 0.2"
        self.depth_cost = number("depth_cost", depth_cost, remedy, lambda cost: 0 <= cost < float("inf"))

    def expand(self, scored: Scored, drawing: Drawing) -> tuple[Offers, Front | None]:
        scores, worth, column = scored.scores, scored.front.worth, None
        if self.among is not None:
            scores, column = scores.topk(min(self.among, scores.shape[2]), dim=-1)
        logs = scores.log_softmax(-1)
        log_probs, best = logs.topk(min(self.children, logs.shape[-1]), dim=-1)
        log_probs = log_probs.clamp_(max=-_LEAST)
        token, below = drawing.vocabulary.to_target(best if column is None else column.gather(-1, best)), None
        tokens, first, offered = token.expand(-1, worth.shape[1], -1).flatten(1), scored.first, scored.offered
        if usable(worth) and not scored.last:
            from specdec.kernels.trees import front

            score, best_worth, *others = front(worth, log_probs, token, self.width, first, offered)
            below = Front(others[0], best_worth, others[1], others[2])
        else:
            score = (worth[:, :, None] + log_probs).flatten(1)
            if not scored.last:
                best_worth, best = score.topk(min(self.width, score.shape[1]), dim=-1)
                above = (best // token.shape[2]).add_(first)
                below = Front(tokens.gather(1, best), best_worth, best + (1 + offered), above)
        return Offers(tokens, score - self.depth_cost * (1 + scored.depth) if self.depth_cost else score), below


class BeamSearchTree(ExpansionTree):
    """Drafts the ``width`` paths that a beam search ends with, ``DETERMINISTIC`` whatever the request's temperature."""

    def __init__(self, width: int = 10, depth: int = 4, *, among: int | None = 50):
        width, depth = whole("width", width, least=1), whole("depth", depth, least=1)
        super().__init__(width * depth, depth, width, among=among)

    def kept(self, levels: list[Offers], fronts: list[Front], drawing: Drawing) -> Grown:
        """Return the trees of the candidates that lie on a beam, which are found from the rows' last levels up."""
        depths = drawing.batch.max_depth[:, None].clamp(max=len(levels))
        above: Tensor = depths < 0
        for level in reversed(range(len(levels))):
            worth, first = levels[level].worth, 1 + sum(each.worth.shape[1] for each in levels[:level])
            ends = fronts[level + 1].numbers - first if level + 1 < len(fronts) else worth.topk(self.width).indices
            here = (above | (depths == level + 1)).expand_as(ends)
            on_beam = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, ends, here)
            levels[level] = levels[level]._replace(worth=worth.where(on_beam, -torch.inf))
            above = on_beam.unflatten(1, (fronts[level].tokens.shape[1], -1)).any(-1)
        return super().kept(levels, fronts, drawing)


def _draft_probs(levels: list[Offers], nodes: Int[Tensor, "batch node"], drawing: Drawing) -> Tensor:
    q = torch.cat([offers.q for offers in levels if offers.q is not None], dim=1)
    chosen = q.gather(1, nodes.clamp(min=0)[:, :, None].expand(-1, -1, q.shape[2]))
    chosen.masked_fill_((nodes < 0)[:, :, None], 0.0)
    vocabulary = drawing.vocabulary
    if vocabulary.ids is None and vocabulary.common == vocabulary.target:
        return chosen
    room = drawing.room(nodes.shape[1])
    vocabulary.put(room, slice(0, nodes.shape[1]), chosen)
    return room
