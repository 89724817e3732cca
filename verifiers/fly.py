"""Loose matching: a mismatch is kept where the target is unsure and the drafts after it match. LOSSY."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.arguments import number, whole
from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.target_walk import after_walk
from verifiers.trees import entries


class FLyVerifier(Verifier):
    """FLy, training-free loosely speculative decoding (arXiv 2511.22972), for chains. LOSSY.

    A draft token matches if a draw from p gives it, as in ``TargetWalkVerifier``. A mismatch is kept if the target is
    unsure there, and if the next ``window`` drafts match: the text goes on as the target would have it. The target is
    unsure where the entropy of its ``top`` most probable tokens, normalized to the range from 0 to 1, exceeds
    ``threshold``. The path ends at the first mismatch that is not kept, and the draw that did not match is emitted. A
    mismatch with fewer than ``window`` drafts after it is never kept, so the draft must be longer than the window.

    The entropy is that of p as tokens are drawn from it, after temperature and filters. So no token is unsure at
    temperature 0, and the rule is greedy matching there; the authors take the model's own distribution.

    Args:
        threshold: In [0, 1]; 1 keeps no mismatch, and is exact.
        window: How many drafts after a mismatch must match.
        top: How many of the target's tokens are looked at.
    """

    exactness = Exactness.LOSSY
    samplings = frozenset(DraftSampling)
    chain_only = True

    def __init__(self, *, threshold: float = 0.3, window: int = 6, top: int = 3):
        remedy = "give a normalized entropy in [0, 1]; 1 keeps no mismatch"
        self.threshold = number("threshold", threshold, remedy, lambda value: 0 <= value <= 1)
        self.window = whole("window", window, least=1)
        self.top = whole("top", top, least=2)

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        """Whether each position matches is independent of the others, given the draft; what is kept follows from it."""
        depth = tree.max_depth
        index = torch.arange(tree.width, device=tree.tokens.device).expand_as(tree.tokens)
        # The node at every depth; the root where there is none. Invalid nodes go to a column that is cut off.
        column = tree.depth.where(tree.valid, depth + 1)
        nodes = torch.zeros_like(tree.tokens[:, :1]).expand(-1, depth + 2).scatter(1, column, index)[:, : depth + 1]
        match = target_probs.flatten(1).gather(1, entries(tree, target_probs.shape[2])).gather(1, nodes)
        # Nothing matches behind the draft's end. Column i is the chance that the draft at depth i + 1 matches.
        match = torch.nn.functional.pad(match.where(nodes > 0, 0.0)[:, 1:], (0, self.window + 1))
        unsure = self._is_unsure(target_probs).gather(1, nodes)
        following = match[:, 1:].unfold(1, self.window, 1).prod(-1)
        kept = (1 - match[:, : depth + 1]) * unsure * following
        # reached[i]: the first i drafts are accepted, the last mismatch among them with its whole window.
        reached = [torch.ones_like(match[:, 0])]
        for i in range(depth):
            reached.append(reached[i] * match[:, i])
            if i >= self.window:
                reached[-1] = reached[-1] + reached[i - self.window] * kept[:, i - self.window]
        ends = torch.stack(reached, 1) * (1 - match[:, : depth + 1] - kept)
        # Depths without a node have nothing to add at the root.
        stop = torch.zeros_like(target_probs[:, :, 0]).scatter_add(1, nodes, ends)
        return Laws(stop, lambda stop_nodes: after_walk(tree, target_probs, stop_nodes))

    def _is_unsure(self, target_probs: Float[Tensor, "batch node vocab"]) -> Bool[Tensor, "batch node"]:
        """Return where the normalized entropy of the most probable tokens exceeds the threshold."""
        count = min(self.top, target_probs.shape[2])
        most = target_probs.topk(count, -1).values
        most = most / most.sum(-1, keepdim=True)
        return -torch.xlogy(most, most).sum(-1) / math.log(max(count, 2)) > self.threshold
