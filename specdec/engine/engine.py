"""The engine: requests in, steps and completions out, round by round."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from specdec.arguments import flag, instance, whole
from specdec.cache.pages import PageCounts, Paging
from specdec.engine.clock import StageTimer
from specdec.engine.intake import Intake, Prompt
from specdec.engine.output import completion
from specdec.engine.parts import check_parts, check_session, tree_check
from specdec.engine.recording import RecordingCounts, RoundRecorder, recorded_as
from specdec.engine.round import Mode, Rounds
from specdec.engine.running import RunningRequests
from specdec.engine.scheduler import FirstCome, Scheduler, View, Work
from specdec.engine.slot_table import SlotTable, row_sizes, spare_slots
from specdec.engine.turns import Turns
from specdec.interfaces import Drafter, Round, Session, Sizes, Verifier
from specdec.memory import NoRoomError, give_back, ran_out, shortage
from specdec.origin import described
from specdec.requests import Request, SamplingParams
from specdec.slot_memory import SlotMemory
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from specdec.tree_parts import common_sizes
from specdec.types import Completion, Exactness, Step

DEFAULT_MAX_LENGTH, _LARGE = 4096, 10**8
_BUSY = "this engine is in the middle of a turn: what runs in it, and other threads, may submit, check and abort only"


class Engine:
    """Decodes prompts with a target, and with a drafter and a verifier if there are any.

    Args:
        drafter: None decodes plainly. It may serve any number of engines.
        verifier: The acceptance rule; needed with a drafter.
        max_batch_size: Requests that decode together; more wait for a slot.
        max_length: Tokens per request, prompt and output. Default: what the model allows, at most 4096.
        prefill_chunk: Prompt tokens per prefill forward; rounds of running requests go on between chunks.
        attention: See ``ModelRunner``, as for the next three; for the target's forwards.
        optimize: Run the target by its recognized layers.
        invariant: Speculative and plain decoding agree token for token in every dtype at temperature 0, and under rules
            that share their noise.
        kv_cache: Plain decoding uses the same cache, so the output follows the target *with* it.
        timing: Measure each stage of every round (``Step.seconds``).
        cache: How the memory of all caches is divided, and whether requests share beginnings (``specdec.cache.pages``);
            by default every slot has a row, and nothing is shared.
        scheduler: Plans who prefills, who decodes and who gives way in every turn; first come, first served by default.
        check: Check every drafted tree, and name the request, the round and the node where something is wrong: slow.
        recording: What is replayed without its Python when it comes often: ``"rounds"``, ``"decisions"`` (acceptance
            and commit), ``"off"`` (nothing, as with ``optimize=False``); ``"auto"``, rounds, and decisions on a CPU
            where this project's C is not compiled.

    Attributes:
        on_round: Called with every speculative round, for traces and diagnostics; None by default, at no cost.
        on_turn: Called with what the scheduler saw and planned, where it was asked; None by default.
        session: The drafter's session; None without a drafter.
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
        cache: Paging | None = None,
    ):
        check_parts(target, drafter, verifier, scheduler)
        max_batch_size = whole("max_batch_size", max_batch_size, least=1)
        prefill_chunk = whole("prefill_chunk", prefill_chunk, least=1)
        timing, check = flag("timing", timing), flag("check", check)
        optimize, invariant = flag("optimize", optimize), flag("invariant", invariant)
        if max_length is not None:
            few = "give at least 2, one token of prompt and one of output"
            max_length = whole("max_length", max_length, least=2, few=few)
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.max_batch_size, self.prefill_chunk = max_batch_size, prefill_chunk
        self.max_length = max_length or min(target.max_length, DEFAULT_MAX_LENGTH)
        paging = Paging() if cache is None else cache
        instance("cache", paging, Paging, "Paging(shared=True), or None")
        self.paging = paging.filled_in(slots=max_batch_size, max_length=self.max_length)
        if target.adapters is not None and self.paging.shared:
            raise ValueError("requests with different adapters share no beginnings: leave shared=True out of the cache")
        self.on_round: Callable[[Round], object] | None = None
        self.on_turn: Callable[[View, Work], object] | None = None
        recorded = recorded_as(recording, target.model, optimize=optimize, invariant=invariant)
        # Recorded rounds come in few numbers of rows, made up by a slot that no request gets, and begin before the host
        # has read the ones before. A CPU gains nothing by either: it does so if asked, to show how a GPU goes on.
        padded = recording == "rounds" or target.device.type != "cpu"
        sizes = row_sizes(max_batch_size) if padded else range(1, max_batch_size + 1)
        sizes = sizes if recorded == "rounds" else ()
        slots = max_batch_size + spare_slots(sizes)
        # Outside of inference mode, even if the caller is in it: the state is written in both modes.
        with torch.inference_mode(False):
            self.runner = ModelRunner(
                target.model, max_batch_size=slots, max_length=self.max_length,
                max_nodes=drafter.max_nodes if drafter is not None else 0, attention=attention, optimize=optimize,
                kv_cache=kv_cache, paging=self.paging, invariant=invariant, adapters=target.adapters,
            )  # fmt: skip
            if self.paging.shared and self.runner.cache.states is not None:
                kind = self.runner.facts.model_type
                raise ValueError(f"{kind} has recurrent layers, whose states no requests share: leave shared=True out")
            self._slots = SlotTable(max_batch_size, self.max_length, target.vocab_size, target.device, sizes=sizes)
            self._plain = self._speculative = Mode.plain(verifier)
            self.session: Session | None = None
            if drafter is not None and verifier is not None:
                room = Sizes(
                    max_batch_size=slots, max_length=self.max_length, leaf_probs=verifier.needs_leaf_probs,
                    paging=self.paging, runner=self.runner,
                )  # fmt: skip
                try:
                    self.session = drafter.bind(target, room)
                except ValueError as error:
                    refused = error if isinstance(error, NoRoomError) else error.__cause__
                    if not isinstance(refused, NoRoomError):
                        raise
                    # Say what would fit together with the target's cache.
                    own = SlotMemory(per_position=self.runner.cache.bytes_per_position, drafted=drafter.max_nodes)
                    raise refused.beside(own, self.runner.device) from error
                check_session(self.session, drafter, layers=target.num_layers)
                mode = Mode.speculative(drafter, self.session, verifier)
                if check:
                    look = tree_check(drafter, self._slots.by_slot, leaf_probs=verifier.needs_leaf_probs)
                    mode = replace(mode, check=look)
                self._speculative = mode
        self.timer = StageTimer(target.device, enabled=timing)
        recorder = RoundRecorder(self.runner, self._slots, recorded=recorded, early=padded)
        self._rounds = Rounds(self.runner, self._slots, self.timer, recorder)
        exact = verifier is None or verifier.exactness is Exactness.EXACT
        self._intake = Intake(target, max_length=self.max_length, can_speculate=drafter is not None, exact=exact)
        self._running = RunningRequests(self.runner, self._slots, self.session, self.paging)
        self._inboxes: dict[int, deque[Step]] = {}  # of requests whose steps a call of `generate` or `stream` waits for
        self._steps: deque[Step] = deque()  # of all others
        parts = scheduler or FirstCome(), self._plain, self._speculative, self._running, self._rounds
        self._turns = Turns(*parts, prefill_chunk=prefill_chunk, reserve=self.paging.reserve)
        self._waiting = self._turns.waiting
        self._closed, self._busy, self._aborted = False, False, set[int]()  # these leave at a turn's end
        self._turn = threading.RLock()  # of the turn that is played, or of an abort between turns
        if target.num_parameters > _LARGE:  # loading, quantizing and packing have freed a multiple of it
            give_back()

    # ---------------------------------------------------------------- asking

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
        *,
        speculate: bool = True,
    ) -> list[Completion]:
        """Decode prompts to the end; one completion per prompt and sample, the samples of a prompt side by side.

        Args:
            prompts: Text, token ids or chat messages each, or a single such prompt (``specdec.engine.intake``).
            sampling: One for all prompts, or one per prompt.
            speculate: False decodes plainly, on the same cache and by the same loop.

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
        """Yields all steps as they happen, else like ``generate``; prompts are checked now, ids have their order."""
        return self._drain(self._intake.requests(prompts, sampling, speculate=speculate))

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        *,
        speculate: bool = True,
        arrived: float | None = None,
    ) -> int:
        """Queue one request (of one sample) for ``step``; returns its id, which is also its default stream.

        Args:
            prompt: See ``generate``.
            speculate: See ``generate``.
            arrived: When it came, on the clock of ``time.perf_counter``; None for now.
        """
        self._check_open()
        request = self._intake.request(prompt, sampling, speculate=speculate, arrived=arrived)
        self._waiting[request.id] = request
        return request.id

    def check(self, sampling: SamplingParams, *, speculate: bool = True) -> None:
        """Refuse, before there is a prompt, a grammar that cannot be followed and an adapter that is not there."""
        self._intake.matcher(sampling, speculate=speculate)
        self._intake.adapter(sampling)

    def abort(self, request_id: int) -> None:
        """Drop a request, and steps of it that nobody has, when no turn is played; unknown ids are ignored."""
        self._abort({request_id})

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(list(self._running))

    @property
    def page_counts(self) -> PageCounts:
        """Tokens that were found in the caches, and what preemption and eviction cost so far."""
        return self._running.pages.counts

    @property
    def recording(self) -> str:
        """What is recorded on this device: ``"rounds"``, ``"decisions"`` or ``"off"``."""
        return self._rounds.recorder.recorded

    @property
    def recording_counts(self) -> RecordingCounts:
        """How much of the rounds was recorded and replayed so far, and why others were not."""
        return self._rounds.recorder.counts

    def warm_up(
        self,
        nodes: Sequence[int] | None = None,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
        positions: int | None = None,
    ) -> None:
        """Do now what rounds would otherwise have to do once, when their sizes have come often.

        On a CPU, the target's forward is captured for a full batch and every number of nodes. On a GPU, whole rounds
        are recorded, for every number of rows that they are padded to and for all lengths: some hundred stages.

        Args:
            nodes: The numbers of drafted nodes, where they are known; None for all that are usual.
            sampling: The parameters of the requests that will come: greedy or sampled, and which filters.
            positions: The most tokens that a request will have; None for ``max_length``.

        Raises:
            RuntimeError: A request is running or waiting.
        """
        self._check_open(between_turns=True)
        if self.unfinished:
            raise RuntimeError(f"warm_up was called with {self.unfinished} requests unfinished: call it before them")
        positions = self.max_length if positions is None else whole("positions", positions, least=1)
        if positions > self.max_length:
            raise ValueError(f"positions={positions}: this engine's max_length is {self.max_length}, give no more")
        most = self._speculative.max_nodes
        sizes = common_sizes(most) if nodes is None else [whole("nodes", size, least=0) for size in nodes]
        if max(sizes, default=0) > most:
            raise ValueError(f"nodes={max(sizes)}: drafts of this engine have at most {most} nodes, give no more")
        self._running.forget()  # forwards that warm up write into the slots
        modes = dict.fromkeys((self._plain, self._speculative))
        for mode in modes:
            counts = [1, *(1 + size for size in sizes if mode.session is not None)]
            self.runner.warm_up(counts, batch=self.max_batch_size, wants=mode.wants)
        kinds = [sampling] if isinstance(sampling, SamplingParams) else sampling
        self._rounds.warm_up(modes, nodes=sizes, sampling=kinds, positions=positions)
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        self.timer.take()  # a step's times are of its own round

    def forget(self) -> None:
        """Let later requests find nothing in the caches of what was decoded so far, as in a new engine."""
        self._check_open(between_turns=True)
        self._running.forget()

    def weights_changed(self) -> None:
        """Have the weights of all models read again, after any of them was changed."""
        self.forget()
        self.runner.weights_changed()

    def close(self) -> None:
        """Drop all requests; nothing may be asked of this engine afterwards."""
        self._abort({*self._waiting, *(request.id for request in self._running)})
        self._closed = True

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---------------------------------------------------------------- the loop

    def step(self) -> list[Step]:
        """Run one turn as the scheduler plans it: prefill pieces of prompts, and play a round.

        Returns the steps of submitted requests; calls of ``generate`` and ``stream`` get those of their own requests.
        A request that cannot go on ends with a step whose ``finish_reason`` is ``"error"``. So do all that run when
        memory runs out. If anything else breaks a turn off, it is raised, and the next call returns their last steps.
        """
        if self.unfinished or not self._steps:
            self._advance()
        steps, self._steps = list(self._steps), deque()
        return steps

    def _advance(self) -> None:
        """Run one turn and deliver its steps to the callers that wait for them."""
        self._check_open(between_turns=True)
        steps: list[Step] = []
        try:
            with self._turn, torch.inference_mode():
                try:
                    self._busy = True
                    self._turns.play(self.on_round, self.on_turn, steps)
                except BaseException as error:
                    self._end_all(error, steps)
                    # Requests that wait may fit. Processes that share the target cannot go on: others are in mid-turn.
                    if not ran_out(error) or self.runner.agreement.shared:
                        raise
                    self._rounds.recorder.make_room(error)
                finally:
                    self._busy = False
        finally:
            for step in steps:
                self._inboxes.get(step.request, self._steps).append(step)
            if self._aborted:
                self._abort(set())

    def _end_all(self, error: BaseException, steps: list[Step]) -> None:
        """End all requests that run, by steps behind those of the turn that an error has broken off."""
        message = described(error)
        if ran_out(error):
            sizes = [f"{name}={getattr(self, name)}" for name in ("max_batch_size", "prefill_chunk", "max_length")]
            most = self._speculative.max_nodes
            sizes += [f"the draft tree's {most} nodes"] if most else []
            message = f"{shortage(error, self.target.device)}; lower {', '.join(sizes)}"
        self._turns.drop_round()
        ended = {step.request for step in steps if step.finish_reason is not None}
        steps += [step for step in self._running.fail(error, message) if step.request not in ended]

    def _drain(self, requests: list[Request]) -> Iterator[Step]:
        """Yields the steps of these requests until they have ended. In any case, none of them stays in the engine."""
        self._check_open(between_turns=True)
        ids, inbox = {request.id for request in requests}, deque[Step]()
        self._inboxes |= dict.fromkeys(ids, inbox)
        self._waiting.update((request.id, request) for request in requests)
        try:
            while inbox or not ids.isdisjoint(self._inboxes):
                while inbox:
                    step = inbox.popleft()
                    if step.finish_reason is not None:
                        self._inboxes.pop(step.request, None)
                        ids.discard(step.request)
                    yield step
                if not ids.isdisjoint(self._inboxes):
                    self._advance()
        finally:
            self._abort(ids)

    def _abort(self, ids: set[int]) -> None:
        self._aborted.update(ids)
        for request in ids:
            self._inboxes.pop(request, None)
        if self._busy or not self._turn.acquire(blocking=False):
            return  # at the turn's end
        try:
            ids = set(self._aborted)  # others may come meanwhile
            self._aborted.difference_update(ids)
            self._steps = deque(step for step in self._steps if step.request not in ids)
            self._turns.abort(ids)
        finally:
            self._turn.release()

    def _check_open(self, *, between_turns: bool = False) -> None:
        if self._closed:
            raise ValueError("this engine was closed: build a new one")
        if between_turns and self._busy:
            raise RuntimeError(_BUSY)
