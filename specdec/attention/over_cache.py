"""What backends have in common whose kernels read the cache themselves: no mask, and no copy of keys and values.

During a forward the model is given a stand-in for the cache. It writes a layer's keys and values to the real cache,
hands the very same tensors back to the layer, and recognizes them in the call of the attention function that follows:
so the function knows its layer. Tensors of one number each stand for the masks and tell the layers' reaches apart.
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from specdec.attention.base import AttentionBackend, AttentionState, Reach, refuses_attention_functions
from specdec.attention.grouped import check_arguments, note_groups
from specdec.cache.base import Cache, OwnLayout
from specdec.placement import is_divided, is_shared
from specdec.scoped import scoped

if TYPE_CHECKING:
    from specdec.target.plan import ModelPlan


@dataclass(eq=False)
class ReachState(AttentionState):
    """What layers share that attend over the cache itself.

    Attributes:
        reaches: What the mask of the same index stands for.
    """

    reaches: Sequence[Reach]


class OverCache(AttentionBackend):
    """A backend that reads the cache by itself: a subclass says how, in ``over_cache``."""

    replayable = True

    @abstractmethod
    def over_cache(
        self,
        state: Any,
        cache: Cache,
        query: Tensor,
        sinks: Tensor | None,
        layer: int,
        mask: int,
        scaling: float | None,
        softcap: float | None,
    ) -> Tensor:
        """Returns what ``attend`` does, after the layer's new keys and values were written to the cache."""

    def attend(
        self,
        state: AttentionState,
        cache: Cache,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layer: int,
        mask: int,
        scaling: float | None,
        softcap: float | None,
    ) -> Tensor:
        """See ``AttentionBackend.attend``."""
        cache.write(layer, key, value)
        return self.over_cache(state, cache, query, sinks, layer, mask, scaling, softcap)

    def forward(self, state: AttentionState, cache: Cache) -> AbstractContextManager[OwnLayout]:
        """See ``AttentionBackend.forward``."""
        return scoped(_running, _Forward(self, state, cache))

    def check(self, model: Any) -> str | None:
        """See ``AttentionBackend.check``."""
        if is_divided(model) and not is_shared(model):
            return "the model's layers run on several devices, and what its kernel needs to know is on one of them"
        return refuses_attention_functions(model)


class _Forward(OwnLayout):
    """Stands for the cache during a forward, and knows which layer the keys belong to that attention is called with."""

    def __init__(self, backend: OverCache, state: AttentionState, cache: Cache):
        super().__init__(len(cache.layers))
        self.backend, self.state, self.cache = backend, state, cache
        self._layers: dict[int, tuple[Tensor, Tensor, int]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object):
        self.cache.write(layer_idx, key_states, value_states)
        # By identity, and kept: another tensor could otherwise take the same place in memory.
        self._layers[id(key_states)] = key_states, value_states, layer_idx
        return key_states, value_states

    def layer_of(self, key: Tensor, value: Tensor) -> int:
        """Returns the layer whose keys and values these are. Several layers may share those of one."""
        known = self._layers.get(id(key))
        if known is None or known[1] is not value:
            raise TypeError("the model changes keys or values between the cache and the attention function")
        return known[2]

    def mask_of(self, mask: Tensor | None) -> int:
        """Returns the index of what stands for a mask."""
        for index, known in enumerate(self.state.masks):
            if mask is known:
                return index
        raise TypeError("the model changes the mask, which this attention does not read")

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        raise TypeError("the model selects the keys that it sees, by a mask which this attention does not read")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length, layer_idx)

    @property
    def is_initialized(self) -> bool:
        return True


# One per thread: others may run other models meanwhile.
_running: ContextVar[_Forward] = ContextVar("over_cache")


def attention_over_cache(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """An attention function in the form of transformers' ``AttentionInterface``, for every backend of this kind.

    Raises:
        TypeError: The model does something with keys, values or masks that the backend would not see, or gives a
            tensor that it does not know.
    """
    if note_groups(query, key):  # at the trial; later calls are alike
        check_arguments(kwargs)
    running = _running.get()
    layer, mask = running.layer_of(key, value), running.mask_of(attention_mask)
    output = running.backend.over_cache(running.state, running.cache, query, s_aux, layer, mask, scaling, softcap)
    return output, None


def stand_ins(plan: "ModelPlan") -> list[Tensor]:
    """Returns a tensor for each reach of a model's layers, to be passed where masks are."""
    return _stand_ins(len(plan.distinct_reaches), plan.dtype, plan.device)


@lru_cache(maxsize=64)
def _stand_ins(count: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    with torch.inference_mode(False):
        return [torch.zeros(1, 1, 1, 1, dtype=dtype, device=device) for _ in range(count)]


def register(name: str) -> None:
    """Make a backend's name known to transformers, both as an attention function and as a kind of mask."""
    AttentionInterface.register(name, attention_over_cache)
    # The model is given its masks; this entry only makes transformers pass them on.
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
