"""Tree attention by a Triton kernel that walks through the cache: no mask, no copy, nothing that the host must know."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.attention.call import AttentionBackend, AttentionCall, View, refuses_attention_functions
from specdec.attention.facts import Facts, Reach
from specdec.attention.masks import stand_ins
from specdec.cache.storage import Cache
from specdec.forward import ForwardBatch, bucket_of
from specdec.kernels import obstacle
from specdec.placement import is_divided, is_shared, main_device

if TYPE_CHECKING:  # importing it imports Triton
    from specdec.kernels.attention import Seen

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(eq=False)
class TreeView(View):
    """What the kernel needs to know of a forward. The masks are stand-ins of one number.

    Attributes:
        reaches: What the stand-in of the same index stands for.
        seen: Where the rows are, and what their queries see in layers of each reach.
    """

    reaches: Sequence[Reach]
    seen: "Sequence[Seen]"


class TritonAttention(AttentionBackend):
    """The kernel of ``specdec.kernels.attention``. Triton is imported when a model first uses it."""

    def prepare(self, batch: ForwardBatch, cache: Cache, facts: Facts) -> TreeView:
        """Return the kernel's view of a forward. All of it is on the device already, or is derived there."""
        from specdec.kernels.attention import Seen

        reaches, pages = facts.distinct_reaches, cache.pages(batch.slots)
        keys = cache.positions if batch.key_bound is None else bucket_of(batch.key_bound)
        seen = []
        for reach in reaches:
            topology = batch.topology.in_layers(windowed=reach.window is not None)
            words = None if topology.in_line else topology.ancestor_words[:, -batch.nodes :]
            seen.append(Seen(batch.lengths, pages, words, topology.depth, keys))
        return TreeView(cache, stand_ins(len(reaches), facts.dtype, facts.device), reaches, seen)

    def attend(self, call: AttentionCall, view: TreeView) -> Tensor:
        """See ``AttentionBackend.attend``."""
        from specdec.kernels.attention import tree_attention

        reach = view.reaches[call.reach]
        return tree_attention(
            call.query,
            view.cache.stored(call.layer),
            view.seen[call.reach],
            window=reach.window,
            chunk=reach.chunk,
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def automatic(self, model: Any) -> bool:
        """See ``AttentionBackend.automatic``. Interpreted kernels are for tests."""
        return main_device(model).type == "cuda"

    def check(self, model: Any) -> str | None:
        """See ``AttentionBackend.check``."""
        if (reason := obstacle(main_device(model))) is not None:
            return reason
        if model.dtype not in DTYPES:
            return f"its kernel computes in float32, float16 or bfloat16, and the model is in {model.dtype}"
        if is_divided(model) and not is_shared(model):
            return "the model's layers run on several devices, and what its kernel needs to know is on one of them"
        return refuses_attention_functions(model)
