"""Attention in this project's C on a CPU: it walks through the cache as it lies, with no mask and no copy.

``native/attention.c`` has the code. Rows may be ragged, their slots scattered, their cache in pages: it
is one call all the same. Tokens get the same bits whether they come one by one, in a chain or in a tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from struct import Struct
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specdec.attention.call import AttentionCall, View, refuses_attention_functions
from specdec.attention.facts import Facts, Reach
from specdec.attention.grouped import GroupedAttention, attend
from specdec.attention.masks import stand_ins
from specdec.cache.storage import Cache
from specdec.forward import ForwardBatch
from specdec.machine import dtype_name
from specdec.native import DTYPES, chosen, loses, native_library
from specdec.opaque import opaque
from specdec.placement import is_divided, main_device

_CALL = Struct("@P3l2P6lPiPP2lP2lPl7l2fP2l")
"""How ``call`` in ``attention.c`` lies in memory: pointers, longs, ints and floats."""

_FORWARD = Struct("@l2PlP2lP2l")
_LAYER = Struct("@2P7l")
"""How ``forward`` and ``layer`` in ``program.c`` lie in memory."""

_KEYS, _HEADS, _DIM = 512, 4, 64  # of attention that is compared; two heads of queries share each

NO_MEMORY = "no memory for attention: lower batch sizes or lengths, or take a smaller model"


Seen = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""Lengths, table of pages, words of ancestors (None: a line) and depths, each contiguous."""


@dataclass(eq=False)
class NativeView(View):
    """What the C needs to know of a forward; the masks are stand-ins.

    Attributes:
        reaches: What the stand-in of the same index stands for.
        seen: The tensors of the forward.
        cells: Nodes of the topology.
    """

    reaches: Sequence[Reach]
    seen: Seen
    cells: int

    @cached_property
    def packed(self) -> bytes:
        """What the layers share, for the C."""
        lengths, table, words, depth = self.seen
        places = (0, 0, 0) if words is None else (words.data_ptr(), *_strides(words))
        seen = lengths.data_ptr(), table.data_ptr(), table.shape[1], *places, depth.data_ptr(), _strides(depth)[0]
        return _FORWARD.pack(lengths.shape[0], *seen, self.cells)

    @property
    def layers(self) -> bytes:
        """Where the layers' keys and values are, for the C."""
        known = _layers.get(self.cache)
        if known is None:
            known = _layers[self.cache] = b"".join(_layer(self.cache, layer) for layer in range(len(self.cache.layers)))
        return known


_layers: WeakKeyDictionary[Cache, bytes] = WeakKeyDictionary()


def _layer(cache: Cache, layer: int) -> bytes:
    """Return where a layer's keys and values are; nowhere for one that stores none."""
    try:
        keys, values = cache.stored(layer)[:2]
    except KeyError:
        return _LAYER.pack(*[0] * 9)
    return _LAYER.pack(keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], *values.stride()[:3], keys.shape[2])


class NativeAttention(GroupedAttention):
    """The C of ``attention.c``. ``GroupedAttention`` reads quantized caches, and blocks that layers see in two ways."""

    replays = True

    def prepare(self, batch: ForwardBatch, cache: Cache, facts: Facts) -> Any:
        """Return the C's view of a forward."""
        if cache.quantized or batch.topology.windowed is not None:
            return super().prepare(batch, cache, facts)
        topology, reaches = batch.topology, facts.distinct_reaches
        words = None if topology.in_line else topology.ancestor_words[:, -batch.nodes :].contiguous()
        table = cache.pages(batch.slots).contiguous()
        seen = batch.lengths.contiguous(), table, words, topology.depth.contiguous()
        masks = stand_ins(len(reaches), facts.dtype, facts.device)
        return NativeView(cache, masks, reaches, seen, topology.width)

    def attend(self, call: AttentionCall, view: Any) -> Tensor:
        """See ``AttentionBackend.attend``."""
        if not isinstance(view, NativeView):
            return super().attend(call, view)
        stored = view.cache.stored(call.layer)
        reach = view.reaches[call.reach]
        given = call.scaling, call.softcap, call.sinks, reach.window or 0, reach.chunk or 0, view.cells
        return opaque(_attend, call.query, stored.keys, stored.values, *view.seen, *given)

    def automatic(self, model: Any) -> bool:
        """See ``AttentionBackend.automatic``: on CPUs, except those on which ``GroupedAttention`` is the faster one."""
        if self.check(model) is not None:
            return main_device(model).type == "cpu"
        return faster_here(model.dtype) == "native"

    def check(self, model: Any) -> str | None:
        """See ``AttentionBackend.check``."""
        if main_device(model).type != "cpu":
            return f"its code is for CPUs, and the model is on {main_device(model)}"
        if native_library() is None:
            return "this project's C is not compiled (it needs a C compiler, and a processor with AVX2)"
        if model.dtype not in DTYPES:
            return f"it computes in float32 or bfloat16, and the model is in {model.dtype}"
        if is_divided(model):
            return "the model's layers run on several devices"
        return refuses_attention_functions(model)


def faster_here(dtype: torch.dtype) -> str:
    """Return the name of the backend that is the faster one for a dtype on this machine."""
    return chosen(f"attention in {dtype_name(dtype)}", lambda: _faster(dtype), "native")


def _faster(dtype: torch.dtype) -> str:
    """Return ``"grouped"`` if that is faster for one query and for eight, as a step and a verification have them."""
    for queries in (1, 8):
        query = torch.ones(1, 2 * _HEADS, queries, _DIM, dtype=dtype, device="cpu")
        keys, values = torch.ones(2, 1, _HEADS, _KEYS, _DIM, dtype=dtype, device="cpu")
        numbers = torch.arange(_KEYS, device="cpu")[None]
        seen = numbers[0, -queries:][:1], numbers[:, :1], None, numbers[:, :queries]
        own = partial(_attend, query, keys, values, *seen, None, None, None, 0, 0, queries)
        mask = query.new_zeros(1, 1, 2 * queries, _KEYS)
        if not loses(own, partial(attend, query, keys, values, mask)):
            return "native"
    return "grouped"


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, table: Tensor, words: Tensor | None, depth: Tensor,
    scaling: float | None, softcap: float | None, sinks: Tensor | None, window: int, chunk: int, cells: int,
) -> Tensor:  # fmt: skip
    library = native_library()
    assert library is not None, "asked by `check`"
    wanted, dtype = query.dtype, keys.dtype
    if wanted is not dtype or query.stride(3) != 1:  # under autocast
        query = query.to(dtype).contiguous()
    rows, heads, nodes, dim = query.shape
    key_heads, page_size, value_dim = values.shape[1:]
    output = query.new_empty(rows, nodes, heads, value_dim)
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    call = _CALL.pack(
        query.data_ptr(), *query.stride()[:3],
        keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], *values.stride()[:3],
        output.data_ptr(), DTYPES[dtype], lengths.data_ptr(),
        table.data_ptr(), table.shape[1], page_size,
        0 if words is None else words.data_ptr(), *((0, 0) if words is None else _strides(words)),
        depth.data_ptr(), _strides(depth)[0],
        rows, heads, key_heads, nodes, cells, dim, value_dim,
        dim**-0.5 if scaling is None else scaling, softcap or 0.0,
        0 if sinks is None else sinks.data_ptr(), window, chunk,
    )  # fmt: skip
    if library.attend(call) == 0:
        raise MemoryError(NO_MEMORY)
    return output if wanted is dtype else output.to(wanted)


def _strides(tensor: Tensor) -> tuple[int, int]:
    """Return how far rows, and what is within them, are apart; 0 for a row that stands for all."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0), tensor.stride(1)
