"""Trees that are drawn without replacement where a draft is most likely to come by: best first, and still exact.

DySpec (arXiv 2410.11744) takes the most promising *slot*, then draws its token; here level by level, for all rows at
once. A node is reached if the tokens above it are accepted and its earlier siblings are not. DySpec takes a token's
probability under q for its chance; but a rule that compares p with q accepts a token drawn from q = p for sure. So the
chance is the token's share of what was left, raised to a ``power``: 1 is DySpec's, smaller makes trees longer and
narrower.

Why it is exact. A node's *worth* is the product of these chances down its path, and of the chances that earlier
siblings are rejected; a slot's worth is what is known of it before its token is drawn. A slot is worth no more than its
parent, the slot before it, and no less than its node. Nodes are kept by their slots' worth, and expanded by their own:
so whether there is a slot depends on slots of greater worth alone, never on its token. To keep drawn nodes by their own
worth (``ExpansionTree``) would drop tokens because of what they are, and bias the output.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.arguments import number
from specdec.drafting.builders.base import BeamTree, Grown
from specdec.drafting.drawing import Drawing
from specdec.drafting.scorer import Scorer
from specdec.random import draw_with_total
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import DraftSampling

_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class _Level:
    """The candidates of one level: all children of its parents side by side, in the order in which they were drawn.

    ``slot`` is what they are kept by, ``node`` their own worth, ``parent`` the numbers of their parents; ``q`` is None
    if nothing is drawn, ``confidence`` if nobody asked for it.
    """

    q: Float[Tensor, "batch parent vocab"] | None
    token: Int[Tensor, "batch candidate"]
    slot: Float[Tensor, "batch candidate"]
    node: Float[Tensor, "batch candidate"]
    parent: Int[Tensor, "batch candidate"]
    rank: Int[Tensor, "batch candidate"]
    confidence: Float[Tensor, "batch candidate"] | None


class SampledTree(BeamTree):
    """Draws a tree without replacement for sampled requests, with its nodes where q is: best first.

    Greedy requests get the most probable paths, as with ``ExpansionTree``. The other arguments are those of
    ``BeamTree``.

    Args:
        power: How much a drawn token's own probability says of its acceptance: 1 for all of it, towards 0 for nothing.
    """

    ordered = True
    takes = DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.DETERMINISTIC

    def __init__(self, nodes: int = 32, depth: int = 6, width: int = 8, *, power: float = 0.1):
        super().__init__(nodes, depth, width)
        self.ranks = self.width
        self.power = number("power", power, "give a number above 0, such as 0.1")
        if not 0 < self.power < float("inf"):
            raise ValueError(f"power={power}: give a number above 0, such as 0.1")

    def grow(self, scorer: Scorer, drawing: Drawing, depth: int) -> Grown:
        rows, logits_of = drawing.batch, scorer.levels(drawing.batch, depth)
        zero = torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device)
        uniform = drawing.uniforms(self.offered(depth)) if drawing.fresh else None
        worth = torch.ones(len(rows), 1, dtype=torch.float64, device=rows.device)  # of the nodes that are expanded
        tokens, above, numbers = [rows.roots[:, None]], [zero - 1], [zero]  # of these, as the scorer was shown them
        levels: list[_Level] = []
        offered = 0  # candidates so far; candidate i is number i + 1, and the root is number 0
        for depth_above in range(depth):
            topology = Topology(torch.cat(above, dim=1), depth_above, self.width if depth_above else 0)
            logits = logits_of(tokens[-1], topology, depth_above)
            mine = None if uniform is None else uniform[:, offered:]
            level = self._level(logits, drawing, tokens, topology, worth, numbers[-1], mine)
            levels.append(level)
            if depth_above + 1 < depth:
                children = level.token.shape[1] // worth.shape[1]
                worth, best = level.node.sort(dim=-1, descending=True, stable=True)
                worth, best = worth[:, : self.width], best[:, : self.width]
                first = topology.width - tokens[-1].shape[1]
                tokens.append(level.token.gather(1, best))
                above.append(first + best // children)
                numbers.append(1 + offered + best)
            offered += level.token.shape[1]
        return self._best(levels, torch.cat(numbers, dim=1), drawing)

    def _level(
        self,
        logits: Float[Tensor, "batch some column"],
        drawing: Drawing,
        shown: list[Tensor],
        topology: Topology,
        worth: Float[Tensor, "batch parent"],
        numbers: Int[Tensor, "batch parent"],
        uniform: Float[Tensor, "batch draw"] | None,
    ) -> _Level:
        parents, ancestors = worth.shape[1], None
        if drawing.by_path:
            ancestors = topology.ancestors[:, -parents:].expand(len(worth), -1, -1)
            logits = logits.expand(-1, parents, -1)
        scores = drawing.scores(logits, torch.cat(shown, dim=1), ancestors)
        children = min(self.width, scores.shape[-1])
        q = None
        found: list[Tensor] = []  # tokens, slots' worth, nodes' worth
        if not drawing.sampled or drawing.greedy is not None:
            chances = scores.softmax(-1).nan_to_num(nan=0.0)
            own, token = (each.expand(-1, parents, -1) for each in chances.topk(children, dim=-1))
            node = worth[:, :, None] * own.double()
            found = [token, node, node]
        if drawing.sampled:
            assert uniform is not None
            q = drawing.distribution(scores).expand(-1, parents, -1)
            token, own = _drawn(q, uniform[:, : parents * children].view(-1, parents, children))
            drawn = [token, *self._worths(worth, own.nan_to_num(nan=0.0))]
            if drawing.greedy is not None:
                greedy = drawing.greedy[:, :, None]
                drawn = [torch.where(greedy, best, each) for best, each in zip(found, drawn, strict=True)]
            found = drawn
        token, slot, node = found
        # Where a row ends, other rows may go on: what is too deep for it must not take the place of what is not.
        room = (drawing.batch.max_depth > topology.max_depth)[:, None]
        confidence = None
        if drawing.rater is not None:
            confidence = drawing.rater.confidence(shown[-1], scores, topology.max_depth).expand(-1, parents)
            confidence = confidence.repeat_interleave(children, dim=1)
        return _Level(
            q,
            drawing.vocabulary.to_target(token).flatten(1),
            self.kept_by(slot, node).flatten(1).where(room, 0.0),
            node.flatten(1),
            numbers.repeat_interleave(children, dim=1),
            torch.arange(children, device=worth.device).repeat(parents).expand(len(worth), -1),
            confidence,
        )

    def _worths(
        self, worth: Float[Tensor, "batch parent"], own: Float[Tensor, "batch parent child"]
    ) -> tuple[Float[Tensor, "batch parent child"], Float[Tensor, "batch parent child"]]:
        """Return what the slots below some nodes are worth, and what the tokens drawn for them are."""
        left = 1 - own.cumsum(-1) + own  # the mass that the earlier siblings have left
        share = (own / left.clamp(min=_TINY)).clamp_(0, 1).pow_(self.power)
        before = torch.nn.functional.pad((1 - share).cumprod(-1)[..., :-1], (1, 0), value=1.0)
        slot = worth[:, :, None] * before
        return slot.where(own > 0, 0.0), slot * share

    def kept_by(
        self, slot: Float[Tensor, "batch parent child"], node: Float[Tensor, "batch parent child"]
    ) -> Float[Tensor, "batch parent child"]:
        """Return by what nodes are kept, the most first: the worth of their slots. Any other would bias the output."""
        return slot

    def _best(self, levels: list[_Level], shown: Int[Tensor, "batch shown"], drawing: Drawing) -> Grown:
        def every(name: str) -> Tensor:
            return torch.cat([getattr(level, name) for level in levels], dim=1)

        rows, slot = drawing.batch, every("slot")
        count = min(self.max_nodes, slot.shape[1])
        worth, order = slot.sort(dim=-1, descending=True, stable=True)
        worth, kept = worth[:, :count], order[:, :count]
        root = torch.zeros_like(kept[:, :1])
        place = torch.cat([root, 1 + order], dim=1)
        index = torch.arange(place.shape[1], device=place.device).expand_as(place)
        position = torch.empty_like(place).scatter_(1, place, index)
        above = position.gather(1, every("parent").gather(1, kept))
        above = above.minimum(index[:, :count])  # slots that are worth nothing, which fill up, may have lost theirs
        parents = torch.cat([root - 1, above], dim=1)
        numbers = torch.full_like(place, -1).scatter_(1, shown, index[:, : shown.shape[1]])
        nodes = numbers.gather(1, place[:, : count + 1])
        tokens = torch.cat([rows.roots[:, None], every("token").gather(1, kept)], dim=1)
        tree = DraftTree.build(
            tokens,
            parents,
            valid=torch.cat([root == 0, worth > 0], dim=1),
            sampling=drawing.law_of(tokens),
            draft_probs=_laws(every("q"), nodes, drawing) if drawing.sampled else None,
            max_depth=min(len(levels), count),
            max_children=min(self.width, count, drawing.vocabulary.common),
        )
        if drawing.rater is None:
            return Grown(tree, nodes)
        sure, rank = (torch.nn.functional.pad(every(n).gather(1, kept), (1, 0)) for n in ("confidence", "rank"))
        return Grown(tree, nodes, drawing.rater.nodes(sure, parents, tree.depth, rank))


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


def _laws(
    q: Float[Tensor, "batch shown column"], nodes: Int[Tensor, "batch node"], drawing: Drawing
) -> Float[Tensor, "batch node vocab"]:
    """Return q for the children of every node; zero for nodes that were not expanded."""
    chosen = q.gather(1, nodes.clamp(min=0)[:, :, None].expand(-1, -1, q.shape[2]))
    chosen.masked_fill_((nodes < 0)[:, :, None], 0.0)
    vocabulary = drawing.vocabulary
    if vocabulary.ids is None and vocabulary.common == vocabulary.target:
        return chosen
    room = drawing.room(nodes.shape[1])
    vocabulary.put(room, slice(0, nodes.shape[1]), chosen)
    return room
