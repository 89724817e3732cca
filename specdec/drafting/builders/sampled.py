"""Trees that are drawn where a draft is most likely to come by: best first, and still exact.

A node's *worth* is how likely it is to be accepted, as is estimated, and a slot's what is known of it before its token
is drawn: no less than that of any token, nor of any slot behind it. Nodes are kept by their slots' worth, and expanded
by their own: so whether there is a slot depends on slots of greater worth alone, never on its token. To keep drawn
nodes by their own worth would drop tokens because of what they are, and bias the output.
"""

from abc import abstractmethod
from functools import lru_cache
from math import isqrt
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.arguments import number
from specdec.drafting.builders.expansion import BeamTree, Front, Offers, Scored
from specdec.drafting.costs import RoundCosts
from specdec.drafting.drawing import Drawing
from specdec.types import DraftSampling

Children = Float[Tensor, "batch parent child"]


class DrawnTree(BeamTree):
    """Draws the children of the best nodes for sampled requests; greedy ones get the most probable paths."""

    ordered = True
    takes = DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.DETERMINISTIC
    certain, impossible = 1.0, 0.0

    def expand(self, scored: Scored, drawing: Drawing) -> tuple[Offers, Front | None]:
        above, q, found = scored.front.worth, scored.q, list[Tensor]()
        children = min(self.width, scored.scores.shape[2])
        if not drawing.sampled or drawing.greedy is not None:
            chance, token = scored.scores.softmax(-1).topk(children, dim=-1)
            node = above[:, :, None] * self.chance(chance.double())
            found = [token.expand_as(node), node, node]
        if q is not None and scored.uniform is not None:
            q, *drawn = self.drawn(above, scored.scores, q, scored.uniform)
            if drawing.greedy is not None:
                greedy = drawing.greedy[:, :, None]
                drawn = [torch.where(greedy, best, other) for best, other in zip(found, drawn, strict=True)]
            found = drawn
        token, slot, node = found
        token, node = drawing.vocabulary.to_target(token).flatten(1), node.flatten(1).nan_to_num(nan=0.0)
        offers = Offers(token, slot.where(slot >= self.price(len(slot)), 0.0).flatten(1), q)
        if scored.last:
            return offers, None
        best = node.sort(dim=-1, descending=True, stable=True).indices[:, : self.width].sort(dim=-1).values
        numbers, shown = 1 + scored.offered + best, scored.first + best // children
        return offers, Front(token.gather(1, best), node.gather(1, best), numbers, shown)

    @abstractmethod
    def drawn(
        self, above: Float[Tensor, "batch parent"], scores: Float[Tensor, "batch scored column"],
        q: Float[Tensor, "batch parent column"], uniform: Children,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the law, the tokens, the slots' worth (0 without a token) and the worth of all parents' children."""

    def chance(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return how likely tokens of these probabilities are to be accepted."""
        return q

    def price(self, rows: int) -> float:
        """Return the least worth of a slot that is drafted, where so many requests run."""
        return 0.0


class SampledTree(DrawnTree):
    """Draws a tree without replacement, as DySpec does (arXiv 2410.11744).

    A node is reached if those above it are accepted and its earlier siblings are not. A token's chance is its share of
    what was left, raised to a ``power``: 1 is DySpec's; smaller trusts drawn tokens, for longer and narrower trees.
    """

    def __init__(self, nodes: int = 32, depth: int = 6, width: int = 8, *, power: float = 0.1):
        super().__init__(nodes, depth, width)
        self.power = number("power", power, "give a number above 0, such as 0.1", lambda power: 0 < power < 1e9)

    def drawn(self, above: Tensor, scores: Tensor, q: Tensor, uniform: Children) -> tuple[Tensor, ...]:
        token, own = without_replacement(q, uniform)
        share = (own / (1 - own.cumsum(-1) + own).clamp(min=1e-30)).clamp_(0, 1).pow_(self.power)  # of what is left
        before = torch.nn.functional.pad((1 - share).cumprod(-1)[..., :-1], (1, 0), value=1.0)
        slot = above[:, :, None] * before
        return q, token, slot.where(own > 0, 0.0), slot * share


class PricedTree(DrawnTree):
    """Draws a tree without replacement by calibrated chances, and no node that is worth less than a price: TreeSpark.

    A token of probability q (at temperature 1) is accepted with the chance σ(a logit q + b), fitted on nodes whose
    ancestors were accepted; a slot is worth its parent times the chance of the likeliest token that is left (arXiv
    2609.22098; a and b for Qwen3-4B). The published heap pops one slot at a time. As worth only falls behind a slot,
    the best slots of all are the same tree, but for what ``width`` leaves out. Greedy requests pay the price, too.

    Args:
        theta: The price: the least worth of a slot whose token is drafted.
        costs: Rounds' seconds by nodes, or a file of them. A node's price is then what plain decoding would emit in the
            time that a node takes on average, with as many requests as run.
    """

    ends = True

    def __init__(
        self, nodes: int = 64, depth: int = 8, width: int = 8, *, a: float = 0.6684, b: float = -0.4587,
        theta: float = 0.02, costs: RoundCosts | str | Path | None = None,
    ):  # fmt: skip
        super().__init__(nodes, depth, width)
        self.a = number("a", a, "give the positive factor of a fit, such as 0.6684", lambda a: 0 < a < float("inf"))
        self.b = number("b", b, "give the constant of a fit, such as -0.4587", lambda b: abs(b) < float("inf"))
        self.theta = number("theta", theta, "give a price between 0 and 1, such as 0.02", lambda theta: 0 < theta < 1)
        self.costs = RoundCosts.load(costs, by_nodes=True) if isinstance(costs, str | Path) else costs
        self.price(1)  # refuses costs of smaller trees

    def drawn(self, above: Tensor, scores: Tensor, q: Tensor, uniform: Children) -> tuple[Tensor, ...]:
        token, own = without_replacement(q, uniform)
        known = scores.softmax(-1)
        best, column = known.topk(token.shape[2], dim=-1)
        taken = token[..., :, None] == column[..., None, :]  # by the sibling of this rank
        left = best[..., None, :].masked_fill(taken.cumsum(-2) > taken, 0.0).amax(-1)
        slot, node = (self.chance(each.double()) for each in (left, known.expand_as(q).gather(2, token)))
        return q, token, above[:, :, None] * slot.where(own > 0, 0.0), above[:, :, None] * node

    def chance(self, q: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return torch.sigmoid(self.a * torch.logit(q) + self.b)

    def price(self, rows: int) -> float:
        return self.theta if self.costs is None else _price(self.costs, rows, self.max_nodes)


@lru_cache(maxsize=1024)  # rounds ask at every level
def _price(costs: RoundCosts, rows: int, nodes: int) -> float:
    seconds = costs.by_nodes(rows, nodes)
    return float(seconds[-1] / seconds[0] - 1) / nodes


def without_replacement(q: Float[Tensor, "batch parent column"], uniform: Children) -> tuple[Tensor, Children]:
    """Return children of every parent, drawn without replacement, and q of each; 0 where q has run out of tokens."""
    # Masses are summed by blocks once: a draw then reads the blocks' masses and one block.
    columns, size = q.shape[2], isqrt(q.shape[2]) + 1
    blocks, tokens, chances = torch.nn.functional.pad(q, (0, -columns % size)).unflatten(2, (-1, size)), [], []
    masses, left = blocks.sum(-1, dtype=torch.float64), blocks.flatten(2)
    for rank in range(uniform.shape[2]):
        token, total = draw_in_blocks(blocks, masses, uniform[:, :, rank, None])
        tokens.append(token.clamp(max=columns - 1))
        chances.append(left.gather(2, token).double().where(total > 0, 0.0))
        left.scatter_(2, token, 0.0)
        block = token // size
        masses.scatter_(2, block, _within(blocks, block).sum(-1, keepdim=True, dtype=torch.float64))
    return torch.cat(tokens, dim=2), torch.cat(chances, dim=2)


def draw_in_blocks(blocks: Tensor, masses: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``random.draw_with_total`` of flattened blocks of these masses, [batch parent 1]."""
    ends = masses.cumsum(-1)
    place = uniform * ends[..., -1:]
    block = torch.searchsorted(ends, place, right=True).clamp_(max=ends.shape[2] - 1)
    place = place - ends.gather(2, block) + masses.gather(2, block)
    inside = _within(blocks, block).cumsum(-1, dtype=torch.float64)
    column = torch.searchsorted(inside, place, right=True).clamp_(max=inside.shape[2] - 1)
    return torch.add(column, block, alpha=inside.shape[2]), ends[..., -1:]


def _within(blocks: Tensor, block: Tensor) -> Tensor:
    return blocks.gather(2, block[..., None].expand(-1, -1, -1, blocks.shape[3]))[:, :, 0]
