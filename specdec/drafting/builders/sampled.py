"""Trees that are drawn without replacement where a draft is most likely to come by: best first, and still exact.

DySpec (arXiv 2410.11744) takes the most promising *slot*, then draws its token; here level by level, for all rows at
once. A node is reached if the tokens above it are accepted and its earlier siblings are not. A token's chance is its
share of what was left, raised to a ``power``: 1 is DySpec's, smaller makes trees longer and narrower, as a rule that
compares p with q accepts a token drawn from q = p for sure.

Why it is exact. A node's *worth* is the product of these chances down its path, and of the chances that earlier
siblings are rejected; a slot's worth is what is known of it before its token is drawn. Nodes are kept by their slots'
worth, and expanded by their own: so whether there is a slot depends on slots of greater worth alone, never on its
token. To keep drawn nodes by their own worth would drop tokens because of what they are, and bias the output.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.arguments import number
from specdec.drafting.builders.base import Grown
from specdec.drafting.builders.expansion import BeamTree, Front, Offers, Paths
from specdec.drafting.drawing import Drawing
from specdec.random import draw_with_total
from specdec.types import DraftSampling

_TINY = 1e-30


class SampledTree(BeamTree):
    """Draws a tree without replacement for sampled requests; greedy ones get the most probable paths."""

    ordered = True
    takes = DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.DETERMINISTIC
    certain, impossible = 1.0, 0.0

    def __init__(self, nodes: int = 32, depth: int = 6, width: int = 8, *, power: float = 0.1):
        super().__init__(nodes, depth, width)
        self.ranks = self.width
        remedy = "give a number above 0, such as 0.1"
        self.power = number("power", power, remedy, lambda value: 0 < value < float("inf"))

    def by_path(self, drawing: Drawing) -> bool:
        return drawing.by_path

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
        parents, (depth, first, offered) = front.tokens.shape[1], at
        scores = drawing.scores(logits, *paths)
        children = min(self.width, scores.shape[-1])
        q = confidence = None
        drawn: list[Tensor] = []  # tokens, slots' worth, nodes' worth
        if not drawing.sampled or drawing.greedy is not None:
            chances = scores.softmax(-1).nan_to_num(nan=0.0)
            chance, token = (each.expand(-1, parents, -1) for each in chances.topk(children, dim=-1))
            node = front.worth[:, :, None] * chance.double()
            drawn = [token, node, node]
        if drawing.sampled:
            assert uniform is not None
            q = drawing.distribution(scores).expand(-1, parents, -1)
            token, chance = _drawn(q, uniform[:, : parents * children].view(-1, parents, children))
            probable, drawn = drawn, [token, *self._worths(front.worth, chance.nan_to_num(nan=0.0))]
            if drawing.greedy is not None:
                greedy = drawing.greedy[:, :, None]
                drawn = [torch.where(greedy, best, other) for best, other in zip(probable, drawn, strict=True)]
        token, slot, node = drawn
        token, node = drawing.vocabulary.to_target(token).flatten(1), node.flatten(1)
        if drawing.rater is not None:
            confidence = drawing.rater.confidence(front.tokens, scores, depth).expand(-1, parents)
        offers = Offers(token, self.kept_by(slot, node.view_as(slot)).flatten(1), q, confidence)
        if last:
            return offers, None
        worth, best = (each[:, : self.width] for each in node.sort(dim=-1, descending=True, stable=True))
        return offers, Front(token.gather(1, best), worth, 1 + offered + best, first + best // children)

    def _worths(
        self, worth: Float[Tensor, "batch parent"], own: Float[Tensor, "batch parent child"]
    ) -> tuple[Float[Tensor, "batch parent child"], Float[Tensor, "batch parent child"]]:
        left = 1 - own.cumsum(-1) + own  # the mass that the earlier siblings have left
        share = (own / left.clamp(min=_TINY)).clamp_(0, 1).pow_(self.power)
        before = torch.nn.functional.pad((1 - share).cumprod(-1)[..., :-1], (1, 0), value=1.0)
        slot = worth[:, :, None] * before
        return slot.where(own > 0, 0.0), slot * share

    def kept_by(self, slot: Float[Tensor, "batch parent child"], node: Float[Tensor, "batch parent child"]) -> Tensor:
        """Return by what nodes are kept, the most first: the worth of their slots. Any other would bias the output."""
        return slot

    def order(self, worth: Float[Tensor, "batch candidate"]) -> Int[Tensor, "batch drafted"]:
        return worth.sort(dim=-1, descending=True, stable=True).indices[:, : self.max_nodes]

    def kept(self, levels: list[Offers], fronts: list[Front], drawing: Drawing) -> Grown:
        tree, nodes, place, _ = self.best(levels, fronts, drawing)
        if drawing.rater is None:
            return Grown(tree, nodes)
        children = levels[0].token.shape[1]
        confidence = torch.cat([offers.confidence for offers in levels if offers.confidence is not None], dim=1)
        rated = confidence.gather(1, place // children), place % children
        sure, rank = (torch.nn.functional.pad(values, (1, 0)) for values in rated)
        return Grown(tree, nodes, drawing.rater.nodes(sure, tree.parents, tree.depth, rank))

    def draft_probs(self, levels: list[Offers], nodes: Int[Tensor, "batch node"], drawing: Drawing) -> Tensor | None:
        if not drawing.sampled:
            return None
        q = torch.cat([offers.q for offers in levels if offers.q is not None], dim=1)
        chosen = q.gather(1, nodes.clamp(min=0)[:, :, None].expand(-1, -1, q.shape[2]))
        chosen.masked_fill_((nodes < 0)[:, :, None], 0.0)
        vocabulary = drawing.vocabulary
        if vocabulary.ids is None and vocabulary.common == vocabulary.target:
            return chosen
        room = drawing.room(nodes.shape[1])
        vocabulary.put(room, slice(0, nodes.shape[1]), chosen)
        return room


def _drawn(
    q: Float[Tensor, "batch parent column"], uniform: Float[Tensor, "batch parent child"]
) -> tuple[Int[Tensor, "batch parent child"], Float[Tensor, "batch parent child"]]:
    """Return children of every parent, drawn without replacement, and q of each; 0 where q has run out of tokens."""
    left, tokens, chances = q.clone(), [], []
    for rank in range(uniform.shape[2]):
        token, total = draw_with_total(left, uniform[:, :, rank])
        token = token[..., None]
        chance = left.gather(2, token).double()
        tokens.append(token)
        chances.append(chance.where(total[..., None] > 0, 0.0))
        left.scatter_(2, token, 0.0)
    return torch.cat(tokens, dim=2), torch.cat(chances, dim=2)
