"""Attention whose result for a token depends on nothing but the tokens that it sees, bit for bit.

The usual kernels add up the same numbers in another order when a batch has other sizes, and so round differently. Here
everything that is added up has one order and one shape:

* A query's keys are taken in the order of their *positions*. A tree's nodes stand in the cache in the order in which
  they were drafted, with siblings in between, whereas plain decoding finds the same tokens side by side. So the path to
  a node is gathered from the cache.
* Positions are cut into blocks of ``BLOCK``, always counted from position 0. The block is multiplied with the queries
  by one matrix product of a fixed shape. A block that holds fewer keys is filled up with others, which are masked.
* Blocks are combined one after another, from position 0 on, with a running maximum (the online softmax of
  FlashAttention). A block of which a query sees nothing leaves its result as it is, to the last bit.

All of this is computed in float32, or float64 for models in float64.

A path through a tree of three nodes behind two committed tokens, with ``BLOCK`` 4; the second child is drafted last::

    cell      0   1   2     3  4          position  0   1   2     3
    cache     p0  p1  root  a  b          path of b p0  p1  root  b     cells 0 1 2 4
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from specdec.attention.base import Reach
from specdec.batch import ForwardBatch
from specdec.cache.base import Cache, OwnLayout, UnsupportedError

NAME = "specdec_invariant"
"""The name of the attention function in transformers."""

BLOCK = 128
"""Positions per block of keys. Smaller blocks waste less on short sequences and call more kernels on long ones."""

_LANES = 4
"""Equal columns of a running maximum. Torch's vectorized ``exp`` computes the last numbers of a tensor by another
function if their count is no multiple of its width; with these columns there are none such."""


@dataclass(frozen=True)
class Piece:
    """One block of positions of one sequence, which some queries see.

    Attributes:
        slot: The sequence's slot.
        positions: The positions.
        cells: Where they stand in the slot's row of the cache. Behind the sequence's end they repeat its last cell.
        queries: Which of the forward's queries belong to the sequence.
    """

    slot: int
    positions: Int[np.ndarray, " key"]
    cells: Int[np.ndarray, " key"]
    queries: Bool[np.ndarray, " query"]

    @property
    def consecutive(self) -> bool:
        """Whether the cells stand side by side."""
        return int(self.cells[-1] - self.cells[0]) == len(self.cells) - 1 and bool((np.diff(self.cells) == 1).all())


class Nodes:
    """All nodes of a forward, row by row, with what they see: on the host, because Python walks through it.

    Attributes:
        rows: Each node's row of the batch.
        index: Its number in the topology.
        slots: Its slot.
        cells: Where its keys and values go.
        positions: Its logical position.
    """

    def __init__(self, batch: ForwardBatch, cache: Cache):
        topology, first = batch.topology, batch.topology.width - batch.nodes
        known = batch.host_lengths
        self._lengths = batch.lengths.cpu().numpy() if known is None else known
        self._last = cache.positions - 1
        self._in_line = topology.in_line
        self._parents = None if self._in_line else topology.parents.cpu().numpy()
        depth = topology.depth.cpu().numpy()
        self.index = np.tile(np.arange(first, topology.width), batch.batch)
        self.rows = np.repeat(np.arange(batch.batch), batch.nodes)
        self.slots = np.asarray(batch.host_slots)[self.rows]
        lengths = self._lengths[self.rows]
        self.cells = np.minimum(lengths + self.index, self._last)
        self.positions = lengths + depth[self.rows if len(depth) > 1 else 0, self.index]

    def __len__(self) -> int:
        return len(self.rows)

    def pieces(self, chosen: Int[np.ndarray, " query"]) -> list[Piece]:
        """Returns the blocks of keys that some nodes see. For every node they come in the order of positions."""
        found: list[Piece] = []
        for row in dict.fromkeys(self.rows[chosen].tolist()):
            of_row = self.rows[chosen] == row
            slot, length = int(self.slots[chosen][of_row][0]), int(self._lengths[row])
            # What stands before the tree is common to all of its paths.
            shared = 0 if self._in_line else length // BLOCK
            found += [Piece(slot, *self._block(block, length, None), of_row) for block in range(shared)]
            for path, queries in self._paths(row, chosen, of_row):
                last = int(self.positions[chosen][queries].max())
                blocks = range(shared, last // BLOCK + 1)
                found += [Piece(slot, *self._block(block, length, path), queries) for block in blocks]
        return found

    def _paths(
        self, row: int, chosen: Int[np.ndarray, " query"], of_row: Bool[np.ndarray, " query"]
    ) -> Iterator[tuple[Int[np.ndarray, " depth"] | None, Bool[np.ndarray, " query"]]]:
        """Yields paths through a row's tree that together hold all chosen nodes, and which nodes each one serves.

        A line of nodes is one path, None: there, cells are positions.
        """
        if self._parents is None:
            yield None, of_row
            return
        parents = self._parents[row if len(self._parents) > 1 else 0]
        left = of_row.copy()
        nodes = self.index[chosen]
        while left.any():
            node = int(nodes[left].max())  # children stand behind their parents, so this is the end of a path
            path = [node]
            while parents[path[-1]] >= 0:
                path.append(int(parents[path[-1]]))
            served = left & np.isin(nodes, path)
            left &= ~served
            yield np.array(path[::-1]), served

    def _block(
        self, block: int, length: int, path: Int[np.ndarray, " depth"] | None
    ) -> tuple[Int[np.ndarray, " key"], Int[np.ndarray, " key"]]:
        """Returns the positions of a block and their cells, for the sequence that goes along a path."""
        positions = np.arange(block * BLOCK, (block + 1) * BLOCK)
        if path is None:
            return positions, np.minimum(positions, self._last)
        below = np.clip(positions - length, 0, len(path) - 1)
        return positions, np.minimum(np.where(positions < length, positions, length + path[below]), self._last)


class Sight:
    """What the queries of one forward of single tokens see, made once for all layers.

    Args:
        pieces: The blocks of keys, for every query in the order of positions.
        positions: Logical position of each query.
        reaches: How far back layers see; there is a mask for each.
        device: Where the model runs.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        positions: Int[np.ndarray, " query"],
        reaches: Sequence[Reach],
        device: torch.device,
    ):
        self.pieces = pieces
        self.queries = len(positions)
        keys = np.stack([piece.positions for piece in pieces])[:, None]
        queries = positions[None, :, None]
        members = np.stack([piece.queries for piece in pieces])[:, :, None]
        self._seen: list[Tensor] = []
        self.needed: list[list[bool]] = []
        for reach in reaches:
            seen = members & (keys <= queries)
            if reach.window is not None:
                seen &= queries - keys < reach.window
            if reach.chunk is not None:
                seen &= queries // reach.chunk == keys // reach.chunk
            self.needed.append(seen.any(axis=(1, 2)).tolist())
            self._seen.append(torch.from_numpy(~seen).to(device)[:, :, None])
        cells = torch.from_numpy(np.stack([piece.cells for piece in pieces])).to(device)
        self._cells: list[slice | Tensor] = [
            slice(int(piece.cells[0]), int(piece.cells[-1]) + 1) if piece.consecutive else row
            for piece, row in zip(pieces, cells, strict=True)
        ]
        self._outside = torch.from_numpy(~members).to(device)[:, :, None]

    def hidden(self, reach: int, piece: int) -> Bool[Tensor, "query 1 key"]:
        """Returns which keys of a piece each query may not see, in layers of this reach."""
        return self._seen[reach][piece]

    def outside(self, piece: int) -> Bool[Tensor, "query 1 1"]:
        """Returns which queries do not belong to a piece's sequence."""
        return self._outside[piece]

    def block(
        self, piece: int, stored: Tensor, scales: Tensor | None, dtype: torch.dtype
    ) -> Float[Tensor, "kv_head key dim"]:
        """Returns a copy of the keys or values of a piece, which lies in memory in the same way for every piece."""
        slot, cells = self.pieces[piece].slot, self._cells[piece]
        part = stored[slot][:, cells]
        copy = torch.empty(part.shape, dtype=dtype, device=part.device).copy_(part)
        return copy if scales is None else copy.mul_(scales[slot][:, cells, None])


class SingleTokens(OwnLayout):
    """The cache that a model sees while single tokens of different sequences go through it, each as a row of its own.

    Args:
        cache: Where keys and values go; it has been aimed at the tokens.
        written: How many of the rows are written. The others repeat the last one, to fill the shape up.
        sight: What the tokens see.
        masks: Stand-ins for masks, one per reach: they tell the attention function which reach a layer has.
    """

    def __init__(self, cache: Cache, written: int, sight: Sight, masks: Sequence[Tensor]):
        super().__init__(len(cache.layers))
        self._cache, self._written = cache, written
        self._sight, self._masks = sight, masks
        self._waiting: tuple[Tensor, Tensor, int] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object):
        """Store a layer's keys and values, and pass them on to the attention function, which reads the cache itself."""
        self._waiting = key_states, value_states, layer_idx
        self._cache.write(layer_idx, key_states[: self._written], value_states[: self._written])
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        raise UnsupportedError("its layers select keys by an indexer, whose products have the shape of the cache")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    @cached_property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return True

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Returns the attention of the layer whose keys and values have just been stored."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting[0] is not key or waiting[1] is not value:
            raise UnsupportedError("its layers change keys or values between the cache and the attention function")
        reach = next((number for number, known in enumerate(self._masks) if known is mask), None)
        if reach is None:
            raise UnsupportedError("its layers change the mask on its way to the attention function")
        stored = self._cache.stored(waiting[2])
        wide = torch.promote_types(query.dtype, torch.float32)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        rows = _by_key_head(query.to(wide) * scaling, stored.keys.shape[1])
        kv_heads, queries, groups, _ = rows.shape
        running = _Running(
            rows, value.shape[-1], None if sinks is None else sinks.to(wide).view(kv_heads, 1, groups, 1)
        )
        rows = rows.reshape(kv_heads, queries * groups, -1)
        for piece, needed in enumerate(self._sight.needed[reach]):
            if not needed:
                continue
            keys = self._sight.block(piece, stored.keys, stored.key_scales, wide)
            scores = torch.bmm(rows, keys.transpose(1, 2)).view(kv_heads, queries, groups, BLOCK)
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores = scores.masked_fill(self._sight.hidden(reach, piece), -torch.inf)
            values = self._sight.block(piece, stored.values, stored.value_scales, wide)
            running.add(scores, values, self._sight.outside(piece))
        output = running.result().transpose(0, 1).reshape(queries, 1, kv_heads * groups, -1)
        return output.to(query.dtype)


class _Running:
    """The online softmax of some queries over the blocks that were added so far.

    Args:
        rows: The queries.
        value_dim: The width of the values.
        sinks: Logits that take part in the softmax without a value; None if there are none.
    """

    def __init__(self, rows: Float[Tensor, "kv_head query group dim"], value_dim: int, sinks: Tensor | None):
        shape = rows.shape[:3]
        self._largest = rows.new_full((*shape, _LANES), torch.finfo(rows.dtype).min)
        self._total = rows.new_zeros((*shape, 1))
        if sinks is not None:
            self._largest = torch.maximum(self._largest, sinks)
            self._total = torch.ones_like(self._total)
        self._output = rows.new_zeros((*shape, value_dim))

    def add(
        self,
        scores: Float[Tensor, "kv_head query group key"],
        values: Float[Tensor, "kv_head key value_dim"],
        outside: Bool[Tensor, "query 1 1"],
    ) -> None:
        """Take in a block; hidden keys have the score -inf."""
        kv_heads, queries, groups, _ = scores.shape
        largest = torch.maximum(self._largest, scores.amax(-1, keepdim=True))
        before = torch.exp(self._largest - largest)[..., :1]
        weights = torch.exp(scores - largest[..., :1])
        part = torch.bmm(weights.view(kv_heads, queries * groups, -1), values).view_as(self._output)
        # Zero times the NaN of another sequence is NaN.
        part = part.masked_fill(outside, 0.0)
        self._output = self._output * before + part
        self._total = self._total * before + weights.sum(-1, keepdim=True)
        self._largest = largest

    def result(self) -> Float[Tensor, "kv_head query group value_dim"]:
        return self._output / self._total


def _by_key_head(query: Float[Tensor, "query head 1 dim"], kv_heads: int) -> Float[Tensor, "kv_head query group dim"]:
    """Returns the queries of single tokens, by the key head that they are multiplied with."""
    queries, heads, _, dim = query.shape
    return query.view(queries, kv_heads, heads // kv_heads, dim).transpose(0, 1).contiguous()


# Of this thread: others may run other models meanwhile.
_current: ContextVar[SingleTokens] = ContextVar("single_tokens")


@contextmanager
def attending(tokens: SingleTokens) -> Iterator[None]:
    """Let this file's attention function answer for these tokens during the ``with`` block."""
    token = _current.set(tokens)
    try:
        yield
    finally:
        _current.reset(token)


def invariant_attention(
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
    """An attention function in the form of transformers' ``AttentionInterface``, for rows of one token each."""
    return _current.get().attend(query, key, value, attention_mask, scaling, softcap, s_aux), None


AttentionInterface.register(NAME, invariant_attention)
# The masks are stand-ins; this entry only makes transformers pass them on.
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
