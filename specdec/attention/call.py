"""One attention call of one layer as a value, what a backend is, and the one function that transformers knows.

While a model runs, it is given a stand-in for the cache. The stand-in hands a layer's new keys and values back to the
layer and recognizes them in the call of the attention function that follows: so the call knows its layer. Likewise the
masks that the model is given tell the layers' reaches apart. What answers the call is a function of the forward: a
backend, a step of a captured forward, or the invariant order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from specdec.attention.facts import Facts
from specdec.attention.masks import dense_masks
from specdec.cache.storage import Cache
from specdec.cache.transformers_cache import OwnLayout
from specdec.forward import ForwardBatch
from specdec.host import scoped

NAME = "specdec"
"""The name of this project's attention function in transformers."""

_IGNORED = ("position_ids", "cache_position")  # tensors that say what the mask says


class AttentionCall(NamedTuple):
    """One call of one layer's attention.

    Attributes:
        query: The queries of a forward's nodes.
        key: Their keys, which the cache holds already.
        value: Their values, likewise.
        layer: Index of the layer.
        reach: How far back the layer sees: an index into ``Facts.distinct_reaches``.
        scaling: Factor of the scores; None for ``head_dim ** -0.5``.
        softcap: Scores become ``softcap * tanh(scores / softcap)`` before the mask; None leaves them.
        sinks: One logit per head that takes part in the softmax and has no value; None for none.
    """

    query: Float[Tensor, "batch head node head_dim"]
    key: Float[Tensor, "batch kv_head node head_dim"]
    value: Float[Tensor, "batch kv_head node value_dim"]
    layer: int
    reach: int = 0
    scaling: float | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " head"] | None = None


@dataclass(eq=False)
class View:
    """What the layers of one forward attend to. Backends keep what else they have prepared in subclasses.

    Attributes:
        cache: Keys and values of all slots, aimed at the forward.
        masks: The masks that the model is given, one for each of ``Facts.distinct_reaches``; stand-ins where the
            backend reads none.
    """

    cache: Cache
    masks: list[Tensor]


Attend = Callable[[AttentionCall], Tensor]
"""Returns a call's output, ``[batch, node, head, value_dim]``."""

Write = Callable[[int, Tensor, Tensor], None]
"""Stores a layer's new keys and values, as ``Cache.write`` does."""


class AttentionBackend:
    """One way of computing attention over the cache.

    Attributes:
        passes_cache: Whether the model is given the cache itself, so that its layers pass on all keys and a whole mask;
            ``attend`` is never called then.
        replays: Whether a captured forward with it is a single step of a recording: it is told where everything is.
        function: The name of the attention function in transformers, to which the model is switched during forwards.
    """

    passes_cache: bool = False
    replays: bool = False
    function: str = NAME

    def prepare(self, batch: ForwardBatch, cache: Cache, facts: Facts) -> Any:
        """Return the ``View`` that all layers of a forward share: by default, with one dense mask per reach.

        ``cache.aim(batch)`` has been called before.
        """
        return View(cache, dense_masks(batch, cache.get_mask_sizes(batch.nodes, 0)[0], facts))

    def attend(self, call: AttentionCall, view: Any) -> Float[Tensor, "batch node head value_dim"]:
        """Return the output of one call, whose keys and values are in the cache, over a view from ``prepare``."""
        raise NotImplementedError("the model reads the cache itself")

    def answering(self) -> AbstractContextManager[object]:
        """Return a context in which the layers' calls are answered, for a backend that ``passes_cache``."""
        return nullcontext()

    def automatic(self, model: Any) -> bool:
        """Return whether ``attention="auto"`` tries this backend on a model."""
        return True

    def check(self, model: Any) -> str | None:
        """Return why a model cannot use this backend, or None. A trial shows later whether its numbers are right."""
        return refuses_attention_functions(model)


def refuses_attention_functions(model: Any) -> str | None:
    """Return why a model takes no attention function, or None if it takes one. Models say so themselves.

    Those with recurrent layers do not, whatever their attention takes. A trial finds out.
    """
    if getattr(model, "_supports_attention_backend", False) or getattr(model, "_is_stateful", False):
        return None
    return f"{model.config.model_type} does not take an attention function"


def joint(
    batches: Sequence[ForwardBatch], backend: AttentionBackend, cache: Cache, facts: Facts
) -> tuple[Attend, View, Callable[[Tensor], list[Tensor]]]:
    """Return what answers the calls of several forwards whose nodes go through the model as one row, and their view.

    And what takes such a row, ``[1, node, ...]``, apart. The cache is aimed at all of them.
    """
    views, shapes = list[View](), [(batch.batch, batch.nodes) for batch in batches]
    for batch in batches:
        aimed = copy(cache)
        aimed.aim(batch)
        views.append(backend.prepare(batch, aimed, facts))
    cache.aim_together(batches)

    def apart(row: Tensor) -> list[Tensor]:
        parts = row[0].split([rows * nodes for rows, nodes in shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]

    def attend(call: AttentionCall) -> Tensor:
        found, tensors = list[Tensor](), [apart(each.transpose(1, 2)) for each in call[:3]]
        for view, *parts in zip(views, *tensors, strict=True):
            query, key, value = (part.transpose(1, 2) for part in parts)
            found.append(backend.attend(call._replace(query=query, key=key, value=value), view).flatten(0, 1))
        return torch.cat(found)[None]

    return attend, View(cache, views[0].masks), apart


class _Running(OwnLayout):
    """Stands for the cache during a forward, and knows the layer whose keys attention is called with."""

    def __init__(self, view: View, attend: Attend, write: Write):
        super().__init__(len(view.cache.layers))
        self.view, self.attend, self.write = view, attend, write
        self._layers: dict[int, tuple[Tensor, Tensor, int]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object):
        self.write(layer_idx, key_states, value_states)
        # By identity, and kept: another tensor could otherwise take the same place in memory.
        self._layers[id(key_states)] = key_states, value_states, layer_idx
        return key_states, value_states

    def answer(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any) -> Tensor:
        layer, reach = self.layer_of(key, value), self.reach_of(mask)
        return self.attend(AttentionCall(query, key, value, layer, reach, *options))

    def layer_of(self, key: Tensor, value: Tensor) -> int:
        """Return the layer whose keys and values these are. Several layers may share those of one."""
        known = self._layers.get(id(key))
        if known is None or known[1] is not value:
            raise TypeError("the model changes keys or values between the cache and the attention function")
        return known[2]

    def reach_of(self, mask: Tensor | None) -> int:
        """Return the index of the reach that a mask is for."""
        for index, known in enumerate(self.view.masks):
            if mask is known:
                return index
        raise TypeError("the model changes the mask on its way to the attention function")

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        raise TypeError("the model selects the keys that it sees, by a mask which this attention does not read")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.view.cache.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.view.cache.get_mask_sizes(query_length, layer_idx)

    @property
    def is_initialized(self) -> bool:
        return True


# One per thread: others may run other models meanwhile.
_answer: ContextVar[Callable[..., Tensor]] = ContextVar("attention")


@contextmanager
def answered(view: View, attend: Attend, write: Write | None = None) -> Iterator[OwnLayout]:
    """During the ``with`` block, let ``attend`` answer the layers' calls, and ``write``, or the cache itself, store.

    The block gets what stands for the cache.
    """
    running = _Running(view, attend, write or view.cache.write)
    with scoped(_answer, running.answer):
        yield running


def answered_by(answer: Callable[..., Tensor]) -> AbstractContextManager[object]:
    """During the ``with`` block, let ``answer(query, key, value, mask, scaling, softcap, sinks)`` answer the calls."""
    return scoped(_answer, answer)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function, in the form of transformers' ``AttentionInterface``.

    Raises:
        TypeError: The model does something with keys, values or masks that a backend would not see, or gives a tensor
            that it does not know.
    """
    unknown = [name for name, given in kwargs.items() if isinstance(given, Tensor) and name not in _IGNORED]
    if unknown:
        raise TypeError(f"the attention function is given {', '.join(unknown)}, which only the model's own knows")
    return _answer.get()(query, key, value, attention_mask, scaling, softcap, s_aux), None


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Return every configuration that a part of the model reads; a part may have its own."""
    found = [getattr(part, "config", None) for part in model.modules()]
    return list({id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values())


@contextmanager
def switched(configs: Sequence[PreTrainedConfig], attention: str, experts: str) -> Iterator[None]:
    """Switch a model's attention during the ``with`` block, and experts that would wait for the device."""
    # The fields behind the properties: setting those also sets the configurations below.
    before = [(c, c._attn_implementation_internal, c._experts_implementation_internal) for c in configs]
    for config, _, own_experts in before:
        config._attn_implementation_internal = attention
        if "eager" in (experts, own_experts):
            config._experts_implementation_internal = experts
    try:
        yield
    finally:
        for config, own_attention, own_experts in before:
            config._attn_implementation_internal = own_attention
            config._experts_implementation_internal = own_experts


AttentionInterface.register(NAME, attention)
# The model is given its masks; this entry only makes transformers pass them on.
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
