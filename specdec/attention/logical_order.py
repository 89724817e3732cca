"""Where the keys that a query sees stand in the cache, in the order of their positions and in blocks of one size.

A tree's nodes stand in the cache in the order in which they were drafted, with siblings in between, whereas plain
decoding finds the same tokens side by side. Here both get the same blocks.

A tree behind two committed tokens, whose root has the children a and b, and the blocks of the path to b, if a block
had four positions::

    cell      0   1   2     3  4          position  0   1   2     3
    cache     p0  p1  root  a  b          path of b p0  p1  root  b     cells 0 1 2 4
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specdec.attention.facts import Reach
from specdec.cache.storage import Cache
from specdec.forward import ForwardBatch

BLOCK = 128
"""Positions per block of keys. Smaller blocks waste less on short sequences and call more kernels on long ones."""


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
        assert not topology.both_ways, "a block's slots need a target's invariance no more than any drafter does"
        self._lengths = batch.lengths.cpu().numpy()
        self._last = cache.positions - 1
        self._in_line = topology.in_line
        self._parents = None if self._in_line else topology.parents.cpu().numpy()
        depth = topology.depth.cpu().numpy()
        self.index = np.tile(np.arange(first, topology.width), batch.batch)
        self.rows = np.repeat(np.arange(batch.batch), batch.nodes)
        self.slots = batch.slots.cpu().numpy()[self.rows]
        lengths = self._lengths[self.rows]
        self.cells = np.minimum(lengths + self.index, self._last)
        self.positions = lengths + depth[self.rows if len(depth) > 1 else 0, self.index]

    def __len__(self) -> int:
        return len(self.rows)

    def pieces(self, chosen: Int[np.ndarray, " query"]) -> list[Piece]:
        """Return the blocks of keys that some nodes see. For every node they come in the order of positions."""
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
        """Return the positions of a block and their cells, for the sequence that goes along a path."""
        positions = np.arange(block * BLOCK, (block + 1) * BLOCK)
        if path is None:
            return positions, np.minimum(positions, self._last)
        below = np.clip(positions - length, 0, len(path) - 1)
        return positions, np.minimum(np.where(positions < length, positions, length + path[below]), self._last)


class Sight:
    """What the queries of one forward of single tokens see, made once for all layers.

    ``pieces`` are the blocks of keys, for every query in the order of positions. There is a mask for each reach.
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
            self.needed.append([bool(each.any()) for each in seen])
            self._seen.append(torch.from_numpy(~seen).to(device)[:, :, None])
        cells = torch.from_numpy(np.stack([piece.cells for piece in pieces])).to(device)
        self._cells: list[slice | Tensor] = [
            slice(int(piece.cells[0]), int(piece.cells[-1]) + 1) if piece.consecutive else row
            for piece, row in zip(pieces, cells, strict=True)
        ]
        self._outside = torch.from_numpy(~members).to(device)[:, :, None]

    def hidden(self, reach: int, piece: int) -> Tensor:
        """Return which keys of a piece each query may not see, in layers of this reach, ``[query, 1, key]``."""
        return self._seen[reach][piece]

    def outside(self, piece: int) -> Tensor:
        """Return which queries do not belong to a piece's sequence, ``[query, 1, 1]``."""
        return self._outside[piece]

    def block(self, piece: int, cache: Cache, stored: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return a copy of a piece's keys or values, ``[kv_head, key, dim]``: contiguous, whichever piece it is."""
        slot, cells = self.pieces[piece].slot, self._cells[piece]
        part = cache.cells(stored, slot, cells)
        copy = torch.empty(part.shape, dtype=dtype, device=part.device).copy_(part)
        return copy if scales is None else copy.mul_(cache.cells(scales, slot, cells)[..., None])
