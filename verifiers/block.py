"""Verification of whole blocks, from the leaves to the root: a token may be saved by those drafted after it."""

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.acceptance import path_to
from specdec.interfaces import Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.siblings import acceptance, normalized, rest, row_index, without


class BlockVerifier(Verifier):
    """Block verification of chains (Sun et al. 2024, arXiv 2403.10444, algorithm 2).

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), position i < n is acceptable with probability
    h_i = Z_i / (Z_i + 1 - w_i), where Z_i = sum [w_i p - q]+ is taken over the token after it, and the last one with
    h_n = w_n, independently. The path ends at the last acceptable position, even where earlier ones are not; the next
    token is drawn from N([w_i p - q]+), or from p after the last. Then a path reaches position i with probability
    w_i, which is the most that any lossless rule can reach by looking at one chain, and never less than token by
    token. At temperature 0, and for ``DETERMINISTIC`` drafts (one-hot q), it equals ``RejectionVerifier``.
    """

    exactness = Exactness.EXACT
    laws = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})
    chain_only = True

    def stop_law(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch node"]:
        """Probability, given this chain, that the accepted path ends at each node."""
        weight, p, child, inner = self._weights(tree, target_probs)
        certain = (tree.law == DraftSampling.DETERMINISTIC).gather(1, child)
        # What is left of w p beside a one-hot q.
        z = weight * (1 - p.gather(1, child))
        if tree.draft_probs is not None:
            left = torch.addcmul(-tree.draft_probs, weight[..., None], target_probs).clamp_(min=0).sum(-1)
            z = z.where(certain, left)
        # In this order: z may be far below the precision of 1.
        chance = (z / (z + (1 - weight))).where(z > 0, 0.0).where(inner, weight)
        chance[:, 0] = 1
        return _last_to_first(tree, chance)

    def next_law(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        stop: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """Law of the token that follows: the residual of the weighted p, or p after the last node."""
        weight, _, child, inner = self._weights(tree, target_probs)
        row, at = row_index(stop, tree.width), stop[:, None]
        node_p = target_probs.flatten(0, 1).index_select(0, row)
        drafted = target_probs if tree.draft_probs is None else tree.draft_probs
        q = drafted.flatten(0, 1).index_select(0, row).to(node_p.dtype)
        follows = child.gather(1, at)
        token, law = tree.tokens.gather(1, follows)[:, 0], tree.law.gather(1, follows)[:, 0]
        left = rest(weight.gather(1, at) * node_p, q, token, law)
        return normalized(left, node_p, inner.gather(1, at))

    def _weights(
        self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]
    ) -> tuple[
        Float[Tensor, "batch node"], Float[Tensor, "batch node"], Int[Tensor, "batch node"], Bool[Tensor, "batch node"]
    ]:
        """The weights and p(x) of all nodes, the nodes after them (any where there is none), and where there is one."""
        parents = tree.parents.clamp(min=0)
        entry = torch.add(tree.tokens, parents, alpha=target_probs.shape[2])
        p = target_probs.flatten(1).gather(1, entry)
        q = p if tree.draft_probs is None else tree.draft_probs.flatten(1).gather(1, entry).to(p.dtype)
        first = torch.zeros_like(p)
        first[:, 0] = 1
        weight = first
        for _ in range(tree.max_depth):
            above = weight.gather(1, parents)
            # Not the quotient first: it may be infinite, and the weight above zero.
            weight = torch.maximum(acceptance(above * p, q, tree.law).where(tree.valid, 0.0), first)
        index = torch.arange(tree.width, device=parents.device)
        follower = index.where(tree.valid & (tree.parents >= 0), -1)
        child = torch.full_like(parents, -1).scatter_reduce(1, parents, follower, "amax")
        return weight, p, child.clamp(min=0), child >= 0


class PostOrderVerifier(Verifier):
    """What the rules share that try a node after all that is below it.

    Depth first, children in sibling order. A node comes with a weight, the probability over the drafts that something
    in its subtree is accepted; the root's is 1. A rule says what weights the children get, and what weight and law are
    left to the node itself once all of them have failed. A node is then accepted with its weight, the root always, and
    the next token is drawn from its law. The weights depend on the tree alone. So the law of the last node is that of
    the first success in post-order.
    """

    exactness = Exactness.EXACT

    def stop_law(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch node"]:
        """Probability, given this tree, that the accepted path ends at each node."""
        weight = torch.zeros_like(target_probs[:, :, 0])
        weight[:, 0] = 1
        chance = torch.zeros_like(weight)
        has_children = (tree.children >= 0).any(-1)
        for depth in range(tree.max_depth):
            here = has_children & (tree.depth == depth)
            # Nodes that are not here, to fill up the rows, come last and change nothing.
            nodes = here.byte().topk(_most_parents(tree, here, depth), dim=1).indices
            counted = here.gather(1, nodes)
            below, own, _ = self._visit(tree, target_probs, nodes, weight.gather(1, nodes))
            chance.scatter_(1, nodes, own.where(counted, chance.gather(1, nodes)))
            children = tree.children.gather(1, nodes[..., None].expand_as(below))
            # Those that are none go to the root.
            index = children.where(counted[..., None] & (children >= 0), 0)
            weight.scatter_(1, index.flatten(1), below.flatten(1))
            weight[:, 0] = 1
        chance = chance.where(has_children, weight)
        chance[:, 0] = 1
        return _last_to_first(tree, chance)

    def next_law(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        stop: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """Law of the token that follows: what is left of p when all children of ``stop`` have failed."""
        path = path_to(tree, stop)
        node = torch.zeros_like(stop)[:, None]
        weight = torch.ones_like(target_probs[:, :1, 0])
        result = target_probs[:, 0]
        for depth in range(tree.max_depth + 1):
            below, _, law = self._visit(tree, target_probs, node, weight)
            result = law[:, 0].where(node == stop[:, None], result)
            if depth == tree.max_depth:
                break
            goal = path[:, depth, None]
            on_path = tree.children.gather(1, node[..., None].expand(-1, -1, tree.max_children)) == goal[..., None]
            # Rows that have arrived stay.
            goes_on = goal >= 0
            weight = torch.where(goes_on, torch.where(on_path, below, 0.0).sum(-1), weight)
            node = torch.where(goes_on, goal, node)
        return result

    @abstractmethod
    def _visit(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        nodes: Int[Tensor, "batch some"],
        weight: Float[Tensor, "batch some"],
    ) -> tuple[Float[Tensor, "batch some rank"], Float[Tensor, "batch some"], Float[Tensor, "batch some vocab"]]:
        """Try all children of some nodes in vain.

        Args:
            tree: The tree.
            target_probs: p at every node.
            nodes: The nodes.
            weight: Their weights.

        Returns:
            The children's weights (0 where there is no child), and the nodes' own weight and law in the end.
        """


class TraversalVerifier(PostOrderVerifier):
    """Traversal verification of trees (Weng et al. 2025, arXiv 2505.12398, algorithm 2).

    Depth first, children in the order in which they were drawn, a node after all that is below it. A node v comes
    with a weight w and its p; its child x gets the weight min(1, w p(x) / q(x)). If nothing in the child's subtree is
    accepted, p becomes N([w p - q]+) and w becomes Z / (Z + 1 - w) with Z = sum [w p - q]+, and the next child is
    tried. When all have failed, v itself is accepted with probability w (the root always), and the next token drawn
    from p. A node's subtree is then accepted from with probability w, over the drafts, whatever its shape. On a chain
    it is block verification; on trees it accepts more than ``RejectionVerifier``, though it is not optimal there.

    The law of every child says what q is, so siblings may mix laws.
    """

    laws = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})

    def _visit(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        nodes: Int[Tensor, "batch some"],
        weight: Float[Tensor, "batch some"],
    ) -> tuple[Float[Tensor, "batch some rank"], Float[Tensor, "batch some"], Float[Tensor, "batch some vocab"]]:
        """One child after the other."""
        row = row_index(nodes, tree.width)
        children = tree.children.gather(1, nodes[..., None].expand(-1, -1, tree.max_children))
        exists, index = children >= 0, children.clamp(min=0).flatten(1)
        tokens = tree.tokens.gather(1, index).view_as(children)
        laws = tree.law.gather(1, index).view_as(children).where(exists, -1)
        p = node_p = target_probs.flatten(0, 1).index_select(0, row).unflatten(0, nodes.shape)
        drafted = target_probs if tree.draft_probs is None else tree.draft_probs
        q = drafted.flatten(0, 1).index_select(0, row).unflatten(0, nodes.shape).to(p.dtype)
        left = draft_law = q  # draft_law: what the child was drawn from, unless it is deterministic
        weights = torch.zeros_like(children, dtype=p.dtype)
        for rank in range(tree.max_children):
            token, law, some = tokens[..., rank], laws[..., rank], exists[..., rank]
            if rank > 0:
                left = without(left, tokens[..., rank - 1])
                draft_law = q.where((law == DraftSampling.IID)[..., None], left)
            entry = token[..., None]
            mass = weight * p.gather(-1, entry)[..., 0]
            weights[..., rank] = acceptance(mass, draft_law.gather(-1, entry)[..., 0], law).where(some, 0.0)
            residual = rest(weight[..., None] * p, draft_law, token, law)
            z = residual.sum(-1)
            p = normalized(residual, node_p).where(some[..., None], p)
            # In this order: z may be far below the precision of 1.
            weight = (z / (z + (1 - weight))).where(z > 0, 0.0).where(some, weight)
        return weights, weight, p


def _most_parents(tree: DraftTree, here: Bool[Tensor, "batch node"], depth: int) -> int:
    """How many nodes of one depth have children, at most."""
    if here.device.type == "cpu":
        return max(int(here.sum(-1).amax()), 1)
    # Looking would synchronize. Each has a child, and all shallower depths a node: that bounds them.
    return 1 if depth == 0 else max((tree.width - depth) // 2, 1)


def _last_to_first(tree: DraftTree, chance: Float[Tensor, "batch node"]) -> Float[Tensor, "batch node"]:
    """Law of the first success in post-order: every node after all that is below it and left of it.

    In the chain 0 - 1 - 2 with a second child 3 of node 1, the order is 2, 3, 1, 0.

    Args:
        tree: The tree.
        chance: Probability that each node succeeds once it is its turn: 1 for the root, 0 for invalid nodes.
    """
    fails = 1 - chance
    itself = torch.eye(tree.width, dtype=torch.bool, device=chance.device)
    # Nothing strictly below succeeds.
    below = torch.where(tree.ancestors & ~itself, fails[:, :, None], 1.0).prod(1)
    turn = below
    if tree.max_children > 1:
        subtree = below * fails
        earlier = (tree.parents[:, :, None] == tree.parents[:, None, :]).tril(-1)
        siblings = torch.where(earlier, subtree[:, None], 1.0).prod(-1)
        turn = below * torch.where(tree.ancestors, siblings[:, None], 1.0).prod(-1)
    return turn * chance
