"""The engine: requests in, steps and completions out, round by round."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType

import numpy as np
import torch

from specdec.arguments import flag, whole
from specdec.attributes import check_drafter_attributes, check_verifier_attributes
from specdec.batch import Batch
from specdec.engine import ownership
from specdec.engine.clock import COMPLETION, StageTimer
from specdec.engine.delivery import Delivery
from specdec.engine.doors import check_drafter, check_scheduler, check_target, check_verifier
from specdec.engine.flight import Flight
from specdec.engine.inspection import Inspector
from specdec.engine.intake import Intake
from specdec.engine.occupants import Occupants
from specdec.engine.out_of_memory import beside_cache_of, explained
from specdec.engine.output import Outputs, completion
from specdec.engine.prompts import Prompt
from specdec.engine.round import Judged, Mode, repeatable
from specdec.engine.rounds import Observer, check_recording, rounds_for
from specdec.engine.scheduler import FirstComeFirstServed, Scheduler
from specdec.engine.slot_table import SlotTable
from specdec.interfaces import Drafter, Round, Verifier
from specdec.origin import described
from specdec.requests import Request, SamplingParams
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.tree_parts import common_sizes
from specdec.types import Completion, Step

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
        kv_cache: See ``ModelRunner``; for the target's keys and values. Plain decoding uses the same cache, so the
            output follows the target *with* that cache.
        invariant: See ``ModelRunner``; for the target's forwards. Speculative and plain decoding then agree token for
            token in every dtype at temperature 0, and under rules that share their noise.
        scheduler: Decides which waiting request gets a free slot; first come, first served by default.
        check: Check every drafted tree and every law of the rule in every round, and name the request, the round and
            the node where something is wrong. It costs time, and a synchronization with the device per check.
        recording: What is recorded when it comes often, and then replayed without its Python: ``"rounds"``, whole
            rounds; ``"decisions"``, acceptance and commit only; ``"off"``, nothing; ``"auto"``, rounds as CUDA graphs
            on a GPU and decisions on a CPU. With ``optimize=False`` nothing is.

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
        invariant: bool = False,
        scheduler: Scheduler | None = None,
        check: bool = False,
        recording: str = "auto",
        kv_cache: str | None = None,
    ):
        check_target(target)
        check_drafter(drafter)
        check_verifier(verifier)
        check_scheduler(scheduler)
        check_recording(recording)
        max_batch_size = whole("max_batch_size", max_batch_size, least=1)
        prefill_chunk = whole("prefill_chunk", prefill_chunk, least=1)
        timing, optimize, check = flag("timing", timing), flag("optimize", optimize), flag("check", check)
        invariant = flag("invariant", invariant)
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
        # Outside of inference mode, even if the caller is in it: the state is written in both modes.
        with torch.inference_mode(False):
            self.runner = ModelRunner(
                target.model,
                max_batch_size=max_batch_size,
                max_length=self.max_length,
                max_nodes=drafter.max_nodes if drafter is not None else 0,
                attention=attention,
                optimize=optimize,
                kv_cache=kv_cache,
                invariant=invariant,
            )
            if drafter is not None and verifier is not None:
                # Given only for a rule that reads q at the leaves; it has checked that the drafter has it.
                needs = {"leaf_probs": True} if verifier.needs_leaf_probs else {}
                with beside_cache_of(self.runner):
                    drafter.bind(target, max_batch_size=max_batch_size, max_length=self.max_length, **needs)
                ownership.take(drafter, self)
                # After `bind`, in which a drafter may choose hidden states by the target's number of layers.
                inspector = Inspector(drafter, verifier, self._request_in) if check else None
                self._speculative = Mode.speculative(drafter, verifier) if inspector is None else inspector.mode()
        self.timer = StageTimer(target.device, enabled=timing)
        self._slots = SlotTable(max_batch_size, self.max_length, target.vocab_size, target.device)
        self._rounds = rounds_for(self.runner, self._slots, self.timer, recording=recording, optimize=optimize)
        self._intake = Intake(target, max_length=self.max_length, can_speculate=drafter is not None)
        self._outputs = Outputs(target.tokenizer)
        self._scheduler = FirstComeFirstServed() if scheduler is None else scheduler
        self._occupants = Occupants(self.runner, self._slots, self._outputs, drafter, max_batch_size=max_batch_size)
        self._delivery = Delivery()
        self._flight: Flight | None = None
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
        return len(self._scheduler) + len(self._occupants)

    @property
    def recording(self) -> str:
        """What is recorded on this device: ``"rounds"``, ``"decisions"`` or ``"off"``."""
        return self._rounds.recorded

    def warm_up(self, nodes: Sequence[int] | None = None) -> None:
        """Do now what rounds of a full batch would otherwise have to do once, when their sizes have come often.

        On a CPU, the target's forward is captured for every number of nodes that a round may have. Before a measurement
        this keeps one-time costs out of it: a twentieth of a second for each size of a model of 110M parameters. On
        other devices nothing is done.

        Args:
            nodes: The numbers of drafted nodes, where they are known; None for all that are usual.

        Raises:
            RuntimeError: A request is running or waiting.
            ValueError: The engine is closed, or its drafter drafts no such trees.
        """
        self._check_open()
        if self.unfinished:
            raise RuntimeError(
                f"warm_up was called while {self.unfinished} requests are unfinished: call it before them"
            )
        rows, most = self.max_batch_size, 0 if self.drafter is None else self.drafter.max_nodes
        sizes = common_sizes(most) if nodes is None else [whole("nodes", size, least=0) for size in nodes]
        if max(sizes, default=0) > most:
            raise ValueError(f"nodes={max(sizes)}: drafts of this engine have at most {most} nodes, give no more")
        self.runner.warm_up([1], batch=rows, wants=self._plain.wants)
        if self.drafter is not None:
            self.runner.warm_up([1, *(1 + size for size in sizes)], batch=rows, wants=self._speculative.wants)

    def weights_changed(self) -> None:
        """Have the weights of all models read again, after any of them was changed."""
        self.runner.weights_changed()

    def close(self) -> None:
        """Drop all requests and release the drafter, so that another engine can use it."""
        self._abort({*self._scheduler.waiting(), *(request.id for request in self._occupants)})
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
            with torch.inference_mode():
                steps = self._turn()
        except BaseException as error:
            no_memory = explained(error, self)
            self._flight = None
            self._delivery.put(self._occupants.fail(error, no_memory or described(error)))
            # Requests that wait may fit. Processes that share the target cannot go on: the others are in mid-turn.
            if no_memory is None or self.runner.agreement.shared:
                raise
            self._rounds.make_room(error)
            return
        self._delivery.put(steps)

    def _turn(self) -> list[Step]:
        flight, self._flight = self._flight, None
        if flight is None or not flight.rows_in(self._occupants.by_slot).any():
            self._occupants.enter(self._scheduler.admit(self._occupants.free))
            with self.timer.stage("prefill"):
                self._occupants.prefill(self.prefill_chunk)
            running = self._slots.running
            if not len(running):
                return []
            flight = self._launch(self._slots.rows(running))
        if self._may_go_on(flight):
            # The device plays the next round while the host finishes this one.
            self._flight = self._launch(
                self._slots.rows(flight.slots.host_index), ahead=flight.played.tree.max_depth + 1
            )
        return self._finish(flight)

    def _launch(self, slots: Batch, *, ahead: int = 0) -> Flight:
        """Propose, verify, accept and commit for the rows of ``slots``, on the device."""
        speculating = bool(slots.host_drafting.any())
        mode = self._speculative if speculating else self._plain
        played = self._rounds.play(mode, slots, self._observer(slots) if speculating else None, ahead=ahead)
        return Flight(played, slots, [self._request_in(slot) for slot in slots.host_index.tolist()])

    def _may_go_on(self, flight: Flight) -> bool:
        """Returns whether the next round may begin before the host knows how this one has ended."""
        if (
            not flight.played.alone
            or self.on_round is not None
            or len(self._scheduler)
            or not self._slots.counts_by_itself
        ):
            return False
        running = list(self._occupants)
        # If all of them end, another round would be for nothing.
        return running == flight.requests and any(request.remaining > 1 for request in running)

    def _finish(self, flight: Flight) -> list[Step]:
        """Read what a round has decided, tell the drafter, and make the requests' steps of it."""
        played, slots = flight.played, flight.slots
        with self.timer.stage("accept"):
            read = played.read
        visible = time.perf_counter()
        seconds = self.timer.take()
        still = flight.rows_in(self._occupants.by_slot)
        with self.timer.stage("commit"):
            self._occupants.tell(played, slots, still)
        may_repeat = np.zeros(len(slots), dtype=bool) if read.valid.all() else repeatable(played)
        begin = time.perf_counter()
        steps = []
        for row, slot in enumerate(slots.host_index.tolist()):
            request = flight.requests[row]
            if request is None or not still[row]:
                continue
            step = self._outputs.step(request, read, row, seconds, visible, may_repeat=bool(may_repeat[row]))
            steps.append(step)
            if step.finish_reason is not None:
                if not read.valid[row]:
                    self.runner.cache.clear(slot)
                self._occupants.leave(request)
            elif not read.valid[row]:
                self._occupants.start_over(slot, played)
        if self.timer.enabled:
            # The steps share this mapping and nobody has them yet: the time of making them belongs to them.
            seconds[COMPLETION] = time.perf_counter() - begin
        return steps

    def _request_in(self, slot: int) -> Request | None:
        return self._occupants.by_slot[slot]

    def _observer(self, slots: Batch) -> Observer | None:
        """Returns what shows a round to ``on_round``; None if nobody looks."""
        if self.on_round is None:
            return None
        look = self.on_round
        rows = zip(slots.host_index.tolist(), slots.host_drafting, strict=True)
        requests = tuple(self._request_in(slot) if drafts else None for slot, drafts in rows)

        def observe(tree: DraftTree, judged: Judged) -> None:
            assert judged.evidence is not None, "a rule was asked: rows are speculating"
            look(Round(tree, judged.evidence, judged.verdict, requests))

        return observe

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
        for request in self._occupants:
            if request.id in ids:
                self._occupants.leave(request)
        self._delivery.forget(ids)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this engine was closed, and its drafter may serve another one: build a new engine")
