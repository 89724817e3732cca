"""Rejection sampling, from the root down and sibling by sibling: it fits every way of drafting but shared noise."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.interfaces import Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.families import Family, entries, rows_of
from verifiers.levels import law_of_steps
from verifiers.residuals import acceptance, normalized, residual, without


class RejectionVerifier(Verifier):
    """Token-level rejection sampling on chains and trees.

    At a node v, the valid children are tried in sibling order. Let p_0 = p_v. The child x of rank r is accepted with
    probability a = min(1, p_r(x) / q_r(x)); if it is rejected, p_{r+1} = N([p_r - q_r]+) replaces p_r, where N
    normalizes and N(0) is p_v. If no child is accepted, the next token is drawn from the last p_r. The law of the child
    says what q_r is, so siblings may mix laws, and each of these rules is a case of this one:

    * ``IID``: q_r = q. On a chain, speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1;
      Chen et al. 2023, arXiv 2302.01318); on a tree, multi-step speculative sampling of SpecInfer (Miao et al.
      2023, arXiv 2305.09781).
    * ``WITHOUT_REPLACEMENT``: q_r is q without the tokens of earlier siblings, normalized: recursive rejection
      sampling (Jeon et al. 2024, arXiv 2402.14160; Yang et al. 2024, arXiv 2401.06706).
    * ``DETERMINISTIC``: q_r is one-hot. A child is then accepted with its probability under p. This amounts to drawing
      from p and going down while the draw is a child: the acceptance of EAGLE-2 (Li et al. 2024, arXiv 2406.16858), and
      greedy matching at temperature 0.
    """

    exactness = Exactness.EXACT
    laws = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})

    def stop_law(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch node"]:
        """Probability, given this tree, that the accepted path ends at each node."""
        if tree.max_children == 0:
            step = torch.zeros_like(target_probs[:, :, 0])
            step[:, 0].fill_(1)
            return step
        entry = entries(tree, target_probs.shape[2])
        p = target_probs.flatten(1).gather(1, entry)
        # step: the probability that a path which has reached the parent goes on to the node.
        if tree.draft_probs is None and tree.max_children > 1:
            step = p.masked_fill(_repeated(tree, entry), 0.0)
        else:
            if tree.draft_probs is not None:
                q = tree.draft_probs.flatten(1).gather(1, entry).to(p.dtype)
                p = acceptance(p, q, tree.law)
            step = p.where(tree.valid, 0.0)
            if tree.max_children > 1:
                _step_to_later_siblings(tree, target_probs, step)
        step[:, 0].fill_(1)
        return law_of_steps(tree, step)

    def next_law(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        stop: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """Law of the token that follows: what is left of p after all children of ``stop`` were rejected."""
        if tree.max_children == 0:
            return rows_of(target_probs, stop)
        if tree.draft_probs is None:
            node_p = rows_of(target_probs, stop)
            rejected = (tree.parents == stop[:, None]) & tree.valid
            # Adding minus infinity, not writing zero: nodes elsewhere may have the same token and would undo a write.
            certain = torch.where(rejected, -torch.inf, 0.0).to(node_p.dtype)
            left = node_p.scatter_add(1, tree.tokens, certain).clamp_(min=0)
            return normalized(left, node_p, rejected.any(-1, keepdim=True))

        family = Family(tree, target_probs, stop[:, None])
        p = family.p
        for rank, draft_law in enumerate(family.drawn_from()):
            left = residual(p, draft_law, family.tokens[..., rank], family.laws[..., rank])
            p = normalized(left, family.p)
        # After a leaf it is p itself, to the last bit: a row without drafts must not depend on its batch mates.
        return p.where(family.exists[..., :1], family.p)[:, 0]


def _repeated(tree: DraftTree, entry: Int[Tensor, "batch node"]) -> Bool[Tensor, "batch node"]:
    """Returns the nodes that have the token of an earlier sibling, and the invalid ones.

    Args:
        tree: The tree.
        entry: One number for every pair of parent and token.
    """
    # The root and all invalid nodes get the same number, so that invalid nodes count as repetitions of the root.
    entry = entry.where(tree.valid & (tree.parents >= 0), -1)
    return (entry[:, :, None] == entry[:, None, :]).tril_(-1).any(-1)


def _step_to_later_siblings(
    tree: DraftTree,
    target_probs: Float[Tensor, "batch node vocab"],
    step: Float[Tensor, "batch node"],
) -> None:
    """Replace ``step`` at all nodes that have earlier siblings; the root's entry becomes meaningless.

    Args:
        tree: The tree.
        target_probs: p at every node.
        step: Acceptance probability of every node as if it were a first child; 0 at invalid nodes.
    """
    drafted = tree.width - 1
    counts = (tree.children >= 0).sum(-1)
    # Parents in descending order of their number of children: those that have a child of some rank come first, and at
    # most drafted // k nodes have k children.
    groups = counts.topk(drafted // 2, dim=1).indices
    family = Family(tree, target_probs, groups)
    # The laws need no mask: where there is no child, the result goes to the root's entry.
    index, tokens, laws = family.index, family.tokens, family.of_children(tree.law)
    node_p, q = family.p, family.q
    p, left, draft_law = node_p, q, q  # draft_law: q_r
    # The probability that all children so far were rejected.
    rejected = 1 - step.gather(1, index[..., 0])
    for rank in range(1, min(tree.max_children, drafted)):
        here = slice(drafted // (rank + 1))
        node_p, q, left, rejected = node_p[:, here], q[:, here], left[:, here], rejected[:, here]
        p = normalized(
            residual(p[:, here], draft_law[:, here], tokens[:, here, rank - 1], laws[:, here, rank - 1]), node_p
        )
        left = without(left, tokens[:, here, rank - 1])
        token, law, child = tokens[:, here, rank], laws[:, here, rank], index[:, here, rank]
        draft_law = q.where((law == DraftSampling.IID)[..., None], left)
        entry = token[..., None]
        a = acceptance(p.gather(-1, entry)[..., 0], draft_law.gather(-1, entry)[..., 0], law)
        step.scatter_(1, child, rejected * a)  # at the root where there is no such child
        rejected = rejected * (1 - a)
