"""The model's own attention, as transformers wrote it for this model: what every other backend is compared with."""

from typing import Any

from torch import Tensor

from specdec.attention.call import AttentionBackend, AttentionCall, View
from specdec.attention.facts import Facts
from specdec.attention.masks import dense_masks
from specdec.cache.base import Cache
from specdec.forward import ForwardBatch


class EagerAttention(AttentionBackend):
    """transformers' ``eager`` attention with a dense mask."""

    passes_cache = True
    function = "eager"

    def prepare(self, batch: ForwardBatch, cache: Cache, facts: Facts) -> View:
        """Returns one dense mask per reach."""
        return View(cache, dense_masks(batch, cache.get_mask_sizes(batch.nodes, 0)[0], facts))

    def attend(self, call: AttentionCall, view: View) -> Tensor:
        """Not called: the model reads the cache itself."""
        raise NotImplementedError("the model's own attention is no function of a call")

    def check(self, model: Any) -> str | None:
        """Returns None: every model has an attention of its own."""
        return None
