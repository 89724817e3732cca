"""Draws from the target walk down the tree: exact for any draft."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.acceptance import ends_at_root
from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.trees import entries, normalized, rows_of


class TargetWalkVerifier(Verifier):
    """Draws from p and goes down while the draw is a child; emits the first draw that is not a child.

    This is the acceptance of EAGLE-2 (Li et al. 2024, arXiv 2406.16858) and of n-gram drafts; called naive sampling
    in SpecInfer (Miao et al. 2023, arXiv 2305.09781). The draws do not depend on the tree, so the output follows
    the target however the tree was made: drafts may be sorted, pruned or selected after they were drawn, and drawn with
    another temperature or with noise that the target shares. The rule does not use q, so it accepts less than others
    where drafts were sampled. For ``DETERMINISTIC`` drafts it equals ``RejectionVerifier``.
    """

    exactness = Exactness.EXACT
    samplings = frozenset(DraftSampling)
    walks_greedily = True

    def along(self, p: Tensor, q: Tensor, tokens: Tensor, law: DraftSampling) -> Tensor:
        return q.gather(2, tokens[..., None])[..., 0].cumprod(1)

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        return laws_of_walk(tree, target_probs)


def laws_of_walk(tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
    """Return the laws of the walk along draws from p, to which all exact rules come down without q."""
    if tree.max_children == 0:
        return Laws(ends_at_root(target_probs), lambda stop: rows_of(stop, target_probs)[0])
    entry = entries(tree, target_probs.shape[2])
    p = target_probs.flatten(1).gather(1, entry)
    step = p.masked_fill(_repeated(tree, entry) if tree.max_children > 1 else ~tree.valid, 0.0)
    step[:, 0].fill_(1)
    return Laws(law_of_steps(tree, step), lambda stop: after_walk(tree, target_probs, stop))


def after_walk(
    tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], stop: Int[Tensor, " batch"]
) -> Float[Tensor, "batch vocab"]:
    """Return p without the children of ``stop``: the law of a draw that is none of them. After a leaf it is p."""
    (p,) = rows_of(stop, target_probs)
    below = (tree.parents == stop[:, None]) & tree.valid
    # Adding minus infinity, not writing zero: nodes elsewhere may have the same token and would undo a write.
    gone = torch.zeros_like(tree.tokens, dtype=p.dtype).masked_fill_(below, -torch.inf)
    left = p.scatter_add(1, tree.tokens, gone).clamp_(min=0)
    return normalized(left, p, below.any(-1, keepdim=True))


def _repeated(tree: DraftTree, entry: Int[Tensor, "batch node"]) -> Bool[Tensor, "batch node"]:
    """Return the nodes that have the token of an earlier sibling, and the invalid ones."""
    # The root and all invalid nodes get the same number, so that invalid nodes count as repetitions of the root.
    entry = entry.where(tree.valid & (tree.parents >= 0), -1)
    return (entry[:, :, None] == entry[:, None, :]).tril_(-1).any(-1)


def law_of_steps(tree: DraftTree, step: Float[Tensor, "batch node"]) -> Float[Tensor, "batch node"]:
    """Return the law of the last node.

    Args:
        step: The probability that a path which has reached a node's parent goes on to the node; 1 at the root.
    """
    if tree.in_line:
        reach = step.cumprod(-1)
        return reach - torch.nn.functional.pad(reach[:, 1:], (0, 1))
    reach = torch.where(tree.ancestors, step[:, None], 1.0).prod(-1)
    # A path that reaches a node and goes on to none of its children ends there.
    return reach.scatter_add(1, tree.parents.clamp(min=0)[:, 1:], -reach[:, 1:]).clamp_(min=0)
