"""Rules that try a node after everything below it: what they share."""

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.acceptance import path_to
from specdec.interfaces import Verifier
from specdec.tree import DraftTree
from specdec.types import Exactness
from verifiers.families import Family


class PostOrderVerifier(Verifier):
    """A rule that tries a node after everything below it: depth first, children in sibling order.

    A node comes with a weight: the probability, over the drafts, that something in its subtree is accepted. The root's
    weight is 1. A rule says which weights the children get, and which weight and which law of the next token are left
    to the node itself if everything below it is rejected. The node is then accepted with that weight, the root always.
    The weights depend on the tree alone, so the last node of the path is the first success in post-order. A rule of
    this kind is one function.
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
            # Nodes of other depths come last and fill up the rows; they change nothing.
            family = Family(tree, target_probs, here.byte().topk(_most_parents(tree, here, depth), dim=1).indices)
            nodes = family.nodes
            counted = here.gather(1, nodes)
            below, own, _ = self._try_children(family, weight.gather(1, nodes))
            chance.scatter_(1, nodes, own.where(counted, chance.gather(1, nodes)))
            # Children that do not exist are written to the root, which is overwritten next.
            index = family.index.where(counted[..., None], 0)
            weight.scatter_(1, index.flatten(1), below.flatten(1))
            weight[:, 0] = 1
        chance = chance.where(has_children, weight)
        chance[:, 0] = 1
        return law_of_first_success(tree, chance)

    def next_law(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        stop: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """Law of the token that follows: what is left of p at ``stop`` after all its children were rejected."""
        path = path_to(tree, stop)
        node = torch.zeros_like(stop)[:, None]
        weight = torch.ones_like(target_probs[:, :1, 0])
        result = target_probs[:, 0]
        for depth in range(tree.max_depth + 1):
            family = Family(tree, target_probs, node)
            below, _, next_law = self._try_children(family, weight)
            result = next_law[:, 0].where(node == stop[:, None], result)
            if depth == tree.max_depth:
                break
            goal = path[:, depth, None]
            on_path = family.index == goal[..., None]
            # Rows that have arrived at ``stop`` stay there.
            goes_on = goal >= 0
            weight = torch.where(goes_on, torch.where(on_path, below, 0.0).sum(-1), weight)
            node = torch.where(goes_on, goal, node)
        return result

    @abstractmethod
    def _try_children(
        self, family: Family, weight: Float[Tensor, "batch some"]
    ) -> tuple[Float[Tensor, "batch some rank"], Float[Tensor, "batch some"], Float[Tensor, "batch some vocab"]]:
        """Try the children of some nodes.

        Args:
            family: The nodes.
            weight: Their weights: so much of p may be emitted below each.

        Returns:
            The weight of every child, given that everything below its earlier siblings was rejected (0 where there is
            no child); and, given that everything below the nodes was rejected, their own weight and the law of the next
            token.
        """


def _most_parents(tree: DraftTree, here: Bool[Tensor, "batch node"], depth: int) -> int:
    """Returns a bound of how many nodes of one depth have children."""
    if here.device.type == "cpu":
        return max(int(here.sum(-1).amax()), 1)
    # Looking would synchronize. Each such node has a child, and every smaller depth has a node: that bounds them.
    return 1 if depth == 0 else max((tree.width - depth) // 2, 1)


def law_of_first_success(tree: DraftTree, chance: Float[Tensor, "batch node"]) -> Float[Tensor, "batch node"]:
    """Returns the law of the first success in post-order: a node follows everything below it and left of it.

    In the chain 0 - 1 - 2 with a second child 3 of node 1, the order is 2, 3, 1, 0.

    Args:
        tree: The tree.
        chance: The probability that each node succeeds once it is its turn: 1 for the root, 0 for invalid nodes.
    """
    fails = 1 - chance
    itself = torch.eye(tree.width, dtype=torch.bool, device=chance.device)
    # The probability that nothing strictly below the node succeeds.
    below = torch.where(tree.ancestors & ~itself, fails[:, :, None], 1.0).prod(1)
    turn = below
    if tree.max_children > 1:
        subtree = below * fails
        earlier = (tree.parents[:, :, None] == tree.parents[:, None, :]).tril(-1)
        siblings = torch.where(earlier, subtree[:, None], 1.0).prod(-1)
        turn = below * torch.where(tree.ancestors, siblings[:, None], 1.0).prod(-1)
    return turn * chance
