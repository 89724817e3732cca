"""What the rules share: what a child was drawn from among its siblings, and what is left of a law after a rejection."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from specdec.interfaces import Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness


def acceptance(
    p: Float[Tensor, "*rows"], q: Float[Tensor, "*rows"], law: Int8[Tensor, "*rows"]
) -> Float[Tensor, "*rows"]:
    """Probability of accepting a token that has these probabilities; 0 where q is."""
    q = q.where(law != DraftSampling.DETERMINISTIC, 1.0)
    return (p / q).clamp(max=1).where(q > 0, 0.0)


def rest(
    p: Float[Tensor, "*rows vocab"],
    q: Float[Tensor, "*rows vocab"],
    token: Int[Tensor, "*rows"],
    law: Int8[Tensor, "*rows"],
) -> Float[Tensor, "*rows vocab"]:
    """[p - q]+, with a one-hot q where a child is deterministic.

    Args:
        p: What is to be emitted, of total mass at most 1.
        q: What the child was drawn from; not read where it is deterministic.
        token: The child's token.
        law: The child's law, -1 where there is no child (p stays then).
    """
    left = torch.where((law > DraftSampling.DETERMINISTIC)[..., None], p - q, p)
    certain = torch.where(law == DraftSampling.DETERMINISTIC, -torch.inf, 0.0).to(p.dtype)
    left.scatter_add_(-1, token[..., None], certain[..., None])
    return left.clamp_(min=0)


def normalized(
    weights: Float[Tensor, "*rows vocab"],
    fallback: Float[Tensor, "*rows vocab"],
    condition: Bool[Tensor, "*rows 1"] | None = None,
) -> Float[Tensor, "*rows vocab"]:
    """Weights as a law; the fallback where they are all zero (or NaN) or the condition does not hold."""
    total = weights.sum(-1, keepdim=True)
    usable = total > 0
    if condition is not None:
        usable &= condition
    return (weights / total).where(usable, fallback)


def without(q: Float[Tensor, "*rows vocab"], token: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows vocab"]:
    """A distribution without one token, normalized; all zero where nothing is left."""
    left = q.scatter(-1, token[..., None], 0.0)
    total = left.sum(-1, keepdim=True)
    return left / total.where(total > 0, 1.0)


def row_index(nodes: Int[Tensor, " batch"] | Int[Tensor, "batch some"], count: int) -> Int[Tensor, " row"]:
    """Where the nodes of every row stand in a table whose batch and node axes (of this length) are flattened."""
    offsets = torch.arange(0, nodes.shape[0] * count, count, device=nodes.device)
    return (nodes + offsets.view(-1, *[1] * (nodes.ndim - 1))).flatten()


def children_of(
    tree: DraftTree, node: Int[Tensor, " batch"]
) -> tuple[Int[Tensor, "batch rank"], Bool[Tensor, "batch rank"]]:
    """Valid children of one node per row in sibling order, any index where there is none; and where there is one."""
    if tree.max_children == 1:
        # Cheaper than the table of all children, which a chain does not need otherwise.
        exists, children = ((tree.parents == node[:, None]) & tree.valid).max(dim=1, keepdim=True)
        return children, exists
    children = tree.children.gather(1, node[:, None, None].expand(-1, -1, tree.max_children))[:, 0]
    return children.clamp(min=0), children >= 0


@dataclass(frozen=True, eq=False)
class Family:
    """Some nodes and their children, as the rules look at them that update p from child to child.

    Attributes:
        children: The children in sibling order, -1 where there is none.
        tokens: Their tokens (any where there is no child).
        laws: How they were drawn; -1 where there is no child.
        p: p at the nodes.
        q: What the children were drawn from; any numbers where all are deterministic.
    """

    children: Int[Tensor, "batch some rank"]
    tokens: Int[Tensor, "batch some rank"]
    laws: Int8[Tensor, "batch some rank"]
    p: Float[Tensor, "batch some vocab"]
    q: Float[Tensor, "batch some vocab"]

    @classmethod
    def of(
        cls, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], nodes: Int[Tensor, "batch some"]
    ) -> "Family":
        """Look up everything about some nodes at once."""
        children = tree.children.gather(1, nodes[..., None].expand(-1, -1, tree.max_children))
        index, row = children.clamp(min=0).flatten(1), row_index(nodes, tree.width)
        drafted = target_probs if tree.draft_probs is None else tree.draft_probs
        p, q = (table.flatten(0, 1).index_select(0, row).unflatten(0, nodes.shape) for table in (target_probs, drafted))
        return cls(
            children=children,
            tokens=tree.tokens.gather(1, index).view_as(children),
            laws=tree.law.gather(1, index).view_as(children).where(children >= 0, -1),
            p=p,
            q=q.to(p.dtype),
        )


def families(tree: DraftTree) -> tuple[Int[Tensor, "batch some"], Int[Tensor, "batch some rank"]]:
    """Nodes that have children, and their children, -1 where there is none; other nodes fill up the rows."""
    has_children = (tree.children >= 0).any(-1)
    # On the host a look at the number is free; elsewhere it would synchronize.
    some = int(has_children.sum(-1).amax()) if has_children.device.type == "cpu" else tree.width - 1
    nodes = has_children.byte().topk(max(some, 1), dim=1).indices
    return nodes, tree.children.gather(1, nodes[..., None].expand(-1, -1, tree.max_children))


def chances_in_turn(weights: Float[Tensor, "*rows rank"]) -> Float[Tensor, "*rows rank"]:
    """Probability that each sibling is the one accepted, from that of each given that those before it have failed."""
    rejected = (1 - weights).cumprod(-1)[..., :-1]
    return weights * torch.nn.functional.pad(rejected, (1, 0), value=1.0)


def law_of_stop(tree: DraftTree, step: Float[Tensor, "batch node"]) -> Float[Tensor, "batch node"]:
    """Law of the last node where every level decides for itself.

    Args:
        tree: The tree.
        step: Probability that a path which has reached a node's parent goes on to the node; 1 at the root.
    """
    if tree.in_line:
        reach = step.cumprod(-1)
        return reach - torch.nn.functional.pad(reach[:, 1:], (0, 1))
    reach = torch.where(tree.ancestors, step[:, None], 1.0).prod(-1)
    # A path that reaches a node and goes on to none of its children ends there.
    return reach.scatter_add(1, tree.parents.clamp(min=0)[:, 1:], -reach[:, 1:]).clamp_(min=0)


def longest_path(
    tree: DraftTree, p: Float[Tensor, "batch node"], plausible: Bool[Tensor, "batch node"]
) -> Float[Tensor, "batch node"]:
    """All mass at the end of the longest path of plausible tokens; the most probable of the longest.

    Args:
        tree: The tree.
        p: Probability of every node's token, given the path above it.
        plausible: Which tokens may be accepted; not read at the root and at invalid nodes.
    """
    plausible = plausible & tree.valid
    plausible[:, 0] = True
    accepted = (plausible[:, None] | ~tree.ancestors).all(-1)
    log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log()
    log_p[:, 0] = 0
    likelihood = torch.where(tree.ancestors, log_p[:, None], 0.0).sum(-1)
    longest = tree.depth.where(accepted, -1).amax(-1, keepdim=True)
    stop = likelihood.where(accepted & (tree.depth == longest), -torch.inf).argmax(-1, keepdim=True)
    return torch.zeros_like(p).scatter_(1, stop, 1.0)


class LevelVerifier(Verifier):
    """A rule whose levels decide one after another, from the root down, each by itself.

    A node's children are tried in turn; what is left of p when all have failed is the law of the next token.
    """

    exactness = Exactness.EXACT

    def stop_law(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch node"]:
        """Probability, given this tree, that the accepted path ends at each node."""
        step = torch.zeros_like(target_probs[:, :, 0])
        if tree.max_children > 0:
            nodes, children = families(tree)
            weights, _, _ = self._visit(tree, target_probs, nodes, torch.ones_like(nodes, dtype=step.dtype))
            # Children that do not exist go to the root.
            step.scatter_(1, children.clamp(min=0).flatten(1), chances_in_turn(weights).flatten(1))
        step[:, 0].fill_(1)
        return law_of_stop(tree, step)

    def next_law(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        stop: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """Law of the token that follows: what is left of p at ``stop`` when all its children have failed."""
        one = torch.ones_like(target_probs[:, :1, 0])
        return self._visit(tree, target_probs, stop[:, None], one)[2][:, 0]

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
            weight: How much of p may be spent below each: 1 here.

        Returns:
            The probability of every child, given that its earlier siblings have failed (0 where there is no child); and
            what is left of the weight, and of p, once all have failed.
        """
