"""Keeps processes that share a model in step: what the first of them decides counts for all.

Under tensor parallelism every process plays the whole round. They compute the same logits, because a collective sum
returns the same bits to all of them, and they draw with the same random numbers. But nothing guarantees it: a kernel
that is not deterministic can round differently in one process. One token of difference would give the processes trees
and lengths of their own, and their next common forward would hang or mix them up. So three small things are sent from
the first process in every round: the tree before it is verified, the verdict, and what the host is told. They take a
few hundred bytes; the logits, which would do too, take megabytes. What stays apart in the other processes (q, hidden
states, a drafter's cache) decides nothing: only the first process's trees and verdicts count.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from jaxtyping import Bool
from torch import Tensor

from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import Verdict


class Agreement:
    """For a model that this process has for itself: there is nothing to agree on.

    Attributes:
        shared: Whether other processes take part in every forward.
    """

    shared = False

    def on_tree(self, tree: DraftTree, *, fixed: bool) -> DraftTree:
        """Return the trees that all processes verify.

        Unless the trees of all processes have ``fixed`` sizes, the first process sends its sizes first, and the others
        wait for these numbers.
        """
        return tree

    def on_verdict(self, verdict: Verdict) -> Verdict:
        """Return the verdict that all processes commit."""
        return verdict

    def on_numbers(self, numbers: Tensor) -> Tensor:
        """Return the first process's numbers, for a tensor that has the same shape in all processes."""
        return numbers

    def on_marks(self, marks: Bool[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Return the first process's marks, likewise."""
        return marks


ALONE = Agreement()
"""How a process agrees with itself."""


class GroupAgreement(Agreement):
    """For a model that several processes share, a group of ``torch.distributed``."""

    shared = True

    def __init__(self, group: Any):
        self._group = group
        self._leads = torch.distributed.get_rank(group) == 0

    def on_tree(self, tree: DraftTree, *, fixed: bool) -> DraftTree:
        """See ``Agreement.on_tree``. Laws and q stay a process's own: only the first one's verdict counts."""
        if fixed:
            parents = [] if tree.is_static else [tree.parents]
            tokens, valid, *parents = self.on_numbers(torch.stack([tree.tokens, tree.valid.long(), *parents]))
            topology = tree.topology
            if parents:
                bounds = {"max_depth": tree.max_depth, "max_children": tree.max_children}
                topology = Topology.from_parents(parents[0], **bounds)
            return tree if self._leads else replace(tree, tokens=tokens, valid=valid.bool(), topology=topology)
        bounds = torch.tensor([tree.width, tree.max_depth, tree.max_children], device=tree.tokens.device)
        width, depth, children = self.on_numbers(bounds).tolist()
        mine = torch.stack([tree.tokens, tree.parents, tree.valid.long()])
        if self._leads:
            self.on_numbers(mine)
            return tree
        tokens, parents, valid = self.on_numbers(mine.new_empty(3, mine.shape[1], width))
        valid = valid.bool()
        if width != tree.width:
            return DraftTree.build(tokens, parents, valid=valid, max_depth=depth, max_children=children)
        topology = Topology.from_parents(parents, max_depth=depth, max_children=children)
        return replace(tree, tokens=tokens, topology=topology, valid=valid)

    def on_verdict(self, verdict: Verdict) -> Verdict:
        """See ``Agreement.on_verdict``; all numbers of a row travel together."""
        fields = (verdict.num_accepted, verdict.next_token, verdict.valid, verdict.expected_accepted)
        mine = torch.cat([verdict.path.double(), *[field.double()[:, None] for field in fields]], dim=1)
        theirs = self.on_numbers(mine)
        path, rest = theirs[:, :-4], theirs[:, -4:]
        return replace(
            verdict,
            path=path.to(verdict.path.dtype),
            num_accepted=rest[:, 0].to(verdict.num_accepted.dtype),
            next_token=rest[:, 1].to(verdict.next_token.dtype),
            valid=rest[:, 2].to(verdict.valid.dtype),
            expected_accepted=rest[:, 3].to(verdict.expected_accepted.dtype),
        )

    def on_numbers(self, numbers: Tensor) -> Tensor:
        sent = numbers.clone(memory_format=torch.contiguous_format)
        torch.distributed.broadcast(sent, group=self._group, group_src=0)
        return sent

    def on_marks(self, marks: Bool[Tensor, "..."]) -> Bool[Tensor, "..."]:
        return self.on_numbers(marks.long()).bool()


def agreement_for(group: Any | None) -> Agreement:
    """Return how the processes of a group agree; for None, without asking anybody."""
    return ALONE if group is None else GroupAgreement(group)
