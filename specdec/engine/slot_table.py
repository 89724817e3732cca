"""The table of requests: who is in which slot, and the numbers of all slots, on the device and mirrored on the host."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from specdec.batch import Batch, HostBatch, Matchers
from specdec.cache.token_tables import TokenTables, processors_of
from specdec.forward import slot_index
from specdec.random import request_key
from specdec.requests import Request, SamplingParams
from specdec.sampling import SamplingTensors
from specdec.types import Outcome

_NO_CAP = np.iinfo(np.int64).max

_Take = Callable[[Tensor, int], Tensor]
"""Returns some slots of a tensor whose slots stand along an axis."""


class SlotTable:
    """State of all slots; ``by_slot`` has their requests, None where a slot is free.

    ``admit`` gives a slot to a request, and ``prefilled`` counts how much of its prompt is in the cache. From ``start``
    to ``release`` it takes part in rounds. Each round ends with ``advance`` on the device and ``advance_host`` on the
    host. ``sizes`` are the numbers of rows that ``padded`` returns, ascending; the last one is the number of slots.
    """

    def __init__(
        self, max_batch_size: int, max_length: int, vocab_size: int, device: torch.device, *, sizes: Sequence[int] = ()
    ):
        self.device, self.vocab_size, self.max_length, self.sizes = device, vocab_size, max_length, sizes
        self._spare = max_batch_size  # the slot of all rows that belong to no request, if there are any
        count = max_batch_size + spare_slots(sizes)
        with torch.inference_mode(False):  # an engine may be built in inference mode and used outside
            # Numbers of a kind stand together, so that rows are copied in three operations.
            self._integers = torch.zeros(7, count, dtype=torch.long, device=device)
            self._floats = torch.tensor([[0.0], [1.0], [0.0], [1.0], [0.0], [0.0]], device=device).repeat(1, count)
            self._drafting = torch.zeros(count, dtype=torch.bool, device=device)
            self._index = torch.full((max_batch_size,), -1, device=device)
            self._roots, self._lengths, self._max_depth = self._integers[:3]
        self._lengths[max_batch_size:] = 1
        self._index_on_host = np.full(max_batch_size, -1, dtype=np.int64)
        self._copies: dict[tuple[int, int], Tensor] = {}
        self._tables = TokenTables(count, vocab_size, device)
        self._host_tokens = np.zeros((max_batch_size, max_length + 1), dtype=np.int32)
        self._host_lengths, self._host_remaining = np.zeros((2, max_batch_size), dtype=np.int64)
        self._host_drafting = np.zeros(max_batch_size, dtype=bool)
        self._cap = np.full(max_batch_size, _NO_CAP)  # of the depth of the next round's drafts
        self._depth_is_set = np.zeros(max_batch_size, dtype=bool)  # on the host, not by counting down
        self.by_slot: list[Request | None] = [None] * count
        self._matchers = Matchers(self.by_slot, vocab_size)
        self._views: dict[bytes, Batch] = {}

    def __len__(self) -> int:
        return self._spare

    @property
    def free(self) -> list[int]:
        return [slot for slot, request in enumerate(self.by_slot[: self._spare]) if request is None]

    def admit(self, slot: int, request: Request) -> None:
        """Give a slot to a request with seed and stream; a preempted one goes on counting rounds, same draws."""
        tokens, sampling = request.tokens, request.sampling
        assert sampling.seed is not None and sampling.stream is not None, "the engine seeds requests"
        assert self.by_slot[slot] is None, f"slot {slot} is taken"
        self._views.clear()
        self.by_slot[slot] = request
        self._host_tokens[slot, : len(tokens)] = tokens
        self._host_lengths[slot], self._host_remaining[slot] = 0, request.remaining
        self._host_drafting[slot] = request.speculate
        self._cap[slot] = _NO_CAP
        self._drafting[slot] = request.speculate
        key, first_end = request_key(sampling.seed, sampling.stream), len(request.prompt_ids) + sampling.min_new_tokens
        penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
        top_k, *others = 0, 0.0, 1.0, 0.0
        if not sampling.greedy:
            top_k, *others = sampling.top_k, sampling.temperature, sampling.top_p, sampling.min_p
        # In the order in which the numbers of a kind stand.
        integers = [tokens[0], 0, 0, request.rounds, key, top_k, first_end - 1]
        self._integers[:, slot] = torch.tensor(integers, device=self.device)
        self._floats[:, slot] = torch.tensor([*others, *penalties], device=self.device)
        self._tables.admit(slot, request)

    def prefilled(self, slot: int, length: int) -> None:
        """Note that the cache holds ``length`` tokens of the slot's prompt."""
        self._host_lengths[slot] = length
        self._lengths[slot] = length

    def start(self, slot: int) -> None:
        """Let the slot take part in rounds: all of its prompt is in the cache except the last token, the root."""
        self._views.clear()
        room = min(int(self._host_remaining[slot]), self.max_length - int(self._host_lengths[slot])) - 1
        self._max_depth[slot] = room if self._host_drafting[slot] else 0
        self._depth_is_set[slot] = False
        self._roots[slot] = int(self._host_tokens[slot, self._host_lengths[slot]])

    def release(self, slot: int) -> None:
        """Free the slot, whose request has ended. The host's tokens of it can be read until it is taken again."""
        self._views.clear()
        self._tables.release(self.by_slot[slot])
        self.by_slot[slot] = None

    @property
    def counts_by_itself(self) -> bool:
        """Whether the device knows how deep every row may draft, without being told by the host."""
        return not ((self._cap < _NO_CAP).any() or self._depth_is_set.any())

    def rows(self, host_index: np.ndarray) -> Batch:
        """Returns some running slots for a round: views, made once per set of requests, if consecutive, else copies."""
        key = host_index.tobytes()
        first, last = int(host_index[0]), int(host_index[-1]) + 1
        rows = self._views.get(key)
        if rows is None and last - first == len(host_index):
            index = slot_index(host_index, self.device)
            take = partial(torch.narrow, start=first, length=last - first)
            rows = self._views[key] = self._make(host_index, slice(first, last), index, take)
        elif rows is None:
            rows = self._make(host_index, host_index, *self._copy(host_index))
        self._limit_depth(rows)
        return rows

    def padded(self, rows: Batch) -> Batch:
        """Returns the same rows as copies, with further ones behind them that make up one of few numbers of rows.

        Those are of a slot that no request ever gets. The host's numbers are of the given rows alone.
        """
        count = next(size for size in self.sizes if size >= len(rows))
        copied = rows.first_slot is None
        if len(self) == 1 or (copied and len(rows) == count):
            return rows
        more = np.full(count - len(rows), self._spare)
        index, take = self._copy(np.concatenate([rows.on_host.slots, more]))
        state, sampling = self._tensors(take)
        padded = replace(rows, slots=index, **state, sampling=replace(rows.sampling, **sampling), first_slot=None)
        if copied:  # where drafts are capped, the copies alone know it
            padded.max_depth[: len(rows)].copy_(rows.max_depth)
        return padded

    def idle(self, count: int, sampling: SamplingParams) -> Batch:
        """Returns the first slots as if requests of these parameters ran there that draft nothing, for a warm-up.

        Every slot has one committed token. Whoever is admitted finds nothing of it.
        """
        assert not any(self.by_slot), "there must be no requests"
        self._views.clear()
        self._integers.zero_()
        self._lengths.fill_(1)
        self._drafting.fill_(False)
        self._host_lengths[:count], self._host_drafting[:count], self._host_remaining[:count] = 1, False, 2
        nobody = Request(id=-1, prompt_ids=(0, 0), sampling=sampling, speculate=False, stop_ids=frozenset())
        self.by_slot[:count] = [nobody] * count
        try:
            return self.rows(np.arange(count))
        finally:
            self.by_slot[:count] = [None] * count
            self._views.clear()

    def _limit_depth(self, rows: Batch) -> None:
        """Deeper nodes would be beyond the tokens still wanted, or the row's last position.

        The device counts down by itself (``advance``), except around a round whose drafts are capped.
        """
        host = rows.on_host
        left = np.minimum(host.remaining, self.max_length - host.lengths) - 1
        # A running request wants a token and has room for it, so that this is not negative.
        np.multiply(left, host.drafting, out=host.max_depth)
        if not self.counts_by_itself:
            capped = self._cap[host.slots]
            np.minimum(host.max_depth, capped, out=host.max_depth)
            rows.max_depth.copy_(torch.from_numpy(host.max_depth), non_blocking=True)
            self._depth_is_set[host.slots] = capped < _NO_CAP
            self._cap[host.slots] = _NO_CAP

    def _copy(self, host_index: np.ndarray) -> tuple[Tensor, _Take]:
        """Returns slots on the device, and what copies their tensors: to the same places for as many rows."""
        count = len(host_index)
        index = self._index[:count]
        if not np.array_equal(self._index_on_host[:count], host_index):
            self._index_on_host[:count] = host_index
            index.copy_(torch.from_numpy(host_index), non_blocking=True)

        def take(tensor: Tensor, axis: int) -> Tensor:
            # By identity: the table's tensors are made once.
            place = self._copies.get((id(tensor), count))
            if place is None:
                with torch.inference_mode(False):
                    place = self._copies[id(tensor), count] = torch.empty_like(tensor.narrow(axis, 0, count))
            return torch.index_select(tensor, axis, index, out=place)

        return index, take

    def _tensors(self, take: _Take) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the tensors of a batch and of its sampling parameters, by name."""
        names = ("roots", "lengths", "max_depth", "rounds", "keys", "top_k", "first_end")
        state = dict(zip(names, take(self._integers, 1), strict=True))
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        sampling: dict[str, Any] = dict(zip(names, take(self._floats, 1), strict=True))
        sampling |= {name: state.pop(name) for name in ("top_k", "first_end")}
        sampling["tables"] = {name: take(table, 0) for name, table in self._tables.by_name.items()}
        return state | {"drafting": take(self._drafting, 0)}, sampling

    def _make(self, host_index: np.ndarray, where: slice | np.ndarray, index: Tensor, take: _Take) -> Batch:
        params = [request.sampling for slot in host_index if (request := self.by_slot[slot]) is not None]
        state, sampling = self._tensors(take)
        return Batch(
            slots=index,
            **state,
            sampling=SamplingTensors.of(params, **sampling),
            processors=[processors_of(param) for param in params],
            faults={},
            matchers=self._matchers,
            vocab_size=self.vocab_size,
            has_grammars=self._matchers.of(host_index),
            masks_drafts=self._matchers.of(host_index, drafts=True),
            alternatives=max((param.logprobs for param in params if param.logprobs is not None), default=None),
            host=HostBatch(
                slots=host_index,
                tokens=self._host_tokens[where],
                lengths=self._host_lengths[where],
                drafting=self._host_drafting[where],
                max_depth=np.zeros(len(host_index), dtype=np.int64),
                remaining=self._host_remaining[where],
            ),
            first_slot=int(host_index[0]) if isinstance(where, slice) else None,
        )

    def advance(self, rows: Batch, outcome: Outcome) -> None:
        """End a round on the device: the only place where lengths, roots and rounds move."""
        emitted, root = outcome.counts, outcome.next_tokens
        self._tables.advance(rows.sampling.tables, rows.roots, outcome, copied=rows.first_slot is None)
        if rows.first_slot is not None:
            rows.lengths.add_(emitted)
            rows.roots.copy_(root)
            rows.rounds.add_(1)
            rows.max_depth.sub_(emitted * rows.drafting)
        else:
            room = rows.max_depth - emitted * rows.drafting
            moved = torch.stack([root, rows.lengths + emitted, room, rows.rounds + 1])
            self._integers[:4].index_copy_(1, rows.slots, moved)
            if len(self._drafting) > len(self):
                self._lengths[len(self) :].fill_(1)  # what belongs to no request stays where it is

    def cap(self, slots: int | np.ndarray, depth: int) -> None:
        """Let the drafts of these slots' next round be no deeper than this."""
        self._cap[slots] = depth

    def length_of(self, slot: int) -> int:
        """Return how many tokens of a slot are in the cache, as far as the host knows."""
        return int(self._host_lengths[slot])

    def tokens_of(self, slot: int) -> Int[np.ndarray, " position"]:
        """Return the tokens of a slot that are in the cache, as far as the host knows."""
        return self._host_tokens[slot, : self._host_lengths[slot]]

    def advance_host(
        self, rows: Batch, emitted: Int[np.ndarray, "batch position"], counts: Int[np.ndarray, " batch"]
    ) -> None:
        """End a round on the host, in which each row emits so many tokens, the last of which is the new root."""
        row, step = np.nonzero(np.arange(emitted.shape[1]) < counts[:, None])
        slots = rows.on_host.slots
        self._host_tokens[slots[row], self._host_lengths[slots[row]] + 1 + step] = emitted[row, step]
        self._host_lengths[slots] += counts
        self._host_remaining[slots] -= counts


def row_sizes(most: int) -> tuple[int, ...]:
    """Returns the numbers of rows that recorded rounds are padded to: 1, 2, 4, 8, 16, 24, 32, 48 …; all up to four."""
    sizes = list(range(1, most + 1)) if most <= 4 else [1, 2, 4, 8]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(8, 1 << (sizes[-1].bit_length() - 2)))
    return (*sizes[:-1], most)


def spare_slots(sizes: Sequence[int]) -> int:
    """Returns how many slots padding needs: one, unless rounds of every number of rows are recorded."""
    return int(len(sizes) < max(sizes, default=0))
