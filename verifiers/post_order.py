"""Rules that try a node after everything below it: what they share."""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import Exactness
from verifiers.certain import laws_of_certain
from verifiers.families import Family, none_before, rows_of
from verifiers.groups import groups_of
from verifiers.residuals import normalized


class PostOrderVerifier(Verifier):
    """A rule that tries a node after everything below it: depth first, children in sibling order.

    A node comes with a weight: the probability, over the drafts, that something in its subtree is accepted. The root's
    weight is 1. A rule says which weights the children get, and which weight and which law of the next token are left
    to the node itself if everything below it is rejected. The node is then accepted with that weight, the root always.
    The weights depend on the tree alone, so the last node of the path is the first success in post-order. A rule of
    this kind is one function.

    Attributes:
        takes_gaps: Whether that function takes invalid siblings between valid ones, with the law -1.
    """

    exactness = Exactness.EXACT
    takes_gaps: bool = False

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        """Return what follows from trying all nodes."""
        if tree.max_children == 0 or tree.draft_probs is None:
            return laws_of_certain(tree, target_probs)
        weight, chance, left = self._try_all(tree, target_probs)

        def after(stop: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab"]:
            family = Family(tree, target_probs, stop[:, None])
            if tree.topology.static:
                groups = groups_of(tree.topology)
                found = rows_of(torch.cat(left, 1), groups.place_among_parents.index_select(0, stop)[:, None])
            else:
                found = self._try_children(family, weight.gather(1, stop[:, None]))[2]
            if tree.is_whole:
                exists = groups_of(tree.topology).first_child.index_select(0, stop)[:, None] > 0
            else:
                exists = ((tree.parents == stop[:, None]) & tree.valid).any(-1, keepdim=True)
            # After a leaf it is p itself, to the last bit: a row without drafts must not depend on its batch mates.
            return normalized(found, family.p, exists[..., None])[:, 0]

        return Laws(law_of_first_success(tree, chance), after)

    def _try_all(
        self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]
    ) -> tuple[Float[Tensor, "batch node"], Float[Tensor, "batch node"], list[Float[Tensor, "batch some vocab"]]]:
        """Try the children of all nodes, level by level.

        Returns:
            The weight of every node; the probability that it succeeds once it is its turn; and of every level what
            ``_try_children`` says of the next token.
        """
        weight = torch.zeros_like(target_probs[:, :, 0])
        weight[:, 0].fill_(1)
        # What a node is left with, at its index; nodes without children keep what they came with.
        laws, places, owns = [], [], []
        for family, counted in self._levels(tree, target_probs):
            came = weight.gather(1, family.nodes)
            below, own, law = self._try_children(family, came)
            index, nodes = family.index, family.nodes
            if counted is not None:
                # Nodes of other depths fill up the rows, and must change nothing: they write to the root.
                index, nodes = index.where(counted[..., None], 0), nodes.where(counted, 0)
            # Children that do not exist are written to the root, which is overwritten next.
            weight.scatter_(1, index.flatten(1), below.flatten(1))
            weight[:, 0].fill_(1)
            laws.append(law)
            places.append(nodes)
            owns.append(own)
        chance = weight
        if owns:  # p of an invalid node may be anything, and so may be what follows from it
            static = tree.topology.static
            nodes = groups_of(tree.topology).in_turn.expand(len(weight), -1) if static else torch.cat(places, 1)
            chance = weight.scatter(1, nodes, torch.cat(owns, 1))
            chance[:, 0].fill_(1)
        return weight, chance if tree.is_whole else chance.masked_fill(~tree.valid, 0.0), laws

    def _levels(
        self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]
    ) -> Iterator[tuple[Family, Bool[Tensor, "batch some"] | None]]:
        """Yields the nodes of every depth that have children, and which of them count; None if all do."""
        if tree.topology.static:
            for group in groups_of(tree.topology).levels:
                yield Family.of_group(tree, target_probs, group, gaps=self.takes_gaps), None
            return
        has_children = (tree.children >= 0).any(-1)
        for depth in range(tree.max_depth):
            here = has_children & (tree.depth == depth)
            # Nodes of other depths come last.
            nodes = here.byte().topk(_most_parents(tree, here, depth), dim=1).indices
            yield Family(tree, target_probs, nodes), here.gather(1, nodes)

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
            no child); and, given that everything below the nodes was rejected, their own weight (what they came with
            where there is no child) and the law of the next token, which need not be normalized (all 0 stands for p).
        """


def _most_parents(tree: DraftTree, here: Bool[Tensor, "batch node"], depth: int) -> int:
    """Returns a bound of how many nodes of one depth have children, without a look at them.

    Each such node has a child, and every smaller depth has a node.
    """
    return 1 if depth == 0 else max((tree.width - depth) // 2, 1)


def law_of_first_success(tree: DraftTree, chance: Float[Tensor, "batch node"]) -> Float[Tensor, "batch node"]:
    """Returns the law of the first success in post-order: a node follows everything below it and left of it.

    In the chain 0 - 1 - 2 with a second child 3 of node 1, the order is 2, 3, 1, 0.

    Args:
        tree: The tree.
        chance: The probability that each node succeeds once it is its turn: 1 for the root, 0 for invalid nodes.
    """
    fails = 1 - chance
    if tree.topology.static:
        return chance * fails[:, None].masked_fill(groups_of(tree.topology).not_earlier, 1.0).prod(-1)
    above = tree.ancestors & ~torch.eye(tree.width, dtype=torch.bool, device=chance.device)
    # The probability that nothing strictly below the node succeeds.
    below = torch.where(above, fails[:, :, None], 1.0).prod(1)
    turn = below
    if tree.max_children > 1:
        siblings = none_before(tree, below * fails)
        turn = below * torch.where(tree.ancestors, siblings[:, None], 1.0).prod(-1)
    return turn * chance
