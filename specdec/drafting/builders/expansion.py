"""Trees that grow by their best nodes: a loop over levels, and rules for what is expanded and what is kept.

``ExpansionTree`` keeps the most probable paths (EAGLE-2, Li et al. 2024, arXiv 2406.16858, section 4). A path's score
is the product of its probabilities at temperature 1. With ``width`` no less than ``nodes``, and logits that depend on
the depth alone, these are exactly the best paths (DDTree, arXiv 2604.12989). ``BeamSearchTree`` keeps the beams that a
search ends with, their common beginnings as one node each (ReDrafter, arXiv 2403.09919, section 3.2).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.arguments import whole
from specdec.drafting.builders.base import Grown, TreeBuilder
from specdec.drafting.calibration import Rated
from specdec.drafting.drawing import Drawing
from specdec.drafting.scorer import Scorer
from specdec.kernels import usable
from specdec.shape import MOST_NODES
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import DraftSampling

_LEAST = 1e-9  # A token's cost in nats is at least this, so that no child scores as high as its parent.

Paths = tuple[Int[Tensor, "batch shown"] | None, Bool[Tensor, "batch front shown"] | None]
"""The tokens that were shown so far and which of them stand above each node of a front; None where nobody needs it."""


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


class Offers(NamedTuple):
    """The children of a front, parent by parent in the order in which they were drawn: candidates of the tree.

    ``worth`` is what they are kept by, ``q`` what a parent's children were drawn from, and ``confidence`` the one in a
    parent's children.
    """

    token: Int[Tensor, "batch candidate"]
    worth: Float[Tensor, "batch candidate"]
    q: Float[Tensor, "batch front vocab"] | None = None
    confidence: Float[Tensor, "batch front"] | None = None


class BeamTree(TreeBuilder):
    """Expands the best nodes of every level, and keeps the best of all nodes that these offer.

    At every level ``width`` nodes are expanded, each of which offers as many children. A subclass says which laws
    sampled requests' nodes may have (``takes``), what the root is worth and a node that must not be drafted, and
    whether probabilities are those ``among`` so many most probable tokens alone.
    """

    reorders_nodes = True
    takes: tuple[DraftSampling, ...] = (DraftSampling.DETERMINISTIC,)
    certain, impossible = 0.0, -torch.inf
    among: int | None = None

    def __init__(self, nodes: int, depth: int, width: int):
        self.max_nodes = whole("nodes", nodes, least=1)
        self.max_depth = whole("depth", depth, least=1)
        self.width = whole("width", width, least=1)
        offered = self.offered(self.max_depth)
        if nodes > min(offered, MOST_NODES):
            raise ValueError(
                f"a tree of nodes={nodes}, and {self.max_depth} levels of width={self.width} offer {offered} (at most "
                f"{MOST_NODES} are allowed): give fewer nodes, or a larger depth or width"
            )
        self.max_shown = self.width * (self.max_depth - 1)
        self.is_chain = self.width == 1

    def laws(self, sampling: DraftSampling) -> frozenset[DraftSampling]:
        if sampling not in self.takes:
            raise ValueError(
                f"{type(self).__name__} cannot be drawn with sampling={sampling.name.lower()}: to choose "
                f"among drawn nodes would bias the output; use sampling={self.takes[0].name.lower()}, or a static shape"
            )
        return frozenset([sampling])

    def offered(self, depth: int) -> int:
        return self.width + (depth - 1) * self.width**2

    def grow(self, scorer: Scorer, drawing: Drawing, depth: int) -> Grown:
        rows, logits_of = drawing.batch, scorer.levels(drawing.batch, depth)
        uniform = drawing.uniforms(self.offered(depth)) if drawing.fresh else None
        zero = torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device)
        front = Front(rows.roots[:, None], torch.full_like(zero, self.certain, dtype=torch.float64), zero, zero - 1)
        fronts, levels, by_path = [front], list[Offers](), self.by_path(drawing)
        first = offered = 0  # nodes that were shown, and candidates, of the levels before
        for depth_above in range(depth):
            topology, paths, parents = None, (None, None), front.tokens.shape[1]
            if by_path or (depth_above and not scorer.per_depth):
                shown = torch.cat([each.above for each in fronts], dim=1)
                topology = Topology(shown, depth_above, self.width if depth_above else 0)
            logits = logits_of(front.tokens, topology, depth_above)
            if by_path and topology is not None:
                above = topology.ancestors[:, -parents:].expand(len(rows), -1, -1)
                paths = torch.cat([each.tokens for each in fronts], dim=1), above
                logits = logits.expand(-1, parents, -1)
            mine = None if uniform is None else uniform[:, offered:]
            last = depth_above + 1 == depth
            offers, below = self.expand(logits, drawing, front, paths, mine, (depth_above, first, offered), last=last)
            levels.append(offers)
            if below is not None:
                front = below
                fronts.append(front)
            first, offered = first + parents, offered + offers.token.shape[1]
        return self.kept(levels, fronts, drawing)

    def by_path(self, drawing: Drawing) -> bool:
        return drawing.batch.masks_drafts

    def expand(
        self,
        logits: Float[Tensor, "batch scored column"],
        drawing: Drawing,
        front: Front,
        paths: Paths,
        uniform: Float[Tensor, "batch draw"] | None,
        at: tuple[int, int, int],
        *,
        last: bool,
    ) -> tuple[Offers, Front | None]:
        """Return the children of a front's nodes and, but for the last level, those that are expanded next.

        ``at`` is the front's depth, the number under which its first node was shown, and the candidates before these.
        """
        logits = drawing.vocabulary.present(logits, -torch.inf)
        if paths[1] is not None:
            logits = drawing.masked(logits.float(), *paths)
        columns = logits.shape[-1]
        if self.among is None:
            log_probs, column = logits.log_softmax(-1, dtype=torch.float32).topk(min(self.width, columns), dim=-1)
        else:
            best, column = logits.topk(min(self.among, columns), dim=-1)
            log_probs, column = best.log_softmax(-1, dtype=torch.float32)[..., : self.width], column[..., : self.width]
        log_probs, token = log_probs.clamp_(max=-_LEAST), drawing.vocabulary.to_target(column)
        if last and self.reorders_nodes:
            score, below = (front.worth[:, :, None] + log_probs).flatten(1), None
        else:
            score, worth, *rest = _front(front.worth, log_probs, token, self.width, *at[1:])
            below = Front(rest[0], worth, rest[1], rest[2])
        return Offers(token.expand(-1, front.tokens.shape[1], -1).flatten(1), score), below

    def kept(self, levels: list[Offers], fronts: list[Front], drawing: Drawing) -> Grown:
        tree, nodes, _, worth = self.best(levels, fronts, drawing)
        return Grown(tree, nodes, _rated(torch.nn.functional.pad(worth, (1, 0)), tree, drawing))

    def best(
        self, levels: list[Offers], fronts: list[Front], drawing: Drawing
    ) -> tuple[DraftTree, Int[Tensor, "batch node"], Int[Tensor, "batch drafted"], Float[Tensor, "batch drafted"]]:
        """Return the trees of the best candidates, and the numbers under which the scorer was shown the nodes.

        With them come the places among the candidates and the worth of the drafted ones.
        """
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
        place = self.order(worth)
        worth, count = worth.gather(1, place), place.shape[1]
        root = torch.zeros_like(place[:, :1])
        number = torch.cat([root, 1 + place], dim=1)
        index = torch.arange(max(1 + count, candidates.shape[1]), device=rows.device).expand(len(rows), -1)
        at = number.new_full((len(rows), 1 + token.shape[1]), count)
        above = at.scatter(1, number, index[:, : 1 + count]).gather(1, parent.gather(1, place))
        # Impossible candidates, which only fill up, may have lost their parents.
        above = above.minimum(index[:, :count])
        shown = at.fill_(-1).scatter_(1, candidates, index[:, : candidates.shape[1]])
        tokens = torch.cat([rows.roots[:, None], token.gather(1, place)], dim=1)
        nodes = shown.gather(1, number)
        tree = DraftTree.build(
            tokens,
            torch.cat([root - 1, above], dim=1),
            valid=torch.cat([root == 0, worth > self.impossible], dim=1),
            sampling=drawing.law_of(tokens),
            draft_probs=self.draft_probs(levels, nodes, drawing),
            max_depth=min(len(levels), count),
            max_children=min(children, count),
        )
        return tree, nodes, place, worth

    def order(self, worth: Float[Tensor, "batch candidate"]) -> Int[Tensor, "batch drafted"]:
        return worth.topk(min(self.max_nodes, worth.shape[1]), dim=-1).indices.sort(dim=-1).values

    def draft_probs(self, levels: list[Offers], nodes: Int[Tensor, "batch node"], drawing: Drawing) -> Tensor | None:
        return None


class ExpansionTree(BeamTree):
    """Drafts the most probable paths, ``DETERMINISTIC``; EAGLE's ``total_tokens`` counts the root, too."""

    rates_nodes = True

    def __init__(self, nodes: int = 59, depth: int = 8, width: int = 10):
        super().__init__(nodes, depth, width)


class BeamSearchTree(BeamTree):
    """Drafts the ``width`` paths that a beam search ends with, ``DETERMINISTIC`` whatever the request's temperature."""

    reorders_nodes, rates_nodes = False, True

    def __init__(self, width: int = 10, depth: int = 4, *, among: int | None = 50):
        width, depth = whole("width", width, least=1), whole("depth", depth, least=1)
        super().__init__(width * depth, depth, width)
        self.among = None if among is None else whole("among", among, least=width)

    def by_path(self, drawing: Drawing) -> bool:
        return False

    def kept(self, levels: list[Offers], fronts: list[Front], drawing: Drawing) -> Grown:
        depth, depths = len(levels), drawing.batch.max_depth.clamp(max=len(levels))
        columns = [(front.tokens, front.above, front.worth) for front in fronts]
        tokens, parents, worth = (torch.cat(column, dim=1) for column in zip(*columns, strict=True))
        # Which nodes lie on a beam, from the rows' last levels up.
        first, valid, below = tokens.shape[1], list[Tensor](), torch.zeros_like(fronts[-1].tokens, dtype=torch.bool)
        first -= below.shape[1]
        for level in range(depth, 0, -1):
            front, before = fronts[level], fronts[level - 1]
            here = (front.worth > -torch.inf) & ((depths == level)[:, None] | below)
            valid.append(here)
            first -= before.tokens.shape[1]
            below = torch.zeros_like(before.tokens).scatter_add_(1, front.above - first, here.long()) > 0
        on_beam = torch.cat([torch.ones_like(below), *reversed(valid)], dim=1)
        tree = DraftTree.build(tokens, parents, valid=on_beam, max_depth=depth, max_children=self.width)
        return Grown(tree, rated=_rated(worth, tree, drawing))


def _rated(worth: Float[Tensor, "batch node"], tree: DraftTree, drawing: Drawing) -> Rated | None:
    return None if drawing.rater is None else drawing.rater.paths(worth, tree)


def _front(
    worth: Float[Tensor, "batch some"],
    log_probs: Float[Tensor, "batch scored child"],
    token: Int[Tensor, "batch scored child"],
    width: int,
    first: int,
    offered: int,
) -> tuple[
    Float[Tensor, "batch offer"], Float[Tensor, "batch front"],
    Int[Tensor, "batch front"], Int[Tensor, "batch front"], Int[Tensor, "batch front"],
]:  # fmt: skip
    """Return the children's scores, and of the best of them scores, tokens, numbers and the parents as shown."""
    if worth.shape[1] == 1 and token.shape[2] <= width:  # the root's children are all among the best, and in order
        score, token = worth + log_probs[:, 0], token[:, 0]
        numbers = torch.arange(1 + offered, 1 + offered + token.shape[1], device=worth.device).expand_as(token)
        return score, score, token, numbers, torch.zeros_like(token) + first
    if usable(worth):
        from specdec.kernels.trees import front

        return front(worth, log_probs, token, width, first, offered)
    score = (worth[:, :, None] + log_probs).flatten(1)
    front_scores, best = score.topk(min(width, score.shape[1]), dim=-1)
    tokens = token.expand(-1, worth.shape[1], -1).flatten(1).gather(1, best)
    return score, front_scores, tokens, best + (1 + offered), (best // token.shape[2]).add_(first)
