"""The requests in the slots: what each has in the cache, the slot table and the drafter, from entry to end."""

import time
from collections.abc import Iterable, Iterator

import numpy as np

from specdec.batch import Batch
from specdec.drafting.on_device import DeviceDrafter
from specdec.engine.flight import told_of
from specdec.engine.output import Outputs
from specdec.engine.prefill import prefill
from specdec.engine.round import Played
from specdec.engine.slot_table import SlotTable
from specdec.interfaces import Drafter
from specdec.requests import Request
from specdec.target.runner import ModelRunner
from specdec.types import Step


class Occupants:
    """Keeps everything that belongs to a slot's request in step.

    Args:
        runner: Runs the target, and has its cache.
        slots: The state per slot.
        outputs: Makes steps and text.
        drafter: Is told of requests that speculate; None if there is none.
        max_batch_size: The number of slots.

    Attributes:
        by_slot: The request in every slot; None where a slot is free.
    """

    def __init__(
        self, runner: ModelRunner, slots: SlotTable, outputs: Outputs, drafter: Drafter | None, *, max_batch_size: int
    ):
        self._runner, self._slots, self._outputs, self._drafter = runner, slots, outputs, drafter
        self.by_slot: list[Request | None] = [None] * max_batch_size
        self._drafted_for: set[int] = set()  # requests that the drafter knows

    def __iter__(self) -> Iterator[Request]:
        return iter([request for request in self.by_slot if request is not None])

    def __len__(self) -> int:
        return sum(request is not None for request in self.by_slot)

    @property
    def free(self) -> list[int]:
        """The slots without a request."""
        return [slot for slot, request in enumerate(self.by_slot) if request is None]

    def enter(self, chosen: Iterable[tuple[int, Request]]) -> None:
        """Begin with requests, each in its slot."""
        for slot, request in chosen:
            request.slot, request.admitted = slot, time.perf_counter()
            self.by_slot[slot] = request
            self._runner.cache.reserve(slot, len(request.prompt_ids) + request.sampling.max_new_tokens)
            self._slots.admit(slot, request.prompt_ids, request.sampling, speculate=request.speculate)
            self._outputs.begin(request)
            if request.speculate and self._drafter is not None:
                self._drafted_for.add(request.id)
                self._drafter.admit(slot, request.prompt_ids, request.sampling)
            if len(request.prompt_ids) == 1:
                self._slots.start(slot)
                request.prefill_ended = time.perf_counter()

    def prefill(self, chunk: int) -> None:
        """Prefill one chunk of every prompt that is not in the cache yet."""
        pending = [request for request in self if not self._slots.is_running(request.slot)]
        if not pending:
            return
        drafter = self._drafter if any(request.speculate for request in pending) else None
        layers = () if drafter is None else tuple(drafter.hidden_layers)
        committed = prefill(self._runner, pending, chunk=chunk, hidden_layers=layers)
        done: list[Request] = []
        for request, count in zip(pending, committed.counts.tolist(), strict=True):
            request.prefilled += count
            self._slots.prefilled(request.slot, request.prefilled)
            if request.prefilled == len(request.prompt_ids) - 1:
                self._slots.start(request.slot)
                done.append(request)
        if drafter is not None:
            told = np.array([row for row, request in enumerate(pending) if request.speculate])
            drafter.observe(committed if len(told) == len(pending) else committed.rows(told))
        now = time.perf_counter()  # the drafter has seen the prompt, too: the next thing that happens is a round
        for request in done:
            request.prefill_ended = now

    def tell(self, played: Played, slots: Batch, still: np.ndarray) -> None:
        """Note on the host what a round has decided for the rows that are ``still`` there, and tell the drafter."""
        read, drafter = played.read, self._drafter
        decided = read.valid & still
        told, counts = slots.host_drafting & decided, np.where(decided, read.num_accepted + 1, 0)
        committed = None
        if played.followed:
            assert isinstance(drafter, DeviceDrafter), "only those follow on the device"
            drafter.followed(slots, counts, told)
        elif drafter is not None and told.any():
            committed = told_of(played, slots)
        self._slots.advance_host(slots, read.tokens, counts)
        if committed is not None and drafter is not None:
            drafter.observe(committed if told.all() else committed.rows(np.flatnonzero(told)))

    def start_over(self, slot: int, played: Played) -> None:
        """Have the next round begin where this one did, which decided nothing, without drafts.

        A draft whose keys are NaN spoils all nodes of its tree, even through masks. Where that may not change the
        output (``repeatable``), the request goes on from the same root, which plain decoding would have reached, too.
        """
        start = self._slots.undo(slot)
        self._runner.cache.clear(slot, start=start, stop=start + played.tree.width)

    def leave(self, request: Request) -> None:
        """End a request, and free its slot."""
        self.by_slot[request.slot] = None
        self._outputs.end(request)
        self._slots.release(request.slot)
        self._runner.cache.free(request.slot)
        if request.id in self._drafted_for and self._drafter is not None:
            self._drafted_for.discard(request.id)
            self._drafter.release(request.slot)

    def fail(self, error: BaseException, message: str) -> list[Step]:
        """End all requests, whose state is unknown after an error; returns their last steps."""
        steps = []
        for request in self:
            steps.append(self._outputs.failed(request, message))
            self._runner.cache.clear(request.slot)
            try:
                self.leave(request)
            except Exception as another:  # must not hide the first
                error.add_note(f"and then, on releasing request {request.id}: {type(another).__name__}: {another}")
        return steps
