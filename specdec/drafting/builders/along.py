"""What a drafter would draft along an output that is known, token by token: for dense traces of acceptance."""

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.drafting.builders.base import Grown, TreeBuilder
from specdec.drafting.builders.static import StaticTree
from specdec.drafting.drawing import Drawing
from specdec.drafting.levels import LevelPlan
from specdec.drafting.scored import ScoredDrafter
from specdec.drafting.scorer import Scorer
from specdec.interfaces import Drafter
from specdec.shape import TreeShape
from specdec.tree import DraftTree
from specdec.types import DraftSampling


class AlongOutput(TreeBuilder):
    """Shows a scorer the output's own next tokens, and notes what it would have drafted in their place.

    Args:
        depth: How deep.
        drawn: Whether sampled requests' drafts are drawn from q; else they are the likeliest tokens.

    Attributes:
        following: The tokens of the output behind every row's root; set before ``grow``.
        seen: After ``grow``: q of the output's token, its rank among the drafter's candidates (-1 for none), the margin
            before it.
    """

    is_chain = is_paths = True
    following: Int[Tensor, "batch depth"]
    seen: tuple[Float[Tensor, "batch depth"], Int[Tensor, "batch depth"], Float[Tensor, "batch depth"]]

    def __init__(self, depth: int, *, drawn: bool):
        self.max_nodes = self.max_shown = self.max_depth = depth
        self.drawn = drawn

    def bind(self, device: torch.device, *, leaves: bool = False) -> None:
        self._plans = LevelPlan.by_depth(TreeShape.chain(self.max_depth), device)

    def grow(self, scorer: Scorer, drawing: Drawing, depth: int) -> Grown:
        rows, vocabulary = drawing.batch, drawing.vocabulary
        plan = self._plans[depth]
        tokens = torch.cat([rows.roots[:, None], self.following[:, :depth].to(rows.roots)], dim=1)
        logits_of = scorer.levels(rows, len(plan.levels))
        levels = []
        for number, level in enumerate(plan.levels):
            logits = logits_of(tokens[:, level.start : level.stop], level.topology, number)
            above = None
            if drawing.by_path:
                above = level.topology.ancestors[0, level.parents].expand(len(rows), -1, -1)
            scores = drawing.scores(logits, tokens[:, : level.stop], above)[:, 0].float()
            token = tokens[:, number + 1, None]
            column = vocabulary.to_drafter(token).clamp(max=vocabulary.common - 1)
            known = vocabulary.to_target(column) == token
            own = scores.gather(1, column)
            before = torch.arange(scores.shape[1], device=scores.device) < column  # of equals, the lower id is first
            rank = ((scores > own) | ((scores == own) & before)).sum(1, keepdim=True)
            q = drawing.distribution(scores[:, None])[:, 0].gather(1, column) if drawing.sampled else own * 0
            two = scores.topk(2, dim=-1).values
            levels.append(((q * known)[:, 0], rank.where(known, -1)[:, 0], two[:, 0] - two[:, 1]))
        q, rank, margin = (torch.stack(each, 1) for each in zip(*levels, strict=True))
        self.seen = q, rank, margin
        return Grown(DraftTree.from_shape(plan.shape, tokens))


def along_output(drafter: Drafter, sampled: bool) -> tuple[Drafter, AlongOutput | None]:
    """Return what to ask along an output: a drafter's scorer where it has one, or its own trees.

    Raises:
        ValueError: Siblings are drawn at random, or drafts depend on more than the output before them.
    """
    name = type(drafter).__name__
    if drafter.adapts:
        raise ValueError(
            f"{name} drafts by more than the request itself (other requests, or how rounds went): record another"
        )
    drawn = sampled and any(law in drafter.laws for law in (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT))
    if drawn and not drafter.is_chain:
        raise ValueError(
            f"{name} draws siblings at random, and whether one is accepted depends on the others: record a chain, or "
            f"give drafter.sampling=deterministic"
        )
    coupled = sampled and DraftSampling.COUPLED in drafter.laws  # what it drafts depends on the target's noise
    if isinstance(drafter, ScoredDrafter) and isinstance(drafter.tree, StaticTree) and not coupled:
        twin, builder = copy.copy(drafter), AlongOutput(drafter.max_depth, drawn=drawn)
        twin.policy, twin.tree = None, builder
        twin.max_nodes, twin.is_chain, twin.is_paths = drafter.max_depth, True, True
        return twin, builder
    if drawn:
        raise ValueError(f"{name} draws at random, and says no probabilities along an output: record another drafter")
    return drafter, None
