"""The part of transformers' ``Cache`` that every stand-in of ours implements, and its name among arguments."""

import sys
from collections.abc import Container
from functools import lru_cache
from inspect import signature

from transformers import Cache as TransformersCache
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask


class UnsupportedError(ValueError):
    """A model asked its cache for something that cannot be rolled back to an accepted path."""


class _LayerStub:
    """What transformers' mask code reads of a layer. Our masks are made before that code runs."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    is_initialized = False  # a cross-attention layer without anything to attend to
    supports_early_init = True
    record_past = False

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class OwnLayout(TransformersCache):
    """A transformers cache without layer objects of its own: only ``update`` and ``update_indexer`` write to it.

    Recurrent layers are given a cache of their own (``specdec.cache.states``) in the place of this one.
    """

    def __init__(self, num_layers: int):
        # Not the parent's: it makes layer objects that keep tensors of their own.
        self.layers = [_LayerStub() for _ in range(num_layers)]
        self.layer_class_to_replicate = None
        self.offloading = False

    def _refuse_state(self, *args: object, **kwargs: object):
        raise UnsupportedError("it keeps a state where the trial of its recurrent layers found none")

    update_conv_state = update_recurrent_state = get_conv_state = get_recurrent_state = _refuse_state
    get_linear_cache = set_linear_cache = _refuse_state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Returns False: models ask to leave out a mask of padding, and we give none."""
        return False


def cache_argument(parameters: Container[str]) -> str:
    """Return the name of the cache among a function's parameters, which is ``cache`` since transformers 5.24."""
    return next((name for name in ("cache", "cache_params") if name in parameters), "past_key_values")


CACHE = cache_argument(signature(create_causal_mask).parameters)
"""The name of the cache among the parameters of transformers' mask functions and attention layers."""


def own_cache_class(model: PreTrainedModel) -> type:
    """Return the class of caches that a model's own code defines; transformers' general one if it defines none."""
    module = type(model).__module__
    classes = [value for value in vars(sys.modules[module]).values() if isinstance(value, type)]
    return next((c for c in classes if issubclass(c, TransformersCache) and c.__module__ == module), TransformersCache)


def of_class(cache: OwnLayout, wanted: type) -> OwnLayout:
    """Return a cache that is also of a class of a model's own, which only asks for it and uses nothing of it."""
    if not isinstance(cache, wanted):
        cache.__class__ = _both(type(cache), wanted)
    return cache


@lru_cache(maxsize=64)
def _both(ours: type, wanted: type) -> type:
    return type(ours)(ours.__name__, (ours, wanted), {})
