"""Rules that decide level by level, from the root down: what they share."""

from abc import abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import Exactness
from verifiers.certain import law_of_steps, laws_of_certain
from verifiers.families import Family, none_before, rows_of
from verifiers.groups import groups_of

__all__ = ["LevelVerifier", "chances_in_turn", "law_in_turn", "law_of_levels", "law_of_steps"]


class LevelVerifier(Verifier):
    """A rule that decides at every node by itself which child is accepted, if any.

    A path goes down while a child is accepted. The children of a node are tried in sibling order; if all are rejected,
    the path ends there and the next token is drawn from what is left of p. A rule of this kind is one function.
    """

    exactness = Exactness.EXACT

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        """Return what follows from trying the children of all nodes."""
        if tree.max_children == 0 or tree.draft_probs is None:
            return laws_of_certain(tree, target_probs)
        family = Family.of_parents(tree, target_probs)
        chances, left = self._try_children(family)

        def after(stop: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab"]:
            found, place = (family.nodes == stop[:, None]).max(-1)
            return rows_of(left, place).where(found[:, None], rows_of(target_probs, stop))

        if not tree.topology.static:
            return Laws(law_of_levels(family, chances_in_turn(chances)), after)
        # Children that do not exist are written to the root, which is not read.
        chance = torch.zeros_like(target_probs[:, :, 0]).scatter_(1, family.flat_index, chances.flatten(1))
        # p of an invalid node may be anything.
        return Laws(law_in_turn(tree, chance if tree.is_whole else chance.masked_fill_(~tree.valid, 0.0)), after)

    @abstractmethod
    def _try_children(
        self, family: Family
    ) -> tuple[Float[Tensor, "batch some rank"], Float[Tensor, "batch some vocab"]]:
        """Try the children of some nodes.

        Returns:
            The probability of accepting every child, given that its earlier siblings were rejected (0 where there is no
            child); and the law of the next token, given that all children were rejected (p where there is no child).
        """


def law_in_turn(tree: DraftTree, chance: Float[Tensor, "batch node"]) -> Float[Tensor, "batch node"]:
    """Returns the law of the last node if siblings are tried in turn.

    Args:
        tree: The tree.
        chance: The probability of accepting each node, given that its parent and none of its earlier siblings was
            accepted; 0 at invalid nodes. The root's is not read.
    """
    if not tree.topology.static:
        step = chance * none_before(tree, 1 - chance)
        step[:, 0].fill_(1)
        return law_of_steps(tree, step)
    groups = groups_of(tree.topology)
    # Every node is accepted or rejected; the law is a product of some of these probabilities.
    both = torch.addcmul(groups.offsets, chance[:, None], groups.signs)
    return both[:, None].masked_fill(groups.no_factor, 1.0).flatten(2).prod(-1)


def chances_in_turn(chances: Float[Tensor, "*rows rank"]) -> Float[Tensor, "*rows rank"]:
    """Returns the probability that each sibling is the accepted one.

    Args:
        chances: The probability of accepting each sibling, given that those before it were rejected.
    """
    if chances.shape[-1] < 2:
        return chances
    rejected = (1 - chances).cumprod(-1)[..., :-1]
    return chances * torch.nn.functional.pad(rejected, (1, 0), value=1.0)


def law_of_levels(family: Family, accepted: Float[Tensor, "batch some rank"]) -> Float[Tensor, "batch node"]:
    """Returns the law of the last node.

    Args:
        family: All nodes that have children.
        accepted: The probability that a path which has reached the node goes on to each child; 0 where there is none.
    """
    step = torch.zeros_like(family.target_probs[:, :, 0])
    # Children that do not exist are written to the root, which is overwritten next.
    step.scatter_(1, family.flat_index, accepted.flatten(1))
    step[:, 0].fill_(1)
    if not family.tree.is_whole:  # p of an invalid node may be anything
        step.masked_fill_(~family.tree.valid, 0.0)
    return law_of_steps(family.tree, step)
