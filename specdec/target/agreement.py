"""Keeps processes that share a model in step: what the first of them decides counts for all.

Under tensor parallelism every process plays the whole round, with the same random numbers and the same bits, unless a
kernel is not deterministic. One token of difference would give the processes trees and lengths of their own, and their
next common forward would hang. So three small things are sent from the first process in every round: the tree before it
is verified, the verdict, and what the host is told. What stays apart (q, hidden states, a drafter's cache) decides
nothing.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import Verdict


class Agreement:
    """What the processes that share a model agree on: whatever the first of them has.

    Args:
        group: The processes, a group of ``torch.distributed``; None for a model that this process has for itself, where
            there is nothing to agree on.

    Attributes:
        shared: Whether other processes take part in every forward.
    """

    def __init__(self, group: Any | None = None):
        self.shared, self._group = group is not None, group
        self._leads = group is None or torch.distributed.get_rank(group) == 0

    def on_tree(self, tree: DraftTree, *, fixed: bool) -> DraftTree:
        """Return the trees that all processes verify. Laws and q stay a process's own.

        Unless the trees of all processes have ``fixed`` sizes, the first process sends its sizes first, and the others
        wait for these numbers.
        """
        if not self.shared:
            return tree
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
        """Return the verdict that all processes commit; all numbers of a row travel together."""
        if not self.shared:
            return verdict
        names = ("num_accepted", "next_token", "valid", "expected_accepted")
        numbers = {name: getattr(verdict, name) for name in names}
        mine = torch.cat([verdict.path.double(), *[each.double()[:, None] for each in numbers.values()]], dim=1)
        path, *theirs = self.on_numbers(mine).split([verdict.path.shape[1], *[1] * len(numbers)], dim=1)
        agreed = {name: new[:, 0].to(old.dtype) for (name, old), new in zip(numbers.items(), theirs, strict=True)}
        return replace(verdict, path=path.to(verdict.path.dtype), **agreed)

    def on_numbers(self, numbers: Tensor) -> Tensor:
        """Return the first process's numbers or marks, for a tensor that has the same shape in all processes."""
        if not self.shared:
            return numbers
        marks = numbers.dtype is torch.bool
        sent = (numbers.long() if marks else numbers).clone(memory_format=torch.contiguous_format)
        torch.distributed.broadcast(sent, group=self._group, group_src=0)
        return sent.bool() if marks else sent


ALONE = Agreement()
"""How a process agrees with itself."""
