"""Token recycling: what the target last thought of after each token, unrolled into a tree.

Luo et al. 2024 (arXiv 2408.08696).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec import Batch, Drafter, DraftSampling, DraftTree, Outcome, SamplingParams, Session, Sizes, Target, TreeShape
from specdec.drafting.scorer import LevelPlan

SCOPES = ("request", "shared")


def _template(children: str) -> TreeShape:
    """Return the shape in which paths of ranks, written as digits, have so many children: ``0:3`` and so on."""
    paths: list[list[int]] = []
    for entry in children.split():
        path, count = entry.split(":")
        paths += [[int(rank) for rank in path] + [child] for child in range(int(count))]
    return TreeShape.from_paths(paths)


TEMPLATES = {
    "small": _template(":4 0:4 1:2 2:1 00:3 01:1 10:1 000:2 001:1 0000:1 00000:1"),
    "paper": _template(
        ":8 0:8 1:4 2:3 3:2 4:1 5:1 6:1 7:1 00:8 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 11:1 20:1 30:1 40:1 50:1 "
        "000:5 001:2 002:1 003:1 004:1 010:1 020:1 100:1 200:1 300:1 "
        "0000:3 0001:1 0002:1 0010:1 0100:1 1000:1 00000:2 00010:1"
    ),
}


class TokenRecyclingDrafter(Drafter):
    """Drafts from a table: for every token the target's most probable successors when it last saw that token.

    A row's tree has one static shape. The child of rank r of a node is the r-th successor (from 0) of the node's token.
    Nothing is drafted where a token's successors are not known yet. After each round the table takes the target's
    successors of every node that was drafted, rejected ones, too; of several nodes with one token, the last one's.

    A shared table alone serves a batch badly: between two rounds of a request, all others overwrite its entries. So
    every request has a table of its own as well, and takes from the shared one only the successors of tokens that it
    has not seen itself. With one request at a time both tables would say the same, so there is one.

    Args:
        shape: ``"small"`` (21 nodes), ``"paper"`` (80 nodes), or what ``TreeShape.of`` takes.
        scope: ``"shared"`` has the table that all requests fill, which begins empty with every engine, behind each
            request's own. A request's drafts, and at a temperature its output, then depend on what else has been
            decoded; the law of its output does not. ``"request"`` has only the tables of requests.
    """

    runs = "nothing"
    laws = frozenset([DraftSampling.DETERMINISTIC])
    adapts = True

    def __init__(
        self, shape: str | TreeShape | int | Sequence[int] | Sequence[Sequence[int]] = "small", *, scope: str = "shared"
    ):
        if isinstance(shape, str) and shape not in TEMPLATES:
            raise ValueError(f"shape={shape!r}: give small, paper, a length, branching factors or paths")
        self.shape = TEMPLATES[shape] if isinstance(shape, str) else TreeShape.of(shape)
        if scope not in SCOPES:
            raise ValueError(f"scope={scope!r}: give request (a table for each) or shared (one for all)")
        self.scope, self.successors = scope, 1 + max(self.shape.ranks)
        self.max_nodes, self.max_depth = self.shape.num_nodes, self.shape.max_depth
        self.is_chain, self.is_paths = self.shape.is_chain, self.shape.is_paths

    def bind(self, target: Target, sizes: Sizes) -> "RecyclingSession":
        if self.successors > target.vocab_size:
            raise ValueError(
                f"the tree shape takes the {self.successors} most probable tokens of a vocabulary of "
                f"{target.vocab_size}: give a narrower shape"
            )
        return RecyclingSession(self, target, sizes)


class RecyclingSession(Session):
    """The tables of successors of one engine."""

    lookback = 0

    def __init__(self, drafter: TokenRecyclingDrafter, target: Target, sizes: Sizes):
        self._drafter, self.top_tokens = drafter, drafter.successors
        self._is_shared = drafter.scope == "shared"
        self._has_own = not self._is_shared or sizes.max_batch_size > 1
        own = sizes.max_batch_size if self._has_own else 0
        self._vocab = target.vocab_size
        with torch.inference_mode(False):  # written in both modes
            # Row table · vocabulary + token. Table i is that of slot i, and the shared one comes behind them. What must
            # be written nowhere goes to the last row.
            self._shared_at = own * self._vocab
            rows = self._shared_at + self._is_shared * self._vocab + 1
            self._successors = torch.full((rows, drafter.successors), -1, dtype=torch.int32, device=target.device)
            # For every token of the shared table the number of its last writer; one more for those that write nowhere.
            writers = self._is_shared * self._vocab + 1
            self._writer = torch.full((writers,), -1, dtype=torch.int32, device=target.device)
        self._plans = LevelPlan.by_depth(drafter.shape, target.device)

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        if self._has_own:
            self._successors[slot * self._vocab : (slot + 1) * self._vocab] = -1

    @torch.inference_mode()
    def observe(self, outcome: Outcome) -> None:
        nodes, drafted, said = outcome.node_tokens, outcome.node_valid, outcome.top_tokens
        if nodes is not None and drafted is not None and said is not None:
            self._keep(outcome.slots, nodes, said, drafted & (outcome.counts > 0)[:, None])

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree:
        """Unroll the tables as deep as any row has room for; in a recorded round, to the whole shape."""
        depth = self._drafter.max_depth if batch.host is None else min(self._drafter.max_depth, batch.host.deepest)
        return self._unrolled(batch, depth) if depth > 0 else DraftTree.root_only(batch.roots)

    def _unrolled(self, batch: Batch, depth: int) -> DraftTree:
        plan = self._plans[depth]
        tokens = batch.roots[:, None].repeat(1, plan.shape.num_nodes + 1)
        valid = torch.ones_like(tokens, dtype=torch.bool)
        for level in plan.levels:
            found = self._found(batch.slots, tokens[:, level.parent_of], level.rank_of)
            known = valid[:, level.parent_of] & (found >= 0)
            valid[:, level.children_at] = known
            tokens[:, level.children_at] = found.where(known, batch.roots[:, None])
        return DraftTree.from_shape(plan.shape, tokens, valid=valid)

    def _found(
        self, slots: Int[Tensor, " batch"], tokens: Int[Tensor, "batch child"], ranks: Int[Tensor, " child"]
    ) -> Int[Tensor, "batch child"]:
        if not self._has_own:
            return self._successors[tokens, ranks].long()
        own = self._successors[slots[:, None] * self._vocab + tokens, ranks]
        if self._is_shared:
            own = own.where(own >= 0, self._successors[self._shared_at + tokens, ranks])
        return own.long()

    def _keep(
        self,
        slots: Int[Tensor, " batch"],
        nodes: Int[Tensor, "batch node"],
        successors: Int[Tensor, "batch node rank"],
        told: Bool[Tensor, "batch node"],
    ) -> None:
        """Write the successors of the nodes that are told; of a row's nodes with the same token those of the last."""
        # A device may carry out writes to one place in any order, so each place gets one writer.
        again = (nodes[:, :, None] == nodes[:, None, :]) & told[:, None, :]
        unheard = again.triu(1).any(-1) | ~told
        values = successors.flatten(0, 1).to(torch.int32)
        nowhere = len(self._successors) - 1
        if self._has_own:
            own = (slots[:, None] * self._vocab + nodes).masked_fill(unheard, nowhere).flatten()
            self._successors[own] = values
        if self._is_shared:
            # Every token learns its last writer, a maximum, and then all rows of the batch write the same there.
            rows = nodes.masked_fill(unheard, self._vocab).flatten()
            number = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
            self._writer.index_fill_(0, rows, -1)
            self._writer.scatter_reduce_(0, rows, number, "amax")
            self._successors[self._shared_at + rows] = values[self._writer[rows].long()]
        self._successors[nowhere].fill_(-1)
