"""Beam search as a tree: the beams' common beginnings are one node each (ReDrafter, arXiv 2403.09919, section 3.2)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.arguments import whole
from specdec.drafting.builders.base import BeamTree, Grown
from specdec.drafting.drawing import Drawing
from specdec.drafting.scorer import Scorer
from specdec.topology import Topology
from specdec.tree import DraftTree


class BeamSearchTree(BeamTree):
    """Drafts the paths that a beam search ends with, ``DETERMINISTIC`` whatever the request's temperature.

    What no beam of the last level continues is not drafted: at most ``width`` nodes of every depth, and ``width``
    leaves.

    Args:
        width: Beams.
        depth: Tokens of a beam.
        among: A node's probabilities are those among so many of its most probable tokens, as in the published code;
            None for all tokens.
    """

    reorders_nodes, rates_nodes = False, True

    def __init__(self, width: int = 10, depth: int = 4, *, among: int | None = 50):
        width, depth = whole("width", width, least=1), whole("depth", depth, least=1)
        super().__init__(width * depth, depth, width)
        self.among = None if among is None else whole("among", among, least=width)

    def grow(self, scorer: Scorer, drawing: Drawing, depth: int) -> Grown:
        rows, logits_of = drawing.batch, scorer.levels(drawing.batch, depth)
        fronts, worths = [rows.roots[:, None]], [torch.zeros(len(rows), 1, dtype=torch.float64, device=rows.device)]
        above = [torch.full_like(fronts[0], -1)]
        first = 0  # the number of a front's first node
        for level in range(depth):
            parents = torch.cat(above, dim=1)
            topology = None if level == 0 or scorer.per_depth else Topology(parents, level, self.width)
            scores, token = self._children(logits_of(fronts[-1], topology, level), drawing)
            offers = (worths[-1][:, :, None] + scores).flatten(1)
            worth, best = offers.topk(min(self.width, offers.shape[1]), dim=-1)
            above.append(first + best // token.shape[2])
            first += fronts[-1].shape[1]
            fronts.append(token.expand(-1, fronts[-1].shape[1], -1).flatten(1).gather(1, best))
            worths.append(worth)
        tokens, parents, worth = (torch.cat(each, dim=1) for each in (fronts, above, worths))
        valid = self._beams(fronts, above, worths, rows.max_depth.clamp(max=depth))
        tree = DraftTree.build(tokens, parents, valid=valid, max_depth=depth, max_children=self.width)
        return Grown(tree, rated=None if drawing.rater is None else drawing.rater.paths(worth, tree))

    def _children(
        self, logits: Float[Tensor, "batch some column"], drawing: Drawing
    ) -> tuple[Float[Tensor, "batch some child"], Int[Tensor, "batch some child"]]:
        """Return the log-probabilities and the tokens of the most probable children, in order."""
        logits = logits[..., : drawing.vocabulary.common].float()
        columns = logits.shape[-1]
        best, column = logits.topk(min(self.among or self.width, columns), dim=-1)
        total = (best if self.among is not None else logits).logsumexp(-1, keepdim=True)
        scores = (best - total)[..., : self.width].nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return scores, drawing.vocabulary.to_target(column[..., : self.width])

    @staticmethod
    def _beams(fronts: list[Tensor], above: list[Tensor], worths: list[Tensor], depths: Tensor) -> Tensor:
        """Return which nodes lie on a beam, from the last level up; ``depths`` are the rows' last levels."""
        valid, below = [], torch.zeros_like(fronts[-1], dtype=torch.bool)
        for level in range(len(fronts) - 1, 0, -1):
            here = (worths[level] > -torch.inf) & ((depths == level)[:, None] | below)
            valid.append(here)
            below = torch.zeros_like(fronts[level - 1], dtype=torch.long)
            first = sum(each.shape[1] for each in fronts[: level - 1])
            below = below.scatter_add_(1, above[level] - first, here.long()) > 0
        return torch.cat([torch.ones_like(below[:, :1]), *reversed(valid)], dim=1)
