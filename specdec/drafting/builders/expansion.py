"""Trees of the most probable paths: expand the best nodes level by level, then keep the best of all.

EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section 4). A path's score is the product of its probabilities at temperature
1. With ``width`` no less than ``nodes``, and logits that depend on the depth alone, these are exactly the best paths
(DDTree, arXiv 2604.12989).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.drafting.builders.base import BeamTree, Grown
from specdec.drafting.drawing import Drawing
from specdec.drafting.scorer import Scorer
from specdec.kernels import usable
from specdec.topology import Topology
from specdec.tree import DraftTree

_LEAST = 1e-9
"""A token's cost in nats is at least this, so that no child scores as high as its parent."""


class ExpansionTree(BeamTree):
    """Drafts the most probable paths, ``DETERMINISTIC`` whatever the request's temperature.

    Arguments are those of ``BeamTree``. (EAGLE's ``total_tokens`` counts the root, too.)
    """

    rates_nodes = True

    def __init__(self, nodes: int = 59, depth: int = 8, width: int = 10):
        super().__init__(nodes, depth, width)

    def grow(self, scorer: Scorer, drawing: Drawing, depth: int) -> Grown:
        rows, logits_of = drawing.batch, scorer.levels(drawing.batch, depth)
        masks, so_far = rows.masks_drafts, rows.roots[:, None]
        here = torch.ones_like(so_far, dtype=torch.bool)[..., None] if masks else None
        log_probs, token = _children(logits_of(so_far, None, 0), drawing, self.width, so_far, here)
        children = token.shape[2]
        scores, tokens = [log_probs[:, 0].double()], [token[:, 0]]
        front_scores, front_tokens = scores[0], tokens[0]
        front = torch.arange(1, children + 1, device=rows.device).expand(len(rows), -1)
        above = torch.zeros_like(front)
        # Candidate i is number i + 1, and the root is number 0. The scorer numbers the nodes of a front one after
        # another, the root being 0, too.
        numbers, shown = [above[:, :1]], [above[:, :1] - 1]
        offered, first = children, 1
        for level in range(1, depth):
            numbers.append(front)
            shown.append(above)
            topology, size = None, front.shape[1]
            if masks or not scorer.per_depth:
                topology = Topology(torch.cat(shown, dim=1), level, self.width)
            if masks and topology is not None:
                so_far, here = torch.cat([so_far, front_tokens], dim=1), topology.ancestors[:, -size:]
            log_probs, token = _children(logits_of(front_tokens, topology, level), drawing, children, so_far, here)
            tokens.append(token.expand(-1, size, -1).flatten(1))
            if level + 1 < depth:
                score, front_scores, front_tokens, front, above = _front(
                    front_scores, log_probs, token, self.width, first, offered
                )
            else:
                score = (front_scores[:, :, None] + log_probs).flatten(1)
            scores.append(score)
            offered, first = offered + size * children, first + size
        # Where a row ends, other rows may go on: what is too deep for it must not take the place of what is not.
        room = rows.max_depth[:, None] > torch.arange(depth, device=rows.device)
        room = torch.cat([room[:, i, None].expand_as(each) for i, each in enumerate(scores)], dim=1)
        score, token, number = (torch.cat(each, dim=1) for each in (scores, tokens, numbers))
        parent = number.repeat_interleave(children, dim=1)
        score = score.where(room, -torch.inf).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
        return self._best(score, token, parent, number, drawing, (depth, children))

    def _best(
        self,
        score: Float[Tensor, "batch candidate"],
        token: Int[Tensor, "batch candidate"],
        parent: Int[Tensor, "batch candidate"],
        shown: Int[Tensor, "batch shown"],
        drawing: Drawing,
        bounds: tuple[int, int],
    ) -> Grown:
        """Return the trees of the best candidates, which are closed under ancestors."""
        rows, count = drawing.batch, min(self.max_nodes, score.shape[1])
        kept = score.topk(count, dim=-1).indices.sort(dim=-1).values
        root = torch.zeros_like(kept[:, :1])
        place = torch.cat([root, 1 + kept], dim=1)  # the kept candidates' numbers, ascending
        above = torch.searchsorted(place, parent.gather(1, kept))
        # Impossible tokens, which only fill up, may have lost their parents.
        above = above.minimum(torch.arange(count, device=rows.device))
        tree = DraftTree.build(
            torch.cat([rows.roots[:, None], token.gather(1, kept)], dim=1),
            torch.cat([root - 1, above], dim=1),
            valid=torch.cat([root == 0, score.gather(1, kept) > -torch.inf], dim=1),
            max_depth=min(bounds[0], count),
            max_children=min(bounds[1], count),
        )
        index = torch.arange(shown.shape[1], device=rows.device).expand_as(shown)
        at = score.new_full((len(rows), score.shape[1] + 1), -1, dtype=torch.long).scatter_(1, shown, index)
        nodes = at.gather(1, place)
        if drawing.rater is None:
            return Grown(tree, nodes)
        return Grown(tree, nodes, drawing.rater.paths(torch.nn.functional.pad(score.gather(1, kept), (1, 0)), tree))


def _children(
    logits: Float[Tensor, "batch some column"],
    drawing: Drawing,
    width: int,
    shown: Int[Tensor, "batch shown"],
    above: Bool[Tensor, "batch parent shown"] | None,
) -> tuple[Float[Tensor, "batch scored width"], Int[Tensor, "batch scored width"]]:
    """Return the log-probabilities and tokens of the most probable children, in order.

    Where a grammar masks drafts, ``above`` marks the ``shown`` nodes on each parent's path.
    """
    vocabulary = drawing.vocabulary
    if above is not None:
        logits = logits[..., : vocabulary.common].expand(-1, above.shape[1], -1)
        logits = drawing.masked(logits.float(), shown, above)
    log_probs = logits[..., : vocabulary.common].log_softmax(-1, dtype=torch.float32)
    best, column = log_probs.topk(min(width, logits.shape[-1]), dim=-1)
    return best.clamp_(max=-_LEAST), vocabulary.to_target(column)


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
    """Return the children's scores, and of the best of them scores, tokens, numbers and the parents as shown.

    ``first`` is the number under which the scorer was shown the first parent, ``offered`` the candidates before these.
    One row of ``log_probs`` serves all parents if a scorer is ``per_depth``.
    """
    if usable(worth):
        from specdec.kernels.trees import front

        return front(worth, log_probs, token, width, first, offered)
    score = (worth[:, :, None] + log_probs).flatten(1)
    front_scores, best = score.topk(min(width, score.shape[1]), dim=-1)
    tokens = token.expand(-1, worth.shape[1], -1).flatten(1).gather(1, best)
    return score, front_scores, tokens, best + (1 + offered), (best // token.shape[2]).add_(first)
