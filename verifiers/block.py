"""Verification of whole blocks, from the leaves to the root: a token may be saved by those drafted after it."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.interfaces import Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.families import Family, entries
from verifiers.post_order import PostOrderVerifier, law_of_first_success
from verifiers.residuals import acceptance, normalized, residual, weight_left
from verifiers.siblings import by_rank, try_in_turn


class BlockVerifier(Verifier):
    """Block verification of chains (Sun et al. 2024, arXiv 2403.10444, algorithm 2).

    Let w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)). Position i < n is acceptable with probability
    h_i = Z_i / (Z_i + 1 - w_i), where Z_i = sum [w_i p - q]+ runs over the token after it, and the last position with
    h_n = w_n, all independently. The path ends at the last acceptable position, even if earlier ones are not. The next
    token is drawn from N([w_i p - q]+), or from p after the last position. A path then reaches position i with
    probability w_i. No lossless rule that looks at one chain can reach more, and the token-level rule never does.
    At temperature 0, and for ``DETERMINISTIC`` drafts (one-hot q), the rule equals ``RejectionVerifier``.
    """

    exactness = Exactness.EXACT
    laws = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})
    chain_only = True

    def stop_law(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch node"]:
        """Probability, given this chain, that the accepted path ends at each node."""
        weight, p, child, inner = self._weights(tree, target_probs)
        certain = (tree.law == DraftSampling.DETERMINISTIC).gather(1, child)
        # Z, for a one-hot q.
        z = weight * (1 - p.gather(1, child))
        if tree.draft_probs is not None:
            left = torch.addcmul(-tree.draft_probs, weight[..., None], target_probs).clamp_(min=0).sum(-1)
            z = z.where(certain, left)
        chance = weight_left(z, weight).where(inner, weight)
        chance[:, 0] = 1
        return law_of_first_success(tree, chance)

    def next_law(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        stop: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """Law of the token that follows: the residual of the weighted p, or p after the last node."""
        weight, _, child, inner = self._weights(tree, target_probs)
        at = stop[:, None]
        here = Family(tree, target_probs, at)
        node_p, q = here.p[:, 0], here.q[:, 0]
        follows = child.gather(1, at)
        token, law = tree.tokens.gather(1, follows)[:, 0], tree.law.gather(1, follows)[:, 0]
        left = residual(weight.gather(1, at) * node_p, q, token, law)
        return normalized(left, node_p, inner.gather(1, at))

    def _weights(
        self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]
    ) -> tuple[
        Float[Tensor, "batch node"], Float[Tensor, "batch node"], Int[Tensor, "batch node"], Bool[Tensor, "batch node"]
    ]:
        """Compute what both laws need of every node of the chain.

        Returns:
            The weights; p(x) of the nodes' tokens; the node after each (any where there is none); and where there is
            one.
        """
        parents = tree.parents.clamp(min=0)
        entry = entries(tree, target_probs.shape[2])
        p = target_probs.flatten(1).gather(1, entry)
        q = p if tree.draft_probs is None else tree.draft_probs.flatten(1).gather(1, entry).to(p.dtype)
        first = torch.zeros_like(p)
        first[:, 0] = 1
        weight = first
        for _ in range(tree.max_depth):
            above = weight.gather(1, parents)
            # The quotient p / q must not come first: it may be infinite while the weight above is 0.
            weight = torch.maximum(acceptance(above * p, q, tree.law).where(tree.valid, 0.0), first)
        index = torch.arange(tree.width, device=parents.device)
        follower = index.where(tree.valid & (tree.parents >= 0), -1)
        child = torch.full_like(parents, -1).scatter_reduce(1, parents, follower, "amax")
        return weight, p, child.clamp(min=0), child >= 0


class TraversalVerifier(PostOrderVerifier):
    """Traversal verification of trees (Weng et al. 2025, arXiv 2505.12398, algorithm 2).

    Nodes are tried depth first: children in the order in which they were drawn, a node after everything below it. A
    node v comes with a weight w and its p; its child x gets the weight min(1, w p(x) / q(x)). If nothing in the child's
    subtree is accepted, p becomes N([w p - q]+), w becomes Z / (Z + 1 - w) with Z = sum [w p - q]+, and the next child
    is tried. After the last child, v itself is accepted with probability w (the root always), and the next token is
    drawn from p. So the path ends in a node's subtree with probability w, over the drafts, whatever the subtree's
    shape. On a chain the rule is block verification; on trees it accepts more than ``RejectionVerifier``, though it is
    not optimal there.

    The law of every child says what its q is, so siblings may mix laws.
    """

    laws = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})

    takes_gaps = True

    def _try_children(
        self, family: Family, weight: Float[Tensor, "batch some"]
    ) -> tuple[Float[Tensor, "batch some rank"], Float[Tensor, "batch some"], Float[Tensor, "batch some vocab"]]:
        """Try one child after the other."""
        siblings, unpacked = by_rank(family)
        tried = try_in_turn(family.p, family.q, siblings, weight)
        assert tried.weight is not None, "weights were given"
        return unpacked(tried.chances), tried.weight, tried.left
