"""Draft trees with fewer nodes: in another order, and cut off behind the last one that is needed."""

import torch
from jaxtyping import Int
from torch import Tensor

from specdec.host import can_look
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.tree_parts import size_for


def reordered(tree: DraftTree, order: Int[Tensor, "batch node"]) -> DraftTree:
    """Return the same trees with their nodes in another order.

    The chain 0 - 1 - 2 with a second child 3 of node 1, in the order 0, 1, 3, 2::

        parents before   -1 0 1 1
        parents after    -1 0 1 1   (node 2 is the former node 3)

    ``order`` has the present numbers of the nodes in their new order, the root first and every parent before its
    children. Nodes that are not valid get the root's token.
    """
    number = torch.empty_like(order).scatter_(1, order, torch.arange(tree.width, device=order.device).expand_as(order))
    above = tree.parents.gather(1, order)
    valid = tree.valid.gather(1, order)
    q = tree.draft_probs
    return DraftTree.build(
        tree.tokens.gather(1, order).where(valid, tree.tokens[:, :1]),
        number.gather(1, above.clamp(min=0)).where(above >= 0, -1),
        valid=valid,
        sampling=tree.law.gather(1, order) if tree.only_law is None else tree.only_law,
        draft_probs=None if q is None else q.gather(1, order[:, :, None].expand(-1, -1, q.shape[2])),
        max_depth=tree.max_depth,
        max_children=tree.max_children,
    )


def without_tail(tree: DraftTree) -> DraftTree:
    """Return the trees without the columns behind the last valid node of any row, rounded up to one of few sizes.

    The host looks at one number, which on a GPU makes it wait for the draft. That is worth it: what is cut off need not
    be verified.
    """
    columns = torch.arange(tree.width, device=tree.tokens.device)
    needed = int((columns * tree.valid).amax())
    in_line = tree.in_line or needed == 0
    count = 1 + (needed if in_line else min(size_for(needed), tree.width - 1))
    if count == tree.width and not tree.in_line:
        return tree
    law = tree.law[:, :count] if tree.only_law is None else tree.only_law
    q = None if tree.draft_probs is None else tree.draft_probs[:, :count]
    tokens, valid = tree.tokens[:, :count], tree.valid[:, :count]
    if in_line:
        whole = can_look(valid) and bool(valid.all())
        topology = Topology.chain(count, tokens.device)
        return DraftTree.of_topology(topology, tokens, sampling=law, draft_probs=q, valid=None if whole else valid)
    return DraftTree.build(
        tokens,
        tree.parents[:, :count],
        valid=valid,
        sampling=law,
        draft_probs=q,
        max_depth=min(tree.max_depth, count - 1),
        max_children=min(tree.max_children, count - 1),
    )
