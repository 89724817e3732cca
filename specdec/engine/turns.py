"""One turn after another: preempt, admit and prefill as the scheduler plans, play a round, and read it."""

import time
from collections.abc import Callable, Set
from contextlib import ExitStack
from functools import partial

import numpy as np

from specdec.batch import Batch
from specdec.engine.clock import COMPLETION
from specdec.engine.output import make_step
from specdec.engine.read_back import DeviceRound
from specdec.engine.round import Look, Mode, Rounds
from specdec.engine.running import Pieces, RunningRequests
from specdec.engine.scheduler import Scheduler, View, Work
from specdec.requests import Request
from specdec.types import Step

Note = Callable[[View, Work], object]


class Turns:
    """The turns of one engine.

    Args:
        plain, speculative: How rounds are played in which no row speculates, and all others.
        prefill_chunk, reserve: See ``View``.
    """

    def __init__(
        self, scheduler: Scheduler, plain: Mode, speculative: Mode, running: RunningRequests, rounds: Rounds, *,
        prefill_chunk: int, reserve: float,
    ):  # fmt: skip
        self.waiting: dict[int, Request] = {}  # those without a slot by id, which is the order in which they came
        self._scheduler, self._plain, self._speculative = scheduler, plain, speculative
        self._running, self._rounds = running, rounds
        self._slots, self._timer, self._prefill_chunk = rounds.table, rounds.timer, prefill_chunk
        self._reserve, self._runner = reserve, rounds.runner
        self._in_flight: DeviceRound | None = None

    @property
    def _waits(self) -> bool:
        """Whether drafts begin with a request's second round, as its first one shares the forward of its prompt."""
        # A rule that reads q at the leaves, too, has it in every round.
        return self._running.reads_target and self._runner.joins and not self._speculative.at_one

    def drop_round(self) -> None:
        """Forget the round in flight, whose rows have failed, and times that belong to no step."""
        self._in_flight = None
        self._timer.take()

    def abort(self, ids: Set[int]) -> None:
        """End requests that wait or run, without another step; other ids are ignored."""
        ids = set(ids)
        for request in [self.waiting.pop(waiting) for waiting in ids & self.waiting.keys()]:
            self._running.drop(request)
        with ExitStack() as leaving:  # all of them leave, whatever one raises
            for request in [request for request in self._running if request.id in ids]:
                leaving.callback(self._running.leave, request)

    def play(self, look: Look | None, note: Note | None, steps: list[Step]) -> None:
        """Run one turn and add its steps; ``look`` sees its round, and ``note`` what the scheduler saw and planned."""
        current, self._in_flight = self._in_flight, None
        if current is None or not current.rows_in(self._slots.by_slot).any():
            batch, pieces = self._plan(note)
            if batch is None:
                return
            current = self._launch(batch, look, pieces=pieces)
        if look is None and self._may_go_on(current, note):
            # The device plays the next round while the host finishes this one.
            rows = self._slots.rows(current.batch.on_host.slots)
            self._in_flight = self._launch(rows, look, ahead=current.tree.max_depth + 1)
        self._finish(current, steps)

    @property
    def _view(self) -> View:
        running = sorted(self._running, key=lambda request: request.id)
        pages = self._running.pages
        return View(
            now=time.perf_counter(),
            waiting=[request for _, request in sorted(self.waiting.items())],  # preempted ones in their place
            running=running, free_slots=len(self._slots) - len(running), free_pages=pages.free,
            page_size=pages.page_size, reserve=self._reserve, prefill_chunk=self._prefill_chunk,
            max_depth=self._speculative.max_depth, max_nodes=self._speculative.max_nodes,
            shared=lambda request: pages.own(request.slot) // pages.page_size,
        )  # fmt: skip

    def _plan(self, note: Note | None) -> tuple[Batch | None, Pieces | None]:
        """Preempt, admit and prefill as the scheduler plans.

        Returns the rows that decode, None if there are none, and pieces of prompts that share their forward.
        """
        view = self._view
        work = self._scheduler.plan(view)
        if note is not None:
            note(view, work)
        for request in work.preempt:
            self.waiting[request.id] = request  # before its slot is taken away, which may fail
            self._running.preempt(request)
        for request, _ in work.prefill:
            if request.id in self.waiting:
                try:
                    self._running.enter(request, positions=view.positions(request))
                finally:
                    if request.slot >= 0:  # otherwise there was no room for it, and it goes on waiting
                        del self.waiting[request.id]
        with self._timer.stage("prefill"):
            pieces = self._running.take(work.prefill)
        ready = {each.slot for each in work.decode if self._running.grow(each, view) and not each.to_prefill}
        slots = np.array(sorted(ready), dtype=np.int64)
        if work.depth is not None:
            self._slots.cap(slots, work.depth)
        if pieces is not None and not (ready and self._joins(pieces)):
            with self._timer.stage("prefill"):
                first, *others = pieces.forwards
                several = self._runner.run_together(pieces.forwards) if others else [self._runner.run(first)]
                self._running.put(pieces, several)
            pieces = None
        return self._slots.rows(slots) if ready else None, pieces

    def _joins(self, pieces: Pieces) -> bool:
        """Returns whether pieces of prompts may go through the target with the round that follows.

        A session that reads the target then drafts nothing for requests in their first round. Preempted ones draft.
        """
        first = not any(each.rounds for each in pieces.requests)
        return self._runner.joins and (not pieces.unseen or (self._waits and first))

    def _launch(self, batch: Batch, look: Look | None, *, ahead: int = 0, pieces: Pieces | None = None) -> DeviceRound:
        """Propose, verify, accept and commit for the rows of ``batch``, on the device."""
        drafting, some = batch.on_host.drafting, None
        speculating = bool(drafting.any())
        mode = self._speculative if speculating else self._plain
        requests = [self._slots.by_slot[slot] for slot in batch.on_host.slots.tolist()]
        if self._waits and not ahead:
            first = drafting & [request is not None and request.rounds == 0 for request in requests]
            some = np.flatnonzero(drafting & ~first) if first.any() else None
        beside = None if pieces is None else (pieces.forwards, partial(self._running.put, pieces))
        look = look if speculating else None
        return self._rounds.begin(mode, batch, requests, look, ahead=ahead, beside=beside, some=some)

    def _may_go_on(self, current: DeviceRound, note: Note | None) -> bool:
        """Returns whether the next round may begin before this one has been read."""
        if not current.alone or not self._slots.counts_by_itself:
            return False
        running = list(self._running)
        going_on = [request.remaining > 1 for request in running]
        # Each needs room for this round and the next, and if all of them end, another round would be for nothing.
        if running != current.requests or not any(going_on) or not self._running.have_room(self._speculative.max_depth):
            return False
        # Where requests wait, a slot that becomes free now is theirs. Otherwise the scheduler plans one round early.
        return not self.waiting or (all(going_on) and self._same_again(note))

    def _same_again(self, note: Note | None) -> bool:
        """Returns whether the scheduler, by what the host knows, plans a round of the running requests and no more."""
        view = self._view
        work = self._scheduler.plan(view)
        same = {each.id for each in work.decode} == {each.id for each in view.running}
        if work.preempt or work.prefill or work.depth is not None or not same:
            return False
        if note is not None:
            note(view, work)
        return True

    def _finish(self, current: DeviceRound, steps: list[Step]) -> None:
        """Read what a round has decided, let the session observe it, and make the requests' steps of it."""
        with self._timer.stage("accept"):
            read = current.read
        visible = time.perf_counter()
        seconds = self._timer.take()
        still = current.rows_in(self._slots.by_slot)
        with self._timer.stage("commit"):
            self._running.follow(current, still)
        begin = time.perf_counter()
        with ExitStack() as leaving:  # all have their steps and leave, whatever one raises
            for row, request in enumerate(current.requests):
                if request is None or not still[row]:
                    continue
                step = make_step(request, current, row, seconds, visible)
                steps.append(step)
                if step.finish_reason is not None:
                    leaving.callback(self._running.leave, request, sound=bool(read.valid[row]))
        if self._timer.enabled:
            # The steps share this mapping and nobody has them yet: the time of making them belongs to them.
            seconds[COMPLETION] = time.perf_counter() - begin
