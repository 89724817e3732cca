"""The engine: requests in, steps and completions out, round by round."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType

import numpy as np
import torch

from specdec.arguments import flag, whole
from specdec.attributes import check_drafter_attributes, check_verifier_attributes
from specdec.engine import ownership
from specdec.engine.clock import StageTimer
from specdec.engine.delivery import Delivery
from specdec.engine.doors import check_drafter, check_scheduler, check_target, check_verifier
from specdec.engine.inspection import Inspector
from specdec.engine.intake import Intake
from specdec.engine.output import Outputs, completion
from specdec.engine.prefill import prefill
from specdec.engine.prompts import Prompt
from specdec.engine.round import Mode, Played, play, repeatable
from specdec.engine.scheduler import FirstComeFirstServed, Scheduler
from specdec.engine.slot_table import SlotTable
from specdec.execution.freshness import steady
from specdec.interfaces import Drafter, Round, Verifier
from specdec.memory import ran_out, shortage
from specdec.modeling.runner import ModelRunner
from specdec.modeling.target import Target
from specdec.origin import described
from specdec.requests import Request, SamplingParams
from specdec.slots import Slots
from specdec.types import Committed, Completion, Step

DEFAULT_MAX_LENGTH = 4096


class Engine:
    """Decodes prompts with a target, and with a drafter and a verifier if there are any.

    Args:
        target: The model whose distribution the output follows.
        drafter: Proposes tokens; None decodes plainly. It serves one engine at a time.
        verifier: The acceptance rule; needed with a drafter.
        max_batch_size: Requests that decode together; more wait for a slot.
        max_length: Tokens per request, prompt and output. Default: what the model allows, at most 4096.
        prefill_chunk: Prompt tokens per prefill forward; rounds of running requests go on between chunks.
        attention: See ``ModelRunner``.
        timing: Measure each stage of every round (``Step.seconds``).
        optimize: See ``ModelRunner``; for the target's forwards.
        scheduler: Decides which waiting request gets a free slot; first come, first served by default.
        check: Check every drafted tree and every law of the rule in every round, and name the request, the round and
            the node where something is wrong. It costs time, and a synchronization with the device per check.

    Attributes:
        on_round: Called with every speculative round, for traces and diagnostics; None by default, at no cost.
        runner: Runs the target.

    Raises:
        ValueError: An argument is of the wrong type or out of its range, target, drafter and verifier do not fit each
            other, the drafter serves another engine, or the cache does not fit into memory.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        *,
        max_batch_size: int = 1,
        max_length: int | None = None,
        prefill_chunk: int = 512,
        attention: str = "auto",
        timing: bool = False,
        optimize: bool = True,
        scheduler: Scheduler | None = None,
        check: bool = False,
    ):
        check_target(target)
        check_drafter(drafter)
        check_verifier(verifier)
        check_scheduler(scheduler)
        max_batch_size = whole("max_batch_size", max_batch_size, least=1)
        prefill_chunk = whole("prefill_chunk", prefill_chunk, least=1)
        timing, optimize, check = flag("timing", timing), flag("optimize", optimize), flag("check", check)
        if max_length is not None:
            few = "give at least 2, one token of prompt and one of output"
            max_length = whole("max_length", max_length, least=2, few=few)
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.max_batch_size = max_batch_size
        self.max_length = max_length or min(target.max_length, DEFAULT_MAX_LENGTH)
        self.prefill_chunk = prefill_chunk
        self.on_round: Callable[[Round], object] | None = None
        self._plain = self._speculative = Mode.plain(verifier)
        if drafter is not None:
            if verifier is None:
                raise ValueError(f"{type(drafter).__name__} needs a verifier: pass for example RejectionVerifier()")
            check_drafter_attributes(drafter, layers=target.num_layers)
            check_verifier_attributes(verifier)
            verifier.check(drafter)
            ownership.check_free(drafter)
            inspector = Inspector(drafter, verifier, self._request_in) if check else None
            self._speculative = Mode.speculative(drafter, verifier) if inspector is None else inspector.mode()
        # Outside of inference mode, even if the caller is in it: the state is written in both modes.
        with torch.inference_mode(False):
            self.runner = ModelRunner(
                target.model,
                max_batch_size=max_batch_size,
                max_length=self.max_length,
                max_nodes=drafter.max_nodes if drafter is not None else 0,
                attention=attention,
                optimize=optimize,
            )
            if drafter is not None and verifier is not None:
                # Given only for a rule that reads q at the leaves; it has checked that the drafter has it.
                needs = {"leaf_probs": True} if verifier.needs_leaf_probs else {}
                drafter.bind(target, max_batch_size=max_batch_size, max_length=self.max_length, **needs)
                ownership.take(drafter, self)
        self.timer = StageTimer(target.device, enabled=timing)
        self._slots = SlotTable(max_batch_size, self.max_length, target.vocab_size, target.device)
        self._intake = Intake(target, max_length=self.max_length, can_speculate=drafter is not None)
        self._outputs = Outputs(target.tokenizer)
        self._scheduler = FirstComeFirstServed() if scheduler is None else scheduler
        self._running: list[Request | None] = [None] * max_batch_size
        self._drafted_for: set[int] = set()  # requests that the drafter knows
        self._delivery = Delivery()
        self._closed = False

    # ---------------------------------------------------------------- asking

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
        *,
        speculate: bool = True,
    ) -> list[Completion]:
        """Decode prompts to the end.

        Args:
            prompts: Text, token ids or chat messages each, or a single such prompt (``specdec.engine.prompts``). Chat
                messages go through the tokenizer's chat template.
            sampling: One for all prompts, or one per prompt.
            speculate: False decodes plainly, on the same cache and by the same loop.

        Returns:
            One completion per prompt and sample. The ``n`` samples of a prompt stand together, in the prompts' order.

        Raises:
            ValueError: A prompt or its parameters do not fit; nothing has been decoded then.
        """
        requests = self._intake.requests(prompts, sampling, speculate=speculate)
        steps: dict[int, list[Step]] = {request.id: [] for request in requests}
        with steady():  # only this project's code runs until all requests have ended
            for step in self._drain(requests):
                steps[step.request].append(step)
        return [completion(request, steps[request.id]) for request in requests]

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
        *,
        speculate: bool = True,
    ) -> Iterator[Step]:
        """Yields the steps of all requests as they happen, otherwise like ``generate``. Ids have the prompts' order.

        Prompts are checked when it is called, and decoded when the first step is asked for.
        """
        return self._drain(self._intake.requests(prompts, sampling, speculate=speculate))

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        *,
        speculate: bool = True,
    ) -> int:
        """Queue one request (of one sample) for ``step``; returns its id, which is also its default stream."""
        self._check_open()
        request = self._intake.request(prompt, sampling, speculate=speculate)
        self._scheduler.add([request])
        return request.id

    def abort(self, request_id: int) -> None:
        """Drop a request that waits or runs; unknown and finished ids are ignored."""
        self._abort({request_id})

    @property
    def unfinished(self) -> int:
        """The number of requests that wait or run."""
        return len(self._scheduler) + sum(request is not None for request in self._running)

    def weights_changed(self) -> None:
        """Report that the target's weights were changed in a way that cannot be noticed (see ``ModelRunner``)."""
        self.runner.weights_changed()

    def close(self) -> None:
        """Drop all requests and release the drafter, so that another engine can use it."""
        self._abort({*self._scheduler.waiting(), *(request.id for request in self._running if request is not None)})
        if self.drafter is not None:
            ownership.release(self.drafter, self)
            self._closed = True

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- the loop

    def step(self) -> list[Step]:
        """Run one turn: fill free slots, prefill a chunk of each new prompt, and play a round for all others.

        A request that cannot go on ends with a step whose ``finish_reason`` is ``"error"``. So do all that run when
        memory runs out; others go on. If something else fails that concerns all requests (the model, the drafter), the
        error is raised, and the next call returns their last steps.

        Returns:
            The steps of submitted requests. Calls of ``generate`` and ``stream`` get the steps of their own requests.
        """
        if self.unfinished or not self._delivery.waiting:
            self._advance()
        return self._delivery.take()

    def _advance(self) -> None:
        """Run one turn and deliver its steps to the callers that wait for them."""
        self._check_open()
        try:
            with torch.inference_mode(), steady():
                steps = self._turn()
        except BaseException as error:
            short = ran_out(error)
            self._delivery.put(
                self._fail(error, f"{shortage(error, self.target.device)}; {self._lower}" if short else "")
            )
            # Requests that have finished are kept, and those that wait may fit. Processes that share the target cannot
            # go on: the others are in the middle of the turn.
            if not short or self.runner.agreement.shared:
                raise
            return
        self._delivery.put(steps)

    def _turn(self) -> list[Step]:
        self._admit()
        with self.timer.stage("prefill"):
            self._prefill()
        running = self._slots.running
        return self._round(self._slots.rows(running)) if len(running) else []

    def _round(self, slots: Slots) -> list[Step]:
        """Propose, verify, accept and commit for the rows of ``slots``."""
        speculating = bool(slots.host_drafting.any())
        played = play(self._speculative if speculating else self._plain, slots, self.runner, self.timer)
        if speculating and self.on_round is not None:
            self.on_round(self._observed(played, slots))
        with self.timer.stage("commit"):
            committed = self._commit(played, slots)
        seconds = self.timer.take()
        with self.timer.stage("commit"):
            if speculating and self.drafter is not None and committed is not None:
                self.drafter.observe(committed)
        may_repeat = np.zeros(len(slots), dtype=bool) if played.read.valid.all() else repeatable(played)
        steps = []
        for row, slot in enumerate(slots.host_index.tolist()):
            request = self._running[slot]
            assert request is not None
            step = self._outputs.step(request, played.read, row, seconds, may_repeat=bool(may_repeat[row]))
            steps.append(step)
            if step.finish_reason is not None:
                if not played.read.valid[row]:
                    self.runner.cache.clear(slot)
                self._release(request)
            elif not played.read.valid[row]:
                self._start_over(slot, played)
        return steps

    def _start_over(self, slot: int, played: Played) -> None:
        """Have the next round begin where this one did, which decided nothing, without drafts.

        A draft whose keys are NaN spoils all nodes of its tree, even through masks. Where that may not change the
        output (``repeatable``), the request goes on from the same root, which plain decoding would have reached, too.
        """
        start = self._slots.undo(slot)
        self.runner.cache.clear(slot, start=start, stop=start + played.tree.width)

    def _commit(self, played: Played, slots: Slots) -> Committed | None:
        """Make the accepted path final, in the cache and in the slots; returns what the drafter is told, if any."""
        read, tree, verdict = played.read, played.tree, played.verdict
        if tree.width > 1 and not tree.in_line:  # in a chain everything stands in its final place already
            self.runner.cache.commit(slots.index, slots.lengths, verdict.path)
        told = np.flatnonzero(slots.host_drafting & read.valid)
        committed = _told(played, slots) if len(told) else None
        self._slots.advance(slots, played.tokens, verdict.num_accepted, verdict.next_token, valid=read.valid)
        self._slots.advance_host(slots, read.tokens, np.where(read.valid, read.num_accepted + 1, 0))
        return committed if committed is None or len(told) == len(slots) else committed.rows(told)

    def _request_in(self, slot: int) -> Request | None:
        return self._running[slot]

    def _observed(self, played: Played, slots: Slots) -> Round:
        rows = zip(slots.host_index.tolist(), slots.host_drafting, strict=True)
        requests = tuple(self._running[slot] if drafts else None for slot, drafts in rows)
        return Round(played.tree, played.evidence, played.verdict, requests)

    # ---------------------------------------------------------------- slots

    def _admit(self) -> None:
        free = [slot for slot, request in enumerate(self._running) if request is None]
        for slot, request in self._scheduler.admit(free):
            request.slot, request.started = slot, time.perf_counter()
            self._running[slot] = request
            self.runner.cache.reserve(slot, len(request.prompt_ids) + request.sampling.max_new_tokens)
            self._slots.admit(slot, request.prompt_ids, request.sampling, speculate=request.speculate)
            self._outputs.begin(request)
            if request.speculate and self.drafter is not None:
                self._drafted_for.add(request.id)
                self.drafter.admit(slot, request.prompt_ids, request.sampling)
            if len(request.prompt_ids) == 1:
                self._slots.start(slot)

    def _prefill(self) -> None:
        """Prefill one chunk of every prompt that is not in the cache yet."""
        pending = [r for r in self._running if r is not None and not self._slots.is_running(r.slot)]
        if not pending:
            return
        drafter = self.drafter if any(request.speculate for request in pending) else None
        layers = () if drafter is None else tuple(drafter.hidden_layers)
        committed = prefill(self.runner, pending, chunk=self.prefill_chunk, hidden_layers=layers)
        for request, count in zip(pending, committed.counts.tolist(), strict=True):
            request.prefilled += count
            self._slots.prefilled(request.slot, request.prefilled)
            if request.prefilled == len(request.prompt_ids) - 1:
                self._slots.start(request.slot)
        if drafter is not None:
            told = np.array([row for row, request in enumerate(pending) if request.speculate])
            drafter.observe(committed if len(told) == len(pending) else committed.rows(told))

    def _release(self, request: Request) -> None:
        self._running[request.slot] = None
        self._outputs.end(request)
        self._slots.release(request.slot)
        self.runner.cache.free(request.slot)
        if request.id in self._drafted_for and self.drafter is not None:
            self._drafted_for.discard(request.id)
            self.drafter.release(request.slot)

    @property
    def _lower(self) -> str:
        """What takes memory in a turn, and how much of it was asked for."""
        nodes = 0 if self.drafter is None else self.drafter.max_nodes
        tree = f", the draft tree's {nodes} nodes" if nodes else ""
        sizes = (
            f"max_batch_size={self.max_batch_size}, prefill_chunk={self.prefill_chunk}, max_length={self.max_length}"
        )
        return f"lower {sizes}{tree}"

    def _fail(self, error: BaseException, message: str = "") -> list[Step]:
        """End all running requests, whose state is unknown after an error; returns their last steps."""
        message = message or described(error)
        steps = []
        for request in self._running:
            if request is None:
                continue
            steps.append(self._outputs.failed(request, message))
            self.runner.cache.clear(request.slot)
            try:
                self._release(request)
            except Exception as another:  # must not hide the first
                error.add_note(f"and then, on releasing request {request.id}: {type(another).__name__}: {another}")
        return steps

    # ---------------------------------------------------------------- requests

    def _drain(self, requests: list[Request]) -> Iterator[Step]:
        """Yields the steps of these requests until they have ended. In any case, none of them stays in the engine."""
        self._check_open()
        listener = self._delivery.listen(request.id for request in requests)
        self._scheduler.add(requests)
        try:
            while listener.ids or listener.steps:
                while listener.steps:
                    step = listener.steps.popleft()
                    if step.finish_reason is not None:
                        listener.ids.discard(step.request)
                    yield step
                if listener.ids:
                    self._advance()
        finally:
            self._abort(listener.ids)
            self._delivery.leave(listener)

    def _abort(self, ids: Iterable[int]) -> None:
        ids = set(ids)
        self._scheduler.remove(ids)
        for request in self._running:
            if request is not None and request.id in ids:
                self._release(request)
        self._delivery.forget(ids)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this engine was closed, and its drafter may serve another one: build a new engine")


def _told(played: Played, slots: Slots) -> Committed:
    """What a round has made final, for all of its rows."""
    path = played.verdict.path
    return Committed(
        slots=slots.index,
        host_slots=slots.host_index,
        tokens=played.tokens,
        starts=slots.host_lengths.copy(),
        counts=1 + played.read.num_accepted,
        next_tokens=played.verdict.next_token,
        path=path,
        hidden_states={k: played.tree.gather_path(states, path) for k, states in played.hidden_states.items()},
    )
