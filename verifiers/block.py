"""Verification of whole blocks, from the leaves to the root: a token may be saved by those drafted after it."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.acceptance import parts_of
from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.certain import laws_of_certain
from verifiers.descent import descend, law_after
from verifiers.families import Family, drafted_laws, entries
from verifiers.groups import groups_of
from verifiers.post_order import PostOrderVerifier, law_of_first_success
from verifiers.residuals import normalized, residual
from verifiers.siblings import IN_TURN, by_rank, chance, share, try_in_turn
from verifiers.thresholds import has_thresholds


class _Chain(NamedTuple):
    """The weights of a chain, which both laws need.

    Attributes:
        weight: The weights.
        p: The probabilities p(x) of the nodes' tokens.
        child: The node after each; any where there is none.
        inner: Where there is one.
    """

    weight: Float[Tensor, "batch node"]
    p: Float[Tensor, "batch node"]
    child: Int[Tensor, "batch node"]
    inner: Bool[Tensor, "batch node"]


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
    samplings = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})
    chain_only = True

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        """Return what follows from trying all positions of every chain."""
        if tree.max_children == 0 or tree.draft_probs is None:
            return laws_of_certain(tree, target_probs)
        chain = self._weights(tree, target_probs)
        z = torch.empty_like(chain.weight)
        for part in parts_of(tree.width, target_probs[:, 0].numel()):
            p, q = target_probs[:, part], tree.draft_probs[:, part]
            left = torch.addcmul(-q, chain.weight[:, part, None], p).clamp_(min=0)
            torch.sum(left, -1, out=z[:, part])
        if tree.only_law not in IN_TURN:
            certain = tree.law.gather(1, chain.child) == DraftSampling.DETERMINISTIC
            z = torch.where(certain, chain.weight * (1 - chain.p.gather(1, chain.child)), z)
        own = (z / (z + (1 - chain.weight)).clamp_(min=torch.finfo(z.dtype).tiny)).where(chain.inner, chain.weight)
        own[:, 0].fill_(1)
        return Laws(law_of_first_success(tree, own), lambda stop: self._after(tree, target_probs, chain, stop))

    def _after(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        chain: _Chain,
        stop: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """Return the residual of the weighted p, or p after the last node."""
        at = stop[:, None]
        here = Family(tree, target_probs, at)
        node_p, q = here.p[:, 0], here.q[:, 0]
        mass, inner = chain.weight.gather(1, at) * node_p, chain.inner.gather(1, at)
        if tree.only_law in IN_TURN:
            left = torch.addcmul(mass, q, inner.to(q.dtype), value=-1).clamp_(min=0)
        else:
            follows = chain.child.gather(1, at)
            token, law = tree.tokens.gather(1, follows)[:, 0], drafted_laws(tree).gather(1, follows)[:, 0]
            left = residual(mass, q, token, law)
        return normalized(left, node_p, inner)

    def _weights(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> _Chain:
        entry = entries(tree, target_probs.shape[2])
        p = target_probs.flatten(1).gather(1, entry)
        q = p if tree.draft_probs is None else tree.draft_probs.flatten(1).gather(1, entry).to(p.dtype)
        if tree.in_line and tree.is_whole and tree.only_law in IN_TURN:
            child = groups_of(tree.topology).first_child.expand_as(p)
            return _Chain(_capped_products(p, q), p, child, groups_of(tree.topology).has_child.expand_as(p))
        laws = drafted_laws(tree)
        drawn = share(q, laws, tree.only_law)
        if tree.in_line:
            child = groups_of(tree.topology).first_child.expand_as(p)
            return _Chain(_capped_products(p, drawn), p, child, torch.nn.functional.pad(laws[:, 1:] >= 0, (0, 1)))
        parents = tree.parents.clamp(min=0)
        first = torch.zeros_like(p)
        first[:, 0].fill_(1)
        weight = first
        for _ in range(tree.max_depth):
            # The quotient p / q must not come first: it may be infinite while the weight above is 0.
            weight = torch.maximum(chance(weight.gather(1, parents) * p, drawn), first)
        index = torch.arange(tree.width, device=parents.device)
        follower = index.where(tree.valid & (tree.parents >= 0), -1)
        child = torch.full_like(parents, -1).scatter_reduce(1, parents, follower, "amax")
        return _Chain(weight, p, child.clamp(min=0), child >= 0)


def _capped_products(p: Float[Tensor, "batch node"], drawn: Float[Tensor, "batch node"]) -> Float[Tensor, "batch node"]:
    """Returns w_0 = 1 and w_i = min(1, w_{i-1} p_i / drawn_i), of a chain, without a loop: 0 from the first 0 on.

    With the products r_i of all ratios up to i, w_i is r_i over the largest of r_0 = 1, ..., r_i. The products are
    summed as logarithms, in float64, because they may be out of range.
    """
    ratio = (p / drawn).nan_to_num_(nan=0.0, posinf=0.0)  # a token that q excludes is not accepted
    ratio[:, 0].fill_(1)
    product = ratio.log_().cumsum(-1, dtype=torch.float64)
    return (product - product.cummax(-1).values).exp_().to(p.dtype)


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

    samplings = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})

    takes_gaps = True

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        """Return what follows from trying all nodes in post-order."""
        if not has_thresholds(tree) or tree.max_children == 0:
            return super().laws(tree, target_probs)
        tried = descend(tree, target_probs)
        return Laws(law_of_first_success(tree, tried.chance), lambda stop: law_after(tree, target_probs, stop, tried))

    def _try_children(
        self, family: Family, weight: Float[Tensor, "batch some"]
    ) -> tuple[Float[Tensor, "batch some rank"], Float[Tensor, "batch some"], Float[Tensor, "batch some vocab"]]:
        """Try one child after the other."""
        siblings, unpacked = by_rank(family)
        tried = try_in_turn(family.p, family.q, siblings, weight)
        assert tried.weight is not None, "weights were given"
        return unpacked(tried.chances), tried.weight, tried.left
