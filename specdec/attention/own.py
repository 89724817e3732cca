"""The model's own attention, as transformers wrote it for this model: what every other backend is compared with."""

from typing import TYPE_CHECKING

from specdec.attention.base import AttentionBackend, AttentionState
from specdec.attention.masks import dense_masks
from specdec.cache.base import Cache
from specdec.forward import ForwardBatch

if TYPE_CHECKING:
    from specdec.target.plan import ModelPlan


class OwnAttention(AttentionBackend):
    """transformers' ``eager`` attention with a dense mask."""

    name = "eager"

    def prepare(self, batch: ForwardBatch, cache: Cache, plan: "ModelPlan") -> AttentionState:
        """Returns one dense mask per reach."""
        return AttentionState(dense_masks(batch, cache.get_mask_sizes(batch.nodes, 0)[0], plan))
