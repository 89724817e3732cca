"""Tree attention by a Triton kernel that walks through the cache: no mask, no copy, nothing that the host must know."""

import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.attention.base import AttentionState, Reach
from specdec.attention.over_cache import OverCache, ReachState, register, stand_ins
from specdec.cache.base import Cache
from specdec.forward import ForwardBatch, bucket_of
from specdec.placement import main_device

if TYPE_CHECKING:
    from specdec.attention.tree_attention import Seen, Tiles
    from specdec.target.plan import ModelPlan

NAME = "specdec_triton"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(eq=False)
class TreeState(ReachState):
    """What the kernel needs to know of a forward.

    Attributes:
        seen: Where the rows are, and what their queries see.
    """

    seen: "Seen"


class TritonAttention(OverCache):
    """The kernel of ``tree_kernel``. Triton is imported when a model first uses it.

    Args:
        keys_per_piece: Where to cut a row's context for programs that run at the same time, so that it is added up in
            the same order whatever else is in the batch; None cuts it into as many pieces as fill the device.
        tiles: How a launch is divided among programs; None for what suits the number of nodes.
    """

    name = NAME

    def __init__(self, *, keys_per_piece: int | None = None, tiles: "Tiles | None" = None):
        self.keys_per_piece, self.tiles = keys_per_piece, tiles

    def prepare(self, batch: ForwardBatch, cache: Cache, plan: "ModelPlan") -> AttentionState:
        """Returns what the kernel needs. All of it is on the device already, or is derived there."""
        from specdec.attention.tree_attention import Seen

        topology = batch.topology
        words = None if topology.in_line else topology.ancestor_words[:, -batch.nodes :]
        keys = cache.positions if batch.key_bound is None else bucket_of(batch.key_bound)
        seen = Seen(batch.lengths, cache.pages(batch.slots), words, topology.depth, keys)
        return TreeState(stand_ins(plan), plan.distinct_reaches, seen)

    def over_cache(
        self,
        state: TreeState,
        cache: Cache,
        query: Tensor,
        sinks: Tensor | None,
        layer: int,
        mask: int,
        scaling: float | None,
        softcap: float | None,
    ) -> Tensor:
        """See ``OverCache.over_cache``."""
        from specdec.attention.tree_attention import tree_attention

        return tree_attention(
            query,
            cache.stored(layer),
            state.seen,
            reach=state.reaches[mask] if state.reaches else Reach(),
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
            keys_per_piece=self.keys_per_piece,
            tiles=self.tiles,
        )

    @staticmethod
    def missing() -> str | None:
        """Returns that Triton is not installed, and what to do; None if it is."""
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed (CUDA builds of torch bring it; pip install triton)"
        return None

    def automatic(self, model: Any) -> bool:
        """See ``AttentionBackend.automatic``. Interpreted kernels are for tests."""
        return main_device(model).type == "cuda"

    def check(self, model: Any) -> str | None:
        """See ``AttentionBackend.check``."""
        if missing := self.missing():
            return missing
        device = main_device(model)
        if device.type != "cuda" and not _interpreted():
            return f"its kernel is compiled for GPUs, and the model is on {device}"
        if model.dtype not in DTYPES:
            return f"its kernel computes in float32, float16 or bfloat16, and the model is in {model.dtype}"
        return super().check(model)


def _interpreted() -> bool:
    """Returns whether kernels run on the CPU, as Triton's documentation says: by an environment variable."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


register(NAME)
