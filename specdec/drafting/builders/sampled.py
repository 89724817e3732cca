"""Trees that are drawn without replacement where a draft is most likely to come by: best first, and still exact.

DySpec (arXiv 2410.11744) takes the most promising *slot*, then draws its token. Here this is done level by level, for
all rows at once.

What is promising. A node is reached if the tokens above it are accepted and its earlier siblings are not. DySpec takes
a drawn token's own probability under q for the chance that it is accepted. That is right where the target is greedy.
But a rule that compares p with q accepts a token that was drawn from q = p for sure, however unlikely it was. So the
chance is taken to be the token's probability among those that were left, raised to a ``power``: 1 is DySpec's, and the
smaller it is, the more drawn tokens are trusted, and the longer and narrower trees become.

Why it is exact. Let a node's *worth* be the product of these chances down its path, and of the chances that the
earlier siblings of each are not accepted. Let a slot's worth be what is known of it before its token is drawn: its
parent's worth times the chances that its earlier siblings are not accepted. Then a node is worth no more than its
slot, a slot no more than the one before it and no more than its parent. The nodes to be kept are the first ones by
their slots' worth, the nodes to be expanded the first ones of a level by their own. So whether there is a slot depends
on slots of greater worth alone, and the token in it is no part of what decides: the slots below it, those beside it
and those of nodes that its token might keep from being expanded are all worth no more than it is. To keep nodes by
their own worth, as is right for trees that are not drawn at random (``ExpansionTree``), would drop tokens because of
what they are, and bias the output.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.arguments import number
from specdec.drafting.builders.base import Grown
from specdec.drafting.builders.beam import BeamTree
from specdec.drafting.drawing import Drawing
from specdec.drafting.scorer import Scorer
from specdec.random import draw_with_total
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import DraftSampling

_TINY = 1e-30


class SampledTree(BeamTree):
    """Draws a tree without replacement for sampled requests, with its nodes where q is: best first.

    Greedy requests get the most probable paths, as with ``ExpansionTree``.

    Args:
        nodes: Drafted nodes of a tree.
        depth: The deepest node.
        width: How many nodes are expanded at every level, and how many children each of them offers.
        power: How much a drawn token's own probability says of whether it is accepted: 1 for all of it, towards 0 for
            nothing.

    Raises:
        ValueError: A number is out of its range, or the levels do not offer ``nodes`` nodes.
    """

    ordered = True

    def __init__(self, nodes: int = 32, depth: int = 6, width: int = 8, *, power: float = 0.1):
        super().__init__(nodes, depth, width)
        self.ranks = self.width
        self.power = number("power", power, "give a number above 0, such as 0.1")
        if not 0 < self.power < float("inf"):
            raise ValueError(f"power={power}: give a number above 0, such as 0.1")

    def laws(self, sampling: DraftSampling) -> frozenset[DraftSampling]:
        """Returns the law, which is ``WITHOUT_REPLACEMENT``, or ``DETERMINISTIC`` for the most probable paths.

        Raises:
            ValueError: Another law is asked for.
        """
        if sampling not in (DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.DETERMINISTIC):
            raise ValueError(
                f"a sampled tree cannot be drawn with sampling={sampling.name.lower()}: use "
                f"sampling=without_replacement, or a static shape"
            )
        return frozenset([sampling])

    def grow(self, scorer: Scorer, drawing: Drawing, depth: int) -> Grown:
        """Draw ``depth`` levels, and keep the best slots of all."""
        rows, marginals = drawing.batch, None
        if scorer.per_depth:
            marginals = scorer.all_logits(rows, depth)
        batch, device = len(rows), rows.device
        zero = torch.zeros(batch, 1, dtype=torch.long, device=device)
        uniform = drawing.uniforms(self.offered(depth)) if drawing.fresh else None
        worth = torch.ones(batch, 1, dtype=torch.float64, device=device)  # of the nodes that are expanded
        tokens, above, numbers = [rows.roots[:, None]], [zero - 1], [zero]  # of these, as the scorer was shown them
        levels: list[_Level] = []
        offered = 0  # candidates so far; candidate i is number i + 1, and the root is number 0
        for level in range(depth):
            topology = Topology(torch.cat(above, dim=1), level, self.width if level else 0)
            if marginals is not None:
                logits = marginals[:, level : level + 1]
            elif level == 0:
                logits = scorer.root_logits(rows)
            else:
                logits = scorer.level_logits(rows, tokens[-1], topology, level)
            found = self._level(logits, drawing, torch.cat(tokens, dim=1), topology, worth, uniform, offered)
            # Where a row ends, other rows may go on: what is too deep for it must not take the place of what is not.
            found.slot = found.slot.where((rows.max_depth > level)[:, None], 0.0)
            confidence = None
            if drawing.rater is not None:
                confidence = drawing.rater.confidence(tokens[-1], found.scores, level).expand(-1, worth.shape[1])
            levels.append(found.offered_by(numbers[-1], confidence))
            size = found.slot.shape[1]
            if level + 1 < depth:
                worth, best = found.node.sort(dim=-1, descending=True, stable=True)
                worth, best = worth[:, : self.width], best[:, : self.width]
                first = topology.width - tokens[-1].shape[1]
                tokens.append(found.token.gather(1, best))
                above.append(first + best // found.children)
                numbers.append(1 + offered + best)
            offered += size
        return self._best(levels, torch.cat(numbers, dim=1), drawing)

    def _level(
        self,
        logits: Float[Tensor, "batch some column"],
        drawing: Drawing,
        tokens: Int[Tensor, "batch shown"],
        topology: Topology,
        worth: Float[Tensor, "batch parent"],
        uniform: Float[Tensor, "batch draw"] | None,
        offered: int,
    ) -> "_Level":
        """Returns the candidates below some nodes.

        Args:
            logits: The logits of the nodes; one row may serve all.
            drawing: How this round draws.
            tokens: The tokens that the scorer was shown, these nodes' last.
            topology: How they are connected.
            worth: The worth of the nodes.
            uniform: Random numbers of all candidates; None if nothing is drawn.
            offered: The candidates before these.
        """
        parents = worth.shape[1]
        ancestors = None
        if drawing.sampling.seen is not None:
            ancestors = topology.ancestors[:, -parents:].expand(len(worth), -1, -1)
            logits = logits.expand(-1, parents, -1)
        scores = drawing.scores(logits, tokens, ancestors)
        children = min(self.width, scores.shape[-1])
        q = token = own = None
        if not drawing.sampled or drawing.greedy is not None:
            chances = scores.softmax(-1).nan_to_num(nan=0.0)
            own, token = chances.topk(children, dim=-1)
            own, token = own.double().expand(-1, parents, -1), token.expand(-1, parents, -1)
        if drawing.sampled:
            assert uniform is not None
            q = drawing.distribution(scores).expand(-1, parents, -1)
            mine = uniform[:, offered : offered + parents * children].view(-1, parents, children)
            drawn, chance = _drawn(q, mine)
            greedy = None if drawing.greedy is None else drawing.greedy[:, :, None]
            token = drawn if greedy is None or token is None else torch.where(greedy, token, drawn)
            own = chance if greedy is None or own is None else torch.where(greedy, own, chance)
        assert own is not None and token is not None
        own = own.nan_to_num(nan=0.0)
        node = slot = worth[:, :, None] * own
        if drawing.sampled:
            drawn_slot, drawn_node = self._worths(worth, own)
            greedy = None if drawing.greedy is None else drawing.greedy[:, :, None]
            slot = drawn_slot if greedy is None else torch.where(greedy, slot, drawn_slot)
            node = drawn_node if greedy is None else torch.where(greedy, node, drawn_node)
        slot = self.kept_by(slot, node)
        return _Level(scores, q, drawing.vocabulary.to_target(token).flatten(1), slot.flatten(1), node.flatten(1))

    def _worths(
        self, worth: Float[Tensor, "batch parent"], own: Float[Tensor, "batch parent child"]
    ) -> tuple[Float[Tensor, "batch parent child"], Float[Tensor, "batch parent child"]]:
        """Returns what the slots below some nodes are worth, and what the tokens drawn for them are.

        Args:
            worth: The worth of the nodes.
            own: q of the tokens; 0 where q has run out of them.
        """
        left = 1 - own.cumsum(-1) + own  # the mass that the earlier siblings have left
        share = (own / left.clamp(min=_TINY)).clamp_(0, 1).pow_(self.power)
        before = torch.nn.functional.pad((1 - share).cumprod(-1)[..., :-1], (1, 0), value=1.0)
        slot = worth[:, :, None] * before
        return slot.where(own > 0, 0.0), slot * share

    def kept_by(
        self, slot: Float[Tensor, "batch parent child"], node: Float[Tensor, "batch parent child"]
    ) -> Float[Tensor, "batch parent child"]:
        """Returns by what nodes are kept, the most first: the worth of their slots. Any other would bias the output."""
        return slot

    def _best(self, levels: "list[_Level]", shown: Int[Tensor, "batch shown"], drawing: Drawing) -> Grown:
        """Returns the trees of the best candidates, in the order in which they were decided on.

        Args:
            levels: All candidates.
            shown: The numbers of those that the scorer was shown, in this order.
            drawing: How this round draws.
        """
        rows, vocabulary = drawing.batch, drawing.vocabulary
        slot, token, parent = (
            torch.cat([getattr(level, name) for level in levels], dim=1) for name in ("slot", "token", "parent")
        )
        count = min(self.max_nodes, slot.shape[1])
        worth, order = slot.sort(dim=-1, descending=True, stable=True)
        worth, kept = worth[:, :count], order[:, :count]
        root = torch.zeros_like(kept[:, :1])
        place = torch.cat([root, 1 + order], dim=1)
        index = torch.arange(place.shape[1], device=place.device).expand_as(place)
        position = torch.empty_like(place).scatter_(1, place, index)
        above = position.gather(1, parent.gather(1, kept))
        above = above.minimum(index[:, :count])  # slots that are worth nothing, which fill up, may have lost theirs
        parents = torch.cat([root - 1, above], dim=1)
        numbers = torch.full_like(place, -1).scatter_(1, shown, index[:, : shown.shape[1]])
        nodes = numbers.gather(1, place[:, : count + 1])
        tokens = torch.cat([rows.roots[:, None], token.gather(1, kept)], dim=1)
        tree = DraftTree.build(
            tokens,
            parents,
            valid=torch.cat([root == 0, worth > 0], dim=1),
            sampling=drawing.law_of(tokens),
            draft_probs=_laws(levels, nodes, drawing) if drawing.sampled else None,
            max_depth=min(len(levels), count),
            max_children=min(self.width, count, vocabulary.common),
        )
        if drawing.rater is None:
            return Grown(tree, nodes)
        sure, rank = (torch.cat([getattr(level, name) for level in levels], dim=1) for name in ("confidence", "rank"))
        pad = torch.nn.functional.pad
        rated = drawing.rater.nodes(
            pad(sure.gather(1, kept), (1, 0)), parents, tree.depth, pad(rank.gather(1, kept), (1, 0))
        )
        return Grown(tree, nodes, rated)


class _Level:
    """The candidates of one level: all children of its parents side by side, in the order in which they were drawn.

    Attributes:
        scores: Scores of the parents' children.
        q: What they were drawn from; None if nothing is drawn.
        token: The candidates' tokens.
        slot: What a candidate is kept by.
        node: The worth of the candidates themselves.
        children: Candidates per parent.
        parent: The numbers of their parents.
        rank: Their sibling ranks.
        confidence: The confidence in them, if it was asked for.
    """

    def __init__(self, scores: Tensor, q: Tensor | None, token: Tensor, slot: Tensor, node: Tensor):
        self.scores, self.q, self.token, self.slot, self.node = scores, q, token, slot, node

    def offered_by(self, parents: Int[Tensor, "batch parent"], confidence: Tensor | None) -> "_Level":
        """Note the parents, and the confidence in their children."""
        self.children = self.token.shape[1] // parents.shape[1]
        self.parent = parents.repeat_interleave(self.children, dim=1)
        rank = torch.arange(self.children, device=parents.device)
        self.rank = rank.repeat(parents.shape[1]).expand(len(parents), -1)
        self.confidence = None if confidence is None else confidence.repeat_interleave(self.children, dim=1)
        return self


def _drawn(
    q: Float[Tensor, "batch parent column"], uniform: Float[Tensor, "batch parent child"]
) -> tuple[Int[Tensor, "batch parent child"], Float[Tensor, "batch parent child"]]:
    """Returns children of every parent, drawn without replacement, and q of each; 0 where q has run out of tokens."""
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
    levels: list[_Level], nodes: Int[Tensor, "batch node"], drawing: Drawing
) -> Float[Tensor, "batch node vocab"]:
    """Returns q for the children of every node; zero for nodes that were not expanded."""
    q = torch.cat([level.q for level in levels if level.q is not None], dim=1)
    chosen = q.gather(1, nodes.clamp(min=0)[:, :, None].expand(-1, -1, q.shape[2]))
    chosen.masked_fill_(_missing(nodes), 0.0)
    vocabulary = drawing.vocabulary
    if vocabulary.ids is None and vocabulary.common == vocabulary.target:
        return chosen
    room = drawing.room(nodes.shape[1])
    vocabulary.put(room, slice(0, nodes.shape[1]), chosen)
    return room


def _missing(nodes: Int[Tensor, "batch node"]) -> Bool[Tensor, "batch node 1"]:
    return (nodes < 0)[:, :, None]
