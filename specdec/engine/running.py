"""The requests that hold a slot: how they enter and leave the caches, the slot table and the drafting session."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from specdec.cache.pages import Paging, Placement, pages_for
from specdec.engine.output import failed
from specdec.engine.read_back import DeviceRound
from specdec.engine.scheduler import View
from specdec.engine.slot_table import SlotTable
from specdec.forward import ForwardBatch, ForwardOutput, slot_index
from specdec.interfaces import Session
from specdec.requests import Request
from specdec.target.runner import ModelRunner
from specdec.types import HostOutcome, Outcome, Step


class Swapped(NamedTuple):
    """The cache entries of a preempted request, in the host's memory."""

    length: int  # how many of its first positions
    tensors: list[list[Tensor]]  # their entries, by cache


class Pieces(NamedTuple):
    """Pieces of prompts that a pass over the weights is to put into the cache; the host counts them as being there."""

    requests: Sequence[Request]
    forwards: Sequence[ForwardBatch]  # one of every length, or a padded one
    outcome: Outcome  # without what the target says
    told: Int[np.ndarray, " row"]  # the rows that the session follows
    unseen: bool  # the session observes them behind the forward


class RunningRequests:
    """The requests in the slots, from entry to end: ``pages`` says where they are in the caches.

    ``session`` observes those that speculate, and ``paging`` is the memory of all caches, ``filled_in``.
    ``reads_target``: whether it drafts from what the target has computed of a prompt: hidden states, or its cache.
    """

    def __init__(self, runner: ModelRunner, slots: SlotTable, session: Session | None, paging: Paging):
        self._runner, self._slots, self._session = runner, slots, session
        self._caches = [runner.cache, *(session.caches if session is not None else ())]
        shared = [
            getattr(model, "cache", None) is runner.cache for model in (() if session is None else session.models)
        ]
        self.reads_target = session is not None and (bool(session.hidden_layers) or any(shared))
        self.pages = pages_for(paging, len(slots))
        self._swap, self._swapped = paging.swap, dict[int, Swapped]()
        self._bytes = sum(cache.bytes_per_position for cache in self._caches)

    def __iter__(self) -> Iterator[Request]:
        return iter([request for request in self._slots.by_slot if request is not None])

    def enter(self, request: Request, *, positions: int) -> None:
        """Give a request a slot, with what the caches hold of its tokens already, and pages for so many positions."""
        drafted, tokens = request.speculate and self._session is not None, request.tokens
        kept, again = self._swapped.pop(request.id, None), self._lookback(drafted)
        placement = self.pages.enter(
            tokens, self._slots.free, positions=positions, drafted=drafted, again=again if kept is None else None
        )
        slot, reused = placement.slot, placement.reused
        for cache in self._caches:
            cache.place(placement)
        if kept is not None:
            begin = time.perf_counter()
            for cache, saved in zip(self._caches, kept.tensors, strict=True):
                cache.load(slot, saved)
            reused = max(min(kept.length, len(tokens) - 1 - (again or 0)), 0)
            self.pages.counts.swapped_in += kept.length
            request.swapped += kept.length
            self._swap_time(request, begin)
        now = time.perf_counter()
        request.slot, request.pages, request.reach = slot, len(placement.pages), reused
        request.prefilled, request.to_prefill = reused, len(tokens) - 1 - reused
        if request.preemptions:
            request.preempted += now - request.preempted_at
        else:
            request.admitted, request.reused = now, reused
            if self.pages.shared:
                self.pages.counts.queried += len(tokens) - 1
                self.pages.counts.reused += reused
        self._slots.admit(slot, request)
        self._runner.adapt(slot, request.adapter)
        if drafted and self._session is not None:
            request.drafted = True
            self._session.admit(slot, tokens, request.sampling)
        if reused:
            self._slots.prefilled(slot, reused)
        if not request.to_prefill:
            self._slots.start(slot)
            request.prefill_ended = request.prefill_ended or time.perf_counter()

    def grow(self, request: Request, view: View) -> bool:
        """Give a request the pages for its next round; returns whether it has them, and a slot."""
        if request.slot >= 0 and view.pages_needed(request):
            pages = self.pages.grow(request.slot, view.positions(request))
            if not pages:
                return False
            request.pages = len(pages)
            for cache in self._caches:
                cache.place(Placement(request.slot, pages=pages))
        return request.slot >= 0

    def have_room(self, depth: int) -> bool:
        """Return whether all requests have pages for two rounds with drafts of this depth."""
        size = self.pages.page_size
        return self.pages.free is None or all(
            request.pages * size >= request.length + min(2 * (1 + depth * request.speculate), request.remaining)
            for request in self
        )

    def _lookback(self, drafted: bool) -> int | None:
        """Return how many tokens of a shared beginning are prefilled again; None if all are."""
        if self._runner.cache.states is not None:
            return None  # a state cannot be cut back to a beginning
        return self._session.lookback if drafted and self._session is not None else 0

    def _held(self, request: Request) -> int:
        """Return how many of a request's first tokens are right in the caches that it uses."""
        length = self._slots.length_of(request.slot)
        if request.drafted and self._session is not None:
            return self._session.held(request.slot, length)
        return length

    def _hold(self, request: Request) -> None:
        """Let later requests find what is final of this one."""
        if self.pages.shared and not request.stale:
            tokens = self._slots.tokens_of(request.slot)[: self._held(request)]
            self.pages.hold(request.slot, tokens, drafted=request.drafted)

    def take(self, chunks: Sequence[tuple[Request, int]]) -> Pieces | None:
        """Take pieces of requests' tokens, of each at most so many, for a pass over the weights; None without any.

        The last token of a request is left out: it is the root of its first round.
        """
        wanted = ((request, min(count, request.to_prefill)) for request, count in chunks)
        chunks = sorted(((request, count) for request, count in wanted if count), key=lambda piece: piece[1])
        if not chunks:
            return None
        requests = [request for request, _ in chunks]
        slots, starts, counts = np.array([(each.slot, each.prefilled, count) for each, count in chunks]).T.copy()
        padded, following = np.zeros((len(requests), counts.max()), dtype=np.int64), np.zeros_like(counts)
        for row, (request, count) in enumerate(chunks):
            tokens = request.tokens[request.prefilled : request.prefilled + count + 1]
            padded[row, :count], following[row] = tokens[:count], tokens[count]
            request.reach = request.prefilled + padded.shape[1]
            again = min(count, max(request.computed - request.prefilled, 0))
            request.recomputed += again
            self.pages.counts.recomputed += again
            request.prefilled += count
            request.to_prefill -= count
            self._slots.prefilled(request.slot, request.prefilled)
            if not request.to_prefill:
                self._slots.start(request.slot)
        told = np.flatnonzero([request.drafted for request in requests])
        session = self._session if len(told) else None
        hidden_layers = () if session is None else tuple(session.hidden_layers)
        device = self._runner.device
        tokens, sizes, behind, begins = (
            torch.from_numpy(each).to(device, non_blocking=True) for each in (padded, counts, following, starts)
        )
        forwards, ends = list[ForwardBatch](), np.flatnonzero(np.diff(counts)) + 1 if self._runner.joins else []
        for rows in np.split(np.arange(len(chunks)), ends):
            where: Any = {"host_slots": slots[rows], "host_lengths": starts[rows], "host_counts": counts[rows]}
            piece = tokens[rows[0] : rows[-1] + 1, : counts[rows[-1]]]
            forwards.append(ForwardBatch.of_chunk(piece, **where, hidden_layers=hidden_layers))
        outcome = Outcome(
            slots=slot_index(slots, device), starts=begins, tokens=tokens, counts=sizes, next_tokens=behind,
            host=HostOutcome(slots=slots, starts=starts, counts=counts),
        )  # fmt: skip
        pieces = Pieces(requests, forwards, outcome, told, session is not None and self.reads_target)
        if session is not None and not self.reads_target:
            self._show(pieces, {})
        return pieces

    def _show(self, pieces: Pieces, hidden_states: Mapping[int, Tensor]) -> None:
        assert self._session is not None
        outcome = replace(pieces.outcome, hidden_states=hidden_states)
        self._session.observe(outcome if len(pieces.told) == len(pieces.requests) else outcome.rows(pieces.told))

    def put(self, pieces: Pieces, outputs: Sequence[ForwardOutput]) -> None:
        """Note that pieces are in the cache, where their forwards have put them."""
        if pieces.unseen:
            most, every = pieces.outcome.tokens.shape[1], [each.hidden_states for each in outputs]
            wide = [[F.pad(part, (0, 0, 0, most - part.shape[1])) for part in states.values()] for states in every]
            self._show(pieces, dict(zip(every[0], map(torch.cat, zip(*wide, strict=True)), strict=True)))
        for request in pieces.requests:
            self._hold(request)
        now = time.perf_counter()  # the session has seen the prompt, too: the next thing that happens is a round
        for request in pieces.requests:
            request.prefill_ended = request.prefill_ended or (0.0 if request.to_prefill else now)

    def follow(self, played: DeviceRound, still: np.ndarray) -> None:
        """Note on the host what a round has decided for the rows that are ``still`` there."""
        read, host = played.read, played.batch.on_host
        counts = np.where(read.valid & still, read.num_accepted + 1, 0)
        starts = host.lengths.copy()
        self._slots.advance_host(played.batch, read.tokens, counts)
        if played.outcome is not None and self._session is not None:
            drafted = counts * host.drafting
            known = HostOutcome(
                slots=host.slots, starts=starts, counts=drafted, path=np.where(drafted[:, None] > 0, read.path, -1),
                emitted=read.tokens, proposed_depth=read.proposed_depth,
            )  # fmt: skip
            self._session.observe(replace(played.outcome, host=known))

    def preempt(self, request: Request) -> None:
        """Take a request's slot away. Its tokens will be prefilled again; its text, rounds and draws go on."""
        self.pages.counts.preempted += 1
        request.computed = max(request.computed, self._slots.length_of(request.slot))
        request.preemptions, request.preempted_at = request.preemptions + 1, time.perf_counter()
        held, begin = self._held(request), time.perf_counter()
        fits = (held + sum(kept.length for kept in self._swapped.values())) * self._bytes <= self._swap
        if self._swap and fits and self._lookback(request.drafted) is not None:
            self._swapped[request.id] = Swapped(held, [cache.save(request.slot, held) for cache in self._caches])
            self.pages.counts.swapped_out += held
            self._swap_time(request, begin)
        try:
            self.leave(request)
        finally:
            request.restart()

    def _swap_time(self, request: Request, begin: float) -> None:
        seconds = time.perf_counter() - begin
        request.swap_seconds += seconds
        self.pages.counts.swap_seconds += seconds

    def leave(self, request: Request, *, sound: bool = True) -> None:
        """Free the slot of a request that ends or gives way. What it has in the caches is cleared unless ``sound``."""
        slot, own = request.slot, self.pages.own(request.slot)
        self._slots.release(slot)
        if sound:
            self._hold(request)
        else:
            self._runner.cache.clear(slot, start=own)
            self.pages.forget(slot)
        # Entries may be NaN, which no mask hides. The host may be a round late, and another one may have been played.
        length = max(self._slots.length_of(slot), request.reach)
        for cache in self._caches[1:] if request.drafted else ():
            stop = min(length + 3 * (1 + cache.positions - cache.max_length), cache.positions)
            cache.clear(slot, start=max(own, self.pages.kept(slot)), stop=stop)
        for cache in self._caches:
            cache.vacate(slot)
        self.pages.leave(slot)
        if request.drafted and self._session is not None:
            request.drafted = False
            self._session.release(slot)

    def forget(self) -> None:
        """Let no request find what the caches hold now, because they no longer hold what the models would compute."""
        self.pages.forget_all()
        self._swapped.clear()
        for request in self:
            request.stale = True

    def drop(self, request: Request) -> None:
        """Forget what is left of a request that waits, which may have been preempted."""
        self._swapped.pop(request.id, None)

    def fail(self, error: BaseException, message: str) -> list[Step]:
        """End all requests after an error, to which goes a note of what fails then; returns their last steps."""
        steps = []
        for request in self:
            steps.append(failed(request, message))
            try:
                self.leave(request, sound=False)
            except BaseException as another:
                error.add_note(f"and then, on releasing request {request.id}: {type(another).__name__}: {another}")
        return steps
