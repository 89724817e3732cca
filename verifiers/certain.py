"""Drafts that were chosen without randomness: every rule accepts a child with its probability under p."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.acceptance import ends_at_root
from specdec.interfaces import Laws
from specdec.tree import DraftTree
from verifiers.families import entries, rows_of
from verifiers.residuals import normalized


def _stop_of_certain(tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch node"]:
    """Returns the law of the last node if every node is ``DETERMINISTIC``: the walk along draws from p."""
    entry = entries(tree, target_probs.shape[2])
    p = target_probs.flatten(1).gather(1, entry)
    step = p.masked_fill(_repeated(tree, entry) if tree.max_children > 1 else ~tree.valid, 0.0)
    step[:, 0].fill_(1)
    return law_of_steps(tree, step)


def laws_of_certain(tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
    """Return the laws of a tree whose nodes are all ``DETERMINISTIC``."""
    if tree.max_children == 0:
        return Laws(ends_at_root(target_probs), lambda stop: rows_of(target_probs, stop))
    return Laws(_stop_of_certain(tree, target_probs), lambda stop: _after_certain(tree, target_probs, stop))


def _after_certain(
    tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], stop: Int[Tensor, " batch"]
) -> Float[Tensor, "batch vocab"]:
    """Returns the law of the next token if every node is ``DETERMINISTIC``: p without the children of ``stop``."""
    node_p = rows_of(target_probs, stop)
    below = (tree.parents == stop[:, None]) & tree.valid
    # Adding minus infinity, not writing zero: nodes elsewhere may have the same token and would undo a write.
    certain = torch.zeros_like(tree.tokens, dtype=node_p.dtype).masked_fill_(below, -torch.inf)
    left = node_p.scatter_add(1, tree.tokens, certain).clamp_(min=0)
    return normalized(left, node_p, below.any(-1, keepdim=True))


def _repeated(tree: DraftTree, entry: Int[Tensor, "batch node"]) -> Bool[Tensor, "batch node"]:
    """Returns the nodes that have the token of an earlier sibling, and the invalid ones.

    Args:
        tree: The tree.
        entry: One number for every pair of parent and token.
    """
    # The root and all invalid nodes get the same number, so that invalid nodes count as repetitions of the root.
    entry = entry.where(tree.valid & (tree.parents >= 0), -1)
    return (entry[:, :, None] == entry[:, None, :]).tril_(-1).any(-1)


def law_of_steps(tree: DraftTree, step: Float[Tensor, "batch node"]) -> Float[Tensor, "batch node"]:
    """Returns the law of the last node.

    Args:
        tree: The tree.
        step: The probability that a path which has reached a node's parent goes on to the node; 1 at the root.
    """
    if tree.in_line:
        reach = step.cumprod(-1)
        return reach - torch.nn.functional.pad(reach[:, 1:], (0, 1))
    reach = torch.where(tree.ancestors, step[:, None], 1.0).prod(-1)
    # A path that reaches a node and goes on to none of its children ends there.
    return reach.scatter_add(1, tree.parents.clamp(min=0)[:, 1:], -reach[:, 1:]).clamp_(min=0)
