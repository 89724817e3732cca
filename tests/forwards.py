"""Forwards and slots for tests that run a runner or a drafter without an engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec import Batch, DraftTree, ForwardBatch, ForwardOutput, ModelRunner, Outcome, SamplingParams, Session, Wants
from specdec.engine.slot_table import SlotTable
from specdec.requests import Request
from specdec.types import HostOutcome


def prefill(
    runner: ModelRunner,
    tokens: Tensor,
    starts: np.ndarray,
    *,
    slots: Sequence[int] | None = None,
    counts: np.ndarray | None = None,
) -> ForwardOutput:
    """Append pieces of prompts to slots: by default to the first ones, in order."""
    rows = np.arange(len(tokens)) if slots is None else np.array(slots)
    sizes: dict[str, Any] = {"host_slots": rows, "host_lengths": starts, "host_counts": counts}
    return runner.run(ForwardBatch.of_chunk(tokens, **sizes))


def verify(
    runner: ModelRunner,
    tree: DraftTree,
    lengths: Sequence[int] | np.ndarray | Tensor,
    *,
    slots: Sequence[int] | None = None,
    wants: Wants = Wants(),  # noqa: B008 (immutable)
) -> ForwardOutput:
    """Run all nodes of trees behind prefixes of these lengths."""
    host = lengths.numpy() if isinstance(lengths, Tensor) else np.array(lengths)
    rows = np.arange(len(host)) if slots is None else np.array(slots)
    return runner.run(ForwardBatch.of_tree(tree, host_slots=rows, host_lengths=host, wants=wants))


def slots_of(
    sequences: Sequence[Sequence[int]],
    *,
    vocab_size: int = 1000,
    params: Sequence[SamplingParams] | None = None,
    drafting: Sequence[bool] | None = None,
    max_depth: int | Sequence[int] = 100,
    max_length: int | None = None,
) -> Batch:
    """Batch whose requests have these sequences, all but the last token in the cache."""
    count, longest = len(sequences), max(len(sequence) for sequence in sequences)
    table = SlotTable(count, max_length or longest + 3, vocab_size, torch.device("cpu"))
    table._host_tokens[:] = np.random.default_rng(0).integers(0, 3, table._host_tokens.shape)
    for slot, sequence in enumerate(sequences):
        sampling = SamplingParams() if params is None else params[slot]
        speculate = True if drafting is None else drafting[slot]
        wanted = sampling.seeded(slot)
        table.admit(slot, Request(slot, sequence, wanted, speculate=speculate, stop_ids=frozenset()))
        table.prefilled(slot, len(sequence) - 1)
        table.start(slot)
    rows = table.rows(np.arange(count))
    rows.on_host.max_depth[:] = max_depth
    rows.max_depth.copy_(torch.from_numpy(rows.on_host.max_depth))
    return rows


def outcome_of(
    tokens: Sequence[Sequence[int]] | Tensor,
    counts: Sequence[int],
    *,
    slots: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
    next_tokens: Sequence[int] | None = None,
    path: Sequence[Sequence[int]] | None = None,
    emitted: Sequence[Sequence[int]] | None = None,
    **more: Any,
) -> Outcome:
    """An outcome with the host's numbers: of a piece of a prompt, or of a round if there is a path."""
    ids = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens)
    rows = len(ids)
    zeros = np.zeros(rows, dtype=np.int64)
    host = HostOutcome(
        slots=np.arange(rows) if slots is None else np.array(slots),
        starts=zeros if starts is None else np.array(starts),
        counts=np.array(counts),
        path=None if path is None else np.array(path),
        emitted=None if emitted is None else np.array(emitted),
        proposed_depth=None if path is None else zeros,
    )
    return Outcome(
        slots=torch.from_numpy(host.slots),
        starts=torch.from_numpy(host.starts),
        tokens=ids,
        counts=torch.from_numpy(host.counts),
        next_tokens=torch.zeros(rows, dtype=torch.long) if next_tokens is None else torch.tensor(next_tokens),
        path=None if path is None else torch.tensor(path),
        host=host,
        **more,
    )


def drafted(session: Session, batch: Batch) -> DraftTree:
    """The proposal of a session, as an engine asks for it."""
    session.prepare(batch)
    return session.propose(batch)


def node_paths(tree: DraftTree, row: int) -> dict[int, list[int]]:
    """The tokens from the root to every valid node of a row, by the node."""
    found = {0: [int(tree.tokens[row, 0])]}
    for node, (parent, token) in enumerate(zip(tree.parents[row].tolist(), tree.tokens[row].tolist(), strict=True)):
        if node and tree.valid[row, node]:
            found[node] = [*found[parent], token]
    return found


def inner_paths(tree: DraftTree, row: int) -> dict[int, list[int]]:
    """Those of the nodes that have valid children."""
    inner = set(tree.parents[row, tree.valid[row]].tolist())
    return {node: path for node, path in node_paths(tree, row).items() if node in inner}
