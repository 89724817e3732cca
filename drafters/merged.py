"""One tree of two drafters' nodes: a model's, drawn or chosen, and behind them those of a look-up."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from drafters.combined import CombinedDrafter, CombinedSession
from specdec.batch import Batch
from specdec.interfaces import Drafter, Session, Sizes
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Outcome


class MergedDrafter(CombinedDrafter):
    """Drafts the nodes of a model and those of a look-up in one tree.

    Among the children of a node the model's come first, in the order in which they were drawn, and the look-up's
    follow: a rule then tries the drawn tokens against the whole of p, which accepts most (Hu et al. 2025, arXiv
    2502.18779, for one drawn token among chosen ones). Every node keeps its own law. Where a node of the model and one
    of the look-up have the same token and parent, the look-up's is left out, and what it drafts behind it goes on
    behind the model's. That is exact: whether a later sibling or a deeper node is there may depend on what was drawn
    before it. To leave out the drawn node instead would not be.
    """

    def __init__(self, lookup: Drafter, model: Drafter):
        super().__init__(lookup=lookup, model=model)
        self.model, self.lookup = model, lookup
        if lookup.laws != {DraftSampling.DETERMINISTIC}:
            laws = " or ".join(law.name for law in sorted(lookup.laws))
            raise ValueError(
                f"lookup={type(lookup).__name__} draws its drafts {laws}: give a drafter that chooses them without "
                f"randomness (DETERMINISTIC), such as SuffixDrafter, and the other one as model"
            )
        self.adapts = model.adapts or lookup.adapts
        self.max_nodes = model.max_nodes + lookup.max_nodes
        self.is_chain = False

    def bind(self, target: Target, sizes: Sizes) -> "MergedSession":
        return MergedSession(self, self.lookup.bind(target, sizes), self.model.bind(target, sizes))


class MergedSession(CombinedSession):
    """The sessions of a look-up and a model whose nodes stand in one tree."""

    def __init__(self, drafter: MergedDrafter, lookup: Session, model: Session):
        super().__init__(drafter, lookup, model)
        self._nowhere = drafter.max_nodes + 1
        self._width = 1  # of the model's trees in the last round

    def observe(self, outcome: Outcome) -> None:
        self.show(1, outcome, first=1, width=self._width - 1)
        # What the look-up is shown never depends on which of its nodes the model has drafted, too. It finds its own
        # nodes where they were in its own tree, and the model's behind them.
        self.show(0, _turned(outcome, self._width - 1), first=self._nowhere)

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree:
        drafted, found = self.ask(1, batch), self.ask(0, batch)
        self._width = drafted.width
        if found.width == 1:
            return drafted
        if drafted.width == 1 and drafted.draft_probs is None:
            return found
        return merged(drafted, found)


def _turned(outcome: Outcome, drafted: int) -> Outcome:
    """Returns what a round said of its nodes with the first ``drafted`` ones behind the root moved to the end."""
    nodes, valid, said = outcome.node_tokens, outcome.node_valid, outcome.top_tokens
    if nodes is None or valid is None or said is None:
        return outcome

    def turned(each: Tensor) -> Tensor:  # without an index, which would be a copy to the device
        return torch.cat([each[:, :1], each[:, 1 + drafted :], each[:, 1 : 1 + drafted]], dim=1)

    return replace(outcome, node_tokens=turned(nodes), node_valid=turned(valid), top_tokens=turned(said))


def merged(first: DraftTree, second: DraftTree) -> DraftTree:
    """Returns the nodes of two batches of trees in one batch, the first's under their own numbers.

    The nodes ``5 7`` of a first tree, in line below the root 4, and the nodes ``5 8`` and ``6`` of a second become::

        tokens   4 5 7 5 8 6
        parents -1 0 1 0 1 0
        valid    1 1 1 0 1 1

    Node 3 would repeat node 1, so it is invalid, and node 4, which followed it, goes on behind node 1.

    The first's nodes come first among siblings, and all of the second's are ``DETERMINISTIC``.
    """
    place, repeats = _places(first, second)
    parents = place.gather(1, second.parents[:, 1:])
    width = first.width
    law = torch.cat([first.law, second.law[:, 1:]], dim=1)
    q = first.draft_probs
    return DraftTree.build(
        torch.cat([first.tokens, second.tokens[:, 1:]], dim=1),
        torch.cat([first.parents, parents], dim=1),
        valid=torch.cat([first.valid, second.valid[:, 1:] & ~repeats], dim=1),
        sampling=DraftSampling.DETERMINISTIC if first.only_law is DraftSampling.DETERMINISTIC else law,
        # The look-up's nodes have no drawn children, and nobody reads their q.
        draft_probs=None if q is None else torch.nn.functional.pad(q, (0, 0, 0, second.width - 1)),
        max_depth=max(first.max_depth, second.max_depth),
        max_children=min(first.max_children + second.max_children, width + second.width - 2),
    )


def _places(first: DraftTree, second: DraftTree) -> tuple[Int[Tensor, "batch node"], Bool[Tensor, "batch drafted"]]:
    """Returns behind which node of the merged tree the children of each node of the second tree go, root included."""
    batch = len(first.tokens)
    place = torch.arange(first.width - 1, first.width + second.width - 1, device=first.tokens.device)
    place = place.repeat(batch, 1)
    place[:, 0].fill_(0)
    repeats = torch.zeros_like(second.valid)
    above = second.parents.clamp(min=0)
    same = (second.tokens[:, :, None] == first.tokens[:, None, :]) & first.valid[:, None] & second.valid[:, :, None]
    same[:, :, 0].fill_(False)
    for depth in range(1, min(first.max_depth, second.max_depth) + 1):
        under = first.parents[:, None, :] == place.gather(1, above)[:, :, None]
        twin = same & under & (second.depth == depth)[:, :, None]
        found, node = twin.max(dim=-1)
        place = node.where(found, place)
        repeats |= found
    return place, repeats[:, 1:]
