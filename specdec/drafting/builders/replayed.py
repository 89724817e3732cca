"""A tree that is planned by its most probable paths, and then drawn."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specdec.drafting.builders.base import Grown
from specdec.drafting.builders.expansion import ExpansionTree, Front, Offers, Scored
from specdec.drafting.builders.sampled import without_replacement
from specdec.drafting.drawing import Drawing
from specdec.drafting.scorer import Scorer
from specdec.topology import Topology
from specdec.types import DraftSampling


class ReplayedTree(ExpansionTree):
    """Keeps the shape of the most probable paths, and draws its tokens anew, without replacement: Tsubame.

    From the root down, every node gets as many children as in the plan, drawn from q behind the path that was drawn
    (arXiv 2609.33652). Slots are settled before any token is drawn, so rules that compare p with q are exact. Every
    level but the root's is scored twice (``asks_twice``). Greedy requests get the plan itself.
    """

    takes = DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.DETERMINISTIC
    asks_twice, rates_nodes = True, False

    def grow(self, scorer: Scorer, drawing: Drawing, depth: int) -> Grown:
        asked = scorer.levels(drawing.batch, depth)
        root = asked(drawing.batch.roots[:, None], None, 0)

        def logits_of(tokens: Tensor, topology: Topology | None, level: int) -> Tensor:
            return asked(tokens, topology, level) if level else root

        given = logits_of, scorer.per_depth
        plan = self.search(self.expand, *given, replace(drawing, sampled=False, rater=None), depth)
        if not drawing.sampled and drawing.rater is None:
            return self.kept(*plan, drawing)
        return self.kept(*self.search(partial(self._refilled, *plan), *given, drawing, depth), drawing)

    def _refilled(
        self, levels: list[Offers], fronts: list[Front], scored: Scored, drawing: Drawing
    ) -> tuple[Offers, Front | None]:
        token, worth = levels[scored.depth][:2]
        if scored.q is not None and scored.uniform is not None:
            drawn, own = without_replacement(scored.q, scored.uniform)
            drawn = drawing.vocabulary.to_target(drawn).flatten(1)
            exists = ((own > 0) & (scored.front.worth > self.impossible)[:, :, None]).flatten(1)
            if drawing.greedy is not None:
                drawn, exists = torch.where(drawing.greedy, token, drawn), exists | drawing.greedy
            token, worth = drawn, worth.where(exists, self.impossible)
        offers = Offers(token, worth, scored.q)
        if scored.last:
            return offers, None
        below = fronts[scored.depth + 1]
        place = below.numbers - 1 - scored.offered
        return offers, below._replace(tokens=token.gather(1, place), worth=worth.gather(1, place))
