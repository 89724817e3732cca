"""The requests that hold a slot: their state in the cache, the slot table and the drafting session."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from specdec.batch import Batch
from specdec.engine.output import Outputs
from specdec.engine.round import Played
from specdec.engine.slot_table import SlotTable
from specdec.forward import ForwardBatch
from specdec.interfaces import Session
from specdec.requests import Request
from specdec.target.runner import ModelRunner
from specdec.types import HostOutcome, Outcome, Step


class RunningRequests:
    """The requests in the slots, from entry to end.

    Args:
        runner: Runs the target, and has its cache.
        slots: The state per slot.
        outputs: Makes steps and text.
        session: Observes requests that speculate; None without a drafter.
        max_batch_size: The number of slots.

    Attributes:
        by_slot: The request in every slot; None where a slot is free.
    """

    def __init__(
        self, runner: ModelRunner, slots: SlotTable, outputs: Outputs, session: Session | None, *, max_batch_size: int
    ):
        self._runner, self._slots, self._outputs, self._session = runner, slots, outputs, session
        self.by_slot: list[Request | None] = [None] * max_batch_size
        self._drafted_for: set[int] = set()  # requests that the session has admitted

    def __iter__(self) -> Iterator[Request]:
        return iter([request for request in self.by_slot if request is not None])

    def __len__(self) -> int:
        return sum(request is not None for request in self.by_slot)

    def enter(self, request: Request) -> None:
        """Give a request the first free slot."""
        slot = self.by_slot.index(None)
        request.slot = slot
        request.admitted = request.admitted or time.perf_counter()
        self.by_slot[slot] = request
        tokens = request.tokens
        self._runner.cache.reserve(slot, len(request.prompt_ids) + request.sampling.max_new_tokens)
        self._slots.admit(
            slot,
            tokens,
            request.sampling,
            speculate=request.speculate,
            remaining=request.remaining,
            rounds=request.rounds,
        )
        self._outputs.begin(request)
        if request.speculate and self._session is not None:
            self._drafted_for.add(request.id)
            self._session.admit(slot, tokens, request.sampling)
        if len(tokens) == 1:
            self._slots.start(slot)
            request.prefill_ended = time.perf_counter()

    def prefill(self, chunks: Sequence[tuple[Request, int]]) -> None:
        """Put pieces of requests' tokens into the cache, all in one forward.

        The last token of a request is left out: it is the root of its first round.

        Args:
            chunks: Requests, and how many of their tokens; none has more than it has ``to_prefill``.
        """
        chunks = [(request, count) for request, count in chunks if count]
        if not chunks:
            return
        runner, requests = self._runner, [request for request, _ in chunks]
        starts = np.array([request.prefilled for request in requests])
        counts = np.array([count for _, count in chunks])
        padded = np.zeros((len(requests), counts.max()), dtype=np.int64)
        following = np.zeros(len(requests), dtype=np.int64)
        for row, (request, count) in enumerate(chunks):
            tokens = request.tokens[request.prefilled : request.prefilled + count + 1]
            padded[row, :count], following[row] = tokens[:count], tokens[count]
        slots = np.array([request.slot for request in requests])
        told = np.array([request.id in self._drafted_for for request in requests])
        session = self._session if told.any() else None
        batch = ForwardBatch.of_chunk(
            torch.from_numpy(padded).to(runner.device, non_blocking=True),
            host_slots=slots,
            host_lengths=starts,
            hidden_layers=() if session is None else tuple(session.hidden_layers),
        )
        output = runner.run(batch)
        done = []
        for request, count in chunks:
            request.prefilled += count
            request.to_prefill -= count
            self._slots.prefilled(request.slot, request.prefilled)
            if not request.to_prefill:
                self._slots.start(request.slot)
                done.append(request)
        if session is not None:
            assert batch.tokens is not None
            outcome = Outcome(
                slots=batch.slots,
                starts=batch.lengths,
                tokens=batch.tokens,
                counts=torch.from_numpy(counts).to(runner.device, non_blocking=True),
                next_tokens=torch.from_numpy(following).to(runner.device, non_blocking=True),
                hidden_states=output.hidden_states,
                host=HostOutcome(slots=slots, starts=starts, counts=counts),
            )
            session.observe(outcome if told.all() else outcome.rows(np.flatnonzero(told)))
        now = time.perf_counter()  # the session has seen the prompt, too: the next thing that happens is a round
        for request in done:
            request.prefill_ended = request.prefill_ended or now

    def follow(self, played: Played, batch: Batch, still: np.ndarray) -> None:
        """Note on the host what a round has decided for the rows that are ``still`` there."""
        read, host = played.read, batch.on_host
        counts = np.where(read.valid & still, read.num_accepted + 1, 0)
        outcome = played.outcome
        if outcome is not None and self._session is not None:
            known = HostOutcome(
                slots=host.slots,
                starts=host.lengths.copy(),
                counts=counts * host.drafting,
                path=np.where((counts * host.drafting)[:, None] > 0, read.path, -1),
                emitted=read.tokens,
                proposed_depth=read.proposed_depth,
            )
            outcome = replace(outcome, host=known)
        self._slots.advance_host(batch, read.tokens, counts)
        if outcome is not None and self._session is not None:
            self._session.observe(outcome)

    def start_over(self, slot: int, played: Played) -> None:
        """Have the next round begin where this one did, which decided nothing, without drafts.

        A draft whose keys are NaN spoils all nodes of its tree, even through masks. Where that may not change the
        output (``repeatable``), the request goes on from the same root, which plain decoding would have reached, too.
        """
        self._slots.cap(slot, 0)
        start = self._slots.length_of(slot)
        self._runner.cache.clear(slot, start=start, stop=start + played.tree.width)

    def preempt(self, request: Request) -> None:
        """Take a request's slot away. Its tokens will be prefilled again; its text, rounds and random numbers go on."""
        try:
            self._free(request)
        finally:
            request.restart()

    def leave(self, request: Request) -> None:
        """End a request, and free its slot."""
        self._outputs.end(request)
        self._free(request)

    def _free(self, request: Request) -> None:
        self.by_slot[request.slot] = None
        self._slots.release(request.slot)
        self._runner.cache.free(request.slot)
        if request.id in self._drafted_for and self._session is not None:
            self._drafted_for.discard(request.id)
            self._session.release(request.slot)

    def fail(self, error: BaseException, message: str) -> list[Step]:
        """End all requests, whose state is unknown after an error; returns their last steps."""
        steps = []
        for request in self:
            steps.append(self._outputs.failed(request, message))
            self._runner.cache.clear(request.slot)
            self.release(request, error)
        return steps

    def release(self, request: Request, error: BaseException) -> None:
        """End a request after an error, which nothing that goes wrong now may hide."""
        try:
            self.leave(request)
        except Exception as another:
            error.add_note(f"and then, on releasing request {request.id}: {type(another).__name__}: {another}")


def running_slots(requests: Iterable[Request], slots: SlotTable) -> np.ndarray:
    """Return the slots of those requests that can take part in a round, ascending."""
    return np.array(sorted({request.slot for request in requests if slots.is_running(request.slot)}), dtype=np.int64)
