"""The order in which a forward's nodes go through a recurrent layer: every node after its parent."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from specdec.cache.states import Pending
from specdec.forward import ForwardBatch


class Call(NamedTuple):
    """One call of a recurrent layer.

    Attributes:
        rows: Rows of the forward, one for each row of the call.
        columns: The nodes of each; one row of them where all are alike.
        slots: The slot of every row of the call.
        before: The place of the state that each starts from (``specdec.cache.states``); None if nothing came before.
        after: The place of the state that each leaves.
        depth: How deep the nodes are, the root's being 0; 0 for pieces.
    """

    rows: Int[Tensor, "pair 1"]
    columns: Int[Tensor, "pair node"]
    slots: Int[Tensor, " pair"]
    before: Int[Tensor, " pair"] | None
    after: Int[Tensor, " pair"]
    depth: int = 0


def calls_of(batch: ForwardBatch, *, one_by_one: bool) -> list[Call]:
    """Return the calls for a forward of trees, or of pieces of prompts.

    Calls never mix rows that have a state with rows that have none. A tree takes one call per level: its nodes of one
    depth, over all rows; levels that are not in the forward, of a tree that grows, have been run before. Pieces of
    prompts take one call for all rows with equally many tokens, so that padding never reaches a layer; a layer that
    takes tokens ``one_by_one`` behind a state takes as many calls.
    """
    fresh = (batch.lengths == 0).cpu().numpy()
    found = _of_levels(batch, fresh) if batch.counts is None else _of_pieces(batch, fresh, one_by_one=one_by_one)
    return list(found)


def calls_again(batch: ForwardBatch, pending: Pending, *, one_by_one: bool) -> list[Call]:
    """Return the calls over the accepted paths that are not in the final states of a forward's slots.

    Their rows are slots (``Pending.inputs``). There is one call for all rows with equally many nodes.
    """
    counts = pending.counts[batch.slots].cpu().numpy()
    if not counts.any():
        return []
    paths, slots = pending.path[batch.slots].cpu().numpy(), batch.slots.cpu().numpy()
    found = []
    for count in sorted({*counts.tolist()} - {0}):
        row = np.flatnonzero(counts == count)
        final = np.zeros(len(row), dtype=np.int64)
        for columns in np.split(paths[row, :count], count if one_by_one else 1, axis=1):
            found.append(
                _call(batch.slots, row, columns, final, final)._replace(
                    rows=torch.from_numpy(slots[row, None]).to(batch.slots.device)
                )
            )
    return found


def calls_one_by_one(batch: ForwardBatch, chosen: Int[np.ndarray, " node"]) -> list[Call]:
    """Return a call for each of some nodes of a forward, numbered row by row; rows of the calls count these nodes."""
    fresh, first = (batch.lengths == 0).cpu().numpy(), batch.topology.width - batch.nodes
    parents = batch.topology.parents.cpu().expand(batch.batch, -1).numpy()
    found = []
    for place, (row, node) in enumerate(zip(*divmod(chosen, batch.nodes), strict=True)):
        if batch.counts is not None and node >= batch.counts[row]:
            continue  # padding
        before, after = (parents[row, first + node] + 1, first + node + 1) if batch.counts is None else (node > 0, 1)
        nothing = fresh[row] and first + node == 0
        call = _call(
            batch.slots,
            row[None],
            np.zeros((1, 1), dtype=np.int64),
            None if nothing else np.array([before], dtype=np.int64),
            np.array([after], dtype=np.int64),
        )
        found.append(call._replace(rows=torch.full_like(call.rows, place)))
    return found


def _of_levels(batch: ForwardBatch, fresh: np.ndarray) -> Iterator[Call]:
    topology, rows, first = batch.topology, batch.batch, batch.topology.width - batch.nodes
    depth = topology.depth.cpu().expand(rows, -1).numpy()
    parents = topology.parents.cpu().expand(rows, -1).numpy()
    for level in np.unique(depth[:, first:]):
        row, node = np.nonzero(depth == level)
        row, node = row[node >= first], node[node >= first]
        for nothing in (False, True) if level == 0 else (False,):
            some = fresh[row] == nothing if level == 0 else slice(None)
            if len(row[some]):
                before = None if nothing else parents[row[some], node[some]] + 1
                columns = node[some][:, None] - first
                yield _call(batch.slots, row[some], columns, before, node[some] + 1)._replace(depth=int(level))


def _of_pieces(batch: ForwardBatch, fresh: np.ndarray, *, one_by_one: bool) -> Iterator[Call]:
    counts = batch.counts
    assert counts is not None, "a piece of a prompt"
    for nothing in (True, False):
        for count in sorted({*counts[fresh == nothing].tolist()} - {0}):
            row = np.flatnonzero((fresh == nothing) & (counts == count))
            cuts = range(count) if one_by_one and not nothing else range(0, count, count)
            for start in cuts:
                stop = start + 1 if one_by_one and not nothing else count
                before = None if nothing else np.full(len(row), int(start > 0))
                yield _call(batch.slots, row, np.arange(start, stop)[None], before, np.ones(len(row), dtype=np.int64))


def _call(
    slots: Int[Tensor, " batch"], row: np.ndarray, columns: np.ndarray, before: np.ndarray | None, after: np.ndarray
) -> Call:
    device = slots.device
    rows = torch.from_numpy(row).to(device)
    return Call(
        rows=rows[:, None],
        columns=torch.from_numpy(columns).to(device),
        slots=slots[rows],
        before=None if before is None else torch.from_numpy(before).to(device),
        after=torch.from_numpy(after).to(device),
    )
