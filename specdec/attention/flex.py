"""Tree attention by PyTorch's FlexAttention: what a query sees is a function, which torch compiles into its own kernel.

A second opinion beside our own kernel, for GPUs on which that one is slow or fails. It reads whole rows of the cache
(copied, unless their slots are consecutive) and is compiled anew for another number of nodes or heads. On a CPU
it runs uncompiled and slowly: there it is for comparing.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, no_type_check
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from specdec.attention.base import AttentionState, Reach
from specdec.attention.over_cache import OverCache, ReachState, register, stand_ins
from specdec.cache.base import Cache
from specdec.forward import ForwardBatch

if TYPE_CHECKING:
    from specdec.target.plan import ModelPlan

NAME = "specdec_flex"
Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(eq=False)
class FlexState(ReachState):
    """What FlexAttention needs to know of a forward.

    Attributes:
        block_masks: For each reach, which blocks of keys a block of queries reads, and what it sees of them.
    """

    block_masks: list[flex.BlockMask]


class FlexAttention(OverCache):
    """``torch.nn.attention.flex_attention`` with a mask function made from lengths and ancestors."""

    name = NAME

    def prepare(self, batch: ForwardBatch, cache: Cache, plan: "ModelPlan") -> AttentionState:
        """Returns one block mask per reach."""
        length = cache.get_mask_sizes(batch.nodes, 0)[0]
        block_masks = [
            flex.create_block_mask(_sees(batch, reach), batch.batch, None, batch.nodes, length, batch.lengths.device)
            for reach in plan.distinct_reaches
        ]
        return FlexState(stand_ins(plan), plan.distinct_reaches, block_masks)

    def over_cache(
        self,
        state: FlexState,
        cache: Cache,
        query: Tensor,
        sinks: Tensor | None,
        layer: int,
        mask: int,
        scaling: float | None,
        softcap: float | None,
    ) -> Tensor:
        """See ``OverCache.over_cache``."""
        if sinks is not None and query.device.type == "cpu":
            raise ValueError("FlexAttention has no attention sinks on a CPU; use attention='auto'")
        keys, values = (kept.to(query.dtype) for kept in cache.read(layer))
        # Compiled, this becomes one kernel. Uncompiled, torch would still trace it for every shape if it was let.
        compiled = query.device.type != "cpu"
        eagerly = mock.patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        with nullcontext() if compiled else eagerly:
            attend: Any = _compiled() if compiled else flex.flex_attention
            output, extra = attend(
                query,
                keys,
                values,
                score_mod=None if softcap is None else _capped(softcap),
                block_mask=state.block_masks[mask],
                scale=scaling,
                enable_gqa=query.shape[1] != keys.shape[1],
                return_aux=flex.AuxRequest(lse=sinks is not None),
            )
        if sinks is not None:  # a share of the softmax that has no value
            output = output * torch.sigmoid(extra.lse - sinks.float()[:, None])[..., None].to(output.dtype)
        return output.transpose(1, 2).contiguous()

    def automatic(self, model: Any) -> bool:
        """See ``AttentionBackend.automatic``. Compiling takes long, so it is for those who ask for it."""
        return False


def _sees(batch: ForwardBatch, reach: Reach) -> Sees:
    """Returns a function that tells whether a query sees a key, as ``masks.tree_mask`` does for all at once."""
    topology, lengths = batch.topology, batch.lengths
    ancestors, depth, width = topology.ancestors, topology.depth, topology.width
    before = width - batch.nodes
    own = int(depth.shape[0] > 1)  # rows that share a topology all read its only row

    @no_type_check  # torch counts the arguments, which a wrapper that checks types would hide
    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        cell = key - lengths[row]
        within = cell.clamp(0, width - 1)
        in_prefix = cell < 0
        seen = in_prefix | ((cell < width) & ancestors[row * own, query + before, within])
        if reach == _EVERYTHING:
            return seen
        at = torch.where(in_prefix, key, lengths[row] + depth[row * own, within])
        position = lengths[row] + depth[row * own, query + before]
        if reach.window is not None:
            seen = seen & (position - at < reach.window)
        if reach.chunk is not None:
            seen = seen & (position // reach.chunk == at // reach.chunk)
        return seen

    return sees


_EVERYTHING = Reach()


@lru_cache(maxsize=16)
def _capped(softcap: float) -> Callable[..., Tensor]:
    @no_type_check
    def score(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score


@lru_cache
def _compiled() -> Any:
    return torch.compile(flex.flex_attention, dynamic=True)


register(NAME)
