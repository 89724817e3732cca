"""Rounds that are recorded at some lengths, slots and trees, and replayed at others."""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec.engine.recording as recording_module
import specdec.execution.forwards as replay_module
from drafters.model import ModelDrafter
from specdec import Drafter, Engine, ModelRunner, Outcome, SamplingParams, Target
from specdec.drafting.scored import ScoredSession
from specdec.engine.read_back import Fetch
from specdec.engine.round import Rounds
from specdec.execution.recorder import (
    CudaGraphRecorder,
    Recorder,
    Recording,
    Recordings,
    Stage,
    TapeRecorder,
    UnrecordableError,
    recording_now,
)
from specdec.host import without_looking
from tests.components import DRAFTERS, STRONGEST, VERIFIERS, perturbed
from tests.gpu.dry.fake_cuda import overlaps_itself
from tests.launches import counted
from tests.models import tiny_model
from tests.sessions import Wrapped, Wrapping
from tests.test_lossless import SAMPLING, VOCAB, prompts
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier, TypicalVerifier


def state_of(engine: Engine) -> list[Tensor]:
    """Every tensor that a stage may change: the target's cache, the slots' state, the drafter's cache and state."""
    found = [*engine.runner.cache.tensors, *tensors_in(engine._slots)]
    session = engine.session
    if session is None:
        return found
    for model in session.models:
        if isinstance(model, ModelRunner):
            found += model.cache.tensors
    if isinstance(session, ScoredSession):
        found += tensors_in(session.scorer)
        if session.policy is not None:
            found += [*tensors_in(session.policy), *tensors_in(session.policy.calibration)]
    return found + tensors_in(session)


def tensors_in(owner: object) -> list[Tensor]:
    return [value for value in vars(owner).values() if isinstance(value, Tensor)]


class Comparing(Recorder):
    """Records like ``TapeRecorder``; every replay is compared with the stage itself, bit for bit, and so is the state.

    Attributes:
        engine: Set after the engine was made.
        compared: The number of replays, by the name of the stage.
    """

    engine: Engine

    def __init__(self) -> None:
        self.inner = TapeRecorder()
        self.compared = 0

    def record(self, name: str, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording, tuple[Tensor, ...]]:
        recording, outputs = self.inner.record(name, stage, inputs)
        assert not isinstance(recording, str), "every stage of this project can be repeated"

        def replay(*given: Tensor) -> tuple[Tensor, ...]:
            state = state_of(self.engine)
            before = [each.clone() for each in state]
            with without_looking():
                wanted = [each.clone() for each in stage(*given)]
            after = [each.clone() for each in state]
            for each, old in zip(state, before, strict=True):
                each.copy_(old)
            found = recording(*given)
            assert_equal(found, wanted)
            assert_equal(state, after)
            self.compared += 1
            return found

        return replay, outputs


def assert_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        # NaN is equal to NaN here: what stands in unused places does not matter, but must be the same.
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def recorded(target: Target, drafter: Drafter | None, verifier: object, **options: object) -> tuple[Engine, Comparing]:
    engine = Engine(target, drafter, verifier, max_length=64, recording="rounds", **options)
    recorder = engine._rounds.recorder.recordings._recorder = Comparing()
    recorder.engine = engine
    return engine, recorder


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "RECORD_AFTER", 2)


# Drafts made on the host and on the device; rules for chains, from the leaves, with noise. Then every other drafter.
PAIRS = [
    ("ngram", "rejection"),
    ("model_tree_without_replacement", "traversal"),
    ("model_tree_coupled", "shared_noise"),
    complete("model_chain_iid", "block", strong=False),
    *(complete(STRONGEST[rule], rule, strong=False) for rule in ("kseq", "target_walk", "weighted_transport")),
    *(complete(name, "rejection", strong=False) for name in DRAFTERS if not name.startswith(("model", "ngram"))),
]


@pytest.mark.parametrize(("drafter", "verifier"), PAIRS)
def test_a_recorded_round_is_the_round_itself_at_other_lengths_slots_and_trees(target, drafter, verifier) -> None:
    """Stage by stage; whole outputs of all pairs: ``tests/test_random_programs.py``."""
    made, rule = DRAFTERS[drafter](target.model), VERIFIERS[verifier]()
    engine, recorder = recorded(target, made, rule, max_batch_size=3, prefill_chunk=7)
    with engine:
        engine.generate(
            prompts()[:5], [replace(each, max_new_tokens=12 + 6 * i) for i, each in enumerate(SAMPLING[:5])]
        )
        assert recorder.compared >= 20
        assert not engine._rounds.recorder.recordings._refused  # every stage of this pair can be recorded


class CountsItsCalls(RejectionVerifier):
    """Depends on something that no tensor holds, and says nevertheless that it may be recorded."""

    recordable = True
    calls = 0

    def laws(self, tree, target_probs):
        type(self).calls += 1
        laws, flips = super().laws(tree, target_probs), type(self).calls % 2
        return replace(laws, after=lambda stop: laws.after(stop).flip(-1)) if flips else laws


def test_the_comparison_notices_a_rule_that_depends_on_something_else(target) -> None:
    engine, _ = recorded(target, DRAFTERS["model_chain_iid"](target.model), CountsItsCalls(), max_batch_size=1)
    with pytest.raises(AssertionError):
        engine.generate(prompts()[:1], SamplingParams(max_new_tokens=30, temperature=1.0))


@pytest.mark.parametrize("drafter", ["model_tree_iid", complete("ngram", strong=False)])
def test_the_work_of_a_round_does_not_depend_on_lengths(target, drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "RECORD_AFTER", 10**9)  # what would be recorded runs as it is
    monkeypatch.setattr(replay_module, "CAPTURE_AFTER", 10**9)
    made = DRAFTERS[drafter](target.model)
    engine = Engine(target, made, RejectionVerifier(), max_batch_size=2, max_length=200, recording="rounds")
    found = set()
    for length in (3, 40, 130):
        ids = [1, 2, 3, 1, 2] * 40
        requests = [
            engine.submit(ids[shift : shift + length], SamplingParams(max_new_tokens=30, temperature=1.0))
            for shift in (0, 1)
        ]
        with without_looking():
            engine.step()
            for _ in range(4):
                with counted() as work:
                    engine.step()
                waits = work.synchronizations - work.reads["equal"]  # those look whether packed weights have changed
                found.add((work.launches, waits))
        for request in requests:
            engine.abort(request)
    assert {waits for _, waits in found} == {1}
    # The trees of n-gram lookup come in several sizes, whatever the lengths.
    assert drafter == "ngram" or len({launches for launches, _ in found}) == 1


def by_stage(name: str) -> str:
    """The pools of ``CudaGraphRecorder``."""
    return name


class Clobbering(Recorder):
    """Records like CUDA graphs that share memory, in the worst case that torch allows.

    Inputs are read and outputs written at fixed addresses. Whoever was captured first knows nothing of the outputs of
    those captured later in the same pool, and a replay writes over all of them.
    """

    runs = True

    def __init__(self, pool: Callable[[str], str] = by_stage):
        self._inner, self._pool = TapeRecorder(), pool
        self._made: list[tuple[str, Sequence[Tensor]]] = []
        self._fixed: set[int] = set()
        self.overwritten = 0

    def record(self, name: str, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording | str, Sequence[Tensor]]:
        """See ``Recorder.record``."""
        places = [each if each.data_ptr() in self._fixed else each.clone() for each in inputs]
        program, made = self._inner.record(name, stage, places)
        assert not isinstance(program, str), f"{name}: {program}"
        outputs = [each.clone(memory_format=torch.contiguous_format) for each in made]
        number, pool = len(self._made), self._pool(name)
        self._made.append((pool, outputs))
        self._fixed.update(each.data_ptr() for each in outputs if each.numel())

        def replay(*given: Tensor) -> Sequence[Tensor]:
            for place, each in zip(places, given, strict=True):
                assert not overlaps_itself(place)
                if place.data_ptr() != each.data_ptr():
                    place.copy_(each)
            results = [each.clone() for each in program(*places)]
            own = {each.data_ptr() for each in (*places, *outputs)}
            for other, later in self._made[number + 1 :]:
                for each in later:
                    if other == pool and each.numel() and each.data_ptr() not in own:
                        each.fill_(7 if each.is_floating_point() else 1)
                        self.overwritten += 1
            for place, each in zip(outputs, results, strict=True):
                place.copy_(each)
            return outputs

        return replay, outputs

    def clear(self) -> None:
        """See ``Recorder.clear``."""
        self._made.clear()
        self._fixed.clear()


@pytest.mark.parametrize(
    ("drafter", "pool"),
    [
        ("model_tree_iid", by_stage),
        ("model_tree_iid", lambda stage: "mutant: one for all"),
        *(complete(each, by_stage, strong=False) for each in ("ngram", "medusa", "eagle3_expansion")),
    ],
)
def test_graphs_that_share_memory_as_far_as_they_may_change_nothing(target, drafter, pool, monkeypatch) -> None:
    """Over several bounds of positions; results at fixed addresses are read before the next round overwrites them."""
    monkeypatch.setattr("specdec.engine.round.bucket_of", lambda keys: -(-keys // 24) * 24)
    options = {"max_batch_size": 3, "max_length": 64, "prefill_chunk": 7}
    longer = [replace(each, max_new_tokens=30) for each in SAMPLING]
    with Engine(target, recording="off", **options) as plain:
        outputs = [each.token_ids for each in plain.generate(prompts(), longer)]
    # Every other request ends in the middle of its output.
    stops = [
        replace(each, stop_token_ids=(tokens[12],) if i % 2 else ())
        for i, (each, tokens) in enumerate(zip(longer, outputs, strict=True))
    ]
    made, rule = DRAFTERS[drafter](target.model), RejectionVerifier()
    with Engine(target, made, rule, recording="off", **options) as engine:
        wanted = [engine.generate(prompts(), stops, speculate=speculate) for speculate in (False, True)]
    with Engine(target, made, rule, recording="rounds", **options) as engine:
        engine._rounds.recorder.recordings._recorder = Clobbering(pool)
        try:
            found = [engine.generate(prompts(), stops, speculate=speculate) for speculate in (False, True)]
        except (RuntimeError, IndexError, ValueError):  # numbers that were overwritten
            assert pool is not by_stage
            return
        assert engine._rounds.recorder.recordings.replays > 100, "too little was replayed"
    assert ([*map(tokens_of, found)] == [*map(tokens_of, wanted)]) is (pool is by_stage)
    assert {each.finish_reason for each in wanted[1]} == {"stop", "length"}


def tokens_of(completions: Sequence[Any]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in completions]


@pytest.mark.parametrize(("drafter", "overlaps"), [(None, True), ("model_chain_iid", True), ("ngram", False)])
def test_the_next_round_begins_before_this_one_is_read(target, drafter, overlaps, monkeypatch) -> None:
    events = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: (events.append(name), function(*args, **named))[1]

    monkeypatch.setattr(Rounds, "play", noted("play", Rounds.play))
    monkeypatch.setattr(Fetch, "wait", noted("read", Fetch.wait))
    made = None if drafter is None else DRAFTERS[drafter](target.model)
    rule = None if drafter is None else RejectionVerifier()
    engine = Engine(target, made, rule, max_length=64, recording="rounds")
    engine.generate([[1, 2, 3, 1, 2]], SamplingParams(max_new_tokens=9))
    ahead = sum(first == second == "play" for first, second in itertools.pairwise(events))
    assert ahead == (1 if overlaps else 0)  # from then on one is played for every one that is read
    assert abs(events.count("play") - events.count("read")) <= 1


def test_a_stage_that_cannot_be_repeated_is_done_once(target) -> None:
    """It looks at values; other reasons: ``test_forward.py``."""

    class Mine(Wrapped):
        def observe(self, outcome: Outcome) -> None:
            outcome.counts.tolist()
            super().observe(outcome)

    prompts, params = [[1, 2, 3], [4, 5, 6, 7]], SamplingParams(max_new_tokens=30)
    wanted = Engine(target, max_batch_size=2, max_length=64).generate(prompts, params)
    drafter = Wrapping(ModelDrafter(perturbed(target.model, 0.05), [2, 2, 1], sampling="deterministic"), Mine)
    with Engine(target, drafter, RejectionVerifier(), max_batch_size=2, max_length=64, recording="rounds") as engine:
        found = engine.generate(prompts, params)
        refused = {key[0] for key in engine._rounds.recorder.recordings._refused}
        assert engine._rounds.recorder.recordings.replays > 0
    assert refused == {"commit"}
    assert [done.token_ids for done in found] == [done.token_ids for done in wanted]
    assert sum(step.accepted for done in found for step in done.steps) > 20


def test_a_hook_of_the_user_is_called_in_every_round() -> None:
    model = tiny_model("llama", vocab_size=VOCAB, layers=2)
    calls = []
    model.model.layers[0].register_forward_hook(lambda *given: calls.append(1))
    engine = Engine(Target(model), max_length=64, recording="rounds")
    calls.clear()
    rounds = len(engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12))[0].steps)
    assert rounds == 12
    assert len(calls) >= rounds  # and one in the prompt's prefill
    assert engine._rounds.recorder.recordings.replays > 0  # the other stages are recorded


def test_a_change_of_the_rule_is_noticed(target) -> None:
    rule = TypicalVerifier(epsilon=0.3, delta=0.3)
    engine, recorder = recorded(target, DRAFTERS["medusa"](target.model), rule, max_batch_size=1)
    sampling = SamplingParams(max_new_tokens=40, temperature=1.0)
    engine.generate(prompts()[:1], sampling)
    rule.epsilon = rule.delta = 1e-6  # accepts everything
    steps = engine.generate(prompts()[:1], sampling)[0].steps
    assert recorder.compared > 0
    assert all(step.accepted == step.proposed_depth for step in steps)


def test_a_rule_from_elsewhere_is_recorded_only_if_it_says_so(target) -> None:
    class Elsewhere(RejectionVerifier):
        pass

    for recordable, most in ((None, 0), (True, 1000)):
        Elsewhere.recordable = recordable
        engine, _ = recorded(target, DRAFTERS["medusa"](target.model), Elsewhere(), max_batch_size=1)
        engine.generate(prompts()[:1], SamplingParams(max_new_tokens=30))
        assert (len(engine._rounds.recorder.recordings) > 0) == (most > 0)


def test_what_moves_is_not_begun_again_where_memory_ran_out() -> None:
    """The commit of a path may have moved keys already, so its requests end, and the next ones are not recorded."""

    class Breaks(Recorder):
        def record(self, name, stage, inputs):
            stage(*inputs)
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")

    state = torch.zeros(1)
    recordings = Recordings(Breaks(), after=1, most=2)

    def moving(step: Tensor) -> tuple[()]:
        state.add_(step)
        return ()

    with pytest.raises(torch.OutOfMemoryError):
        recordings.run("stage", "key", moving, [torch.ones(1)], repeatable=False)
    assert state.item() == 1
    recordings.run("stage", "key", moving, [torch.ones(1)], repeatable=False)
    assert state.item() == 2


class Cuda:
    """CUDA graphs without a GPU, which run once.

    Attributes:
        captures: The pool of every capture, and what became of it.
        stream: The current one; a capture has its own, which torch leaves only where a capture could be ended.
        underway: Pools that the allocator still serves captures from.
        waits: Whether work that is done now makes the host wait.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.captures: list[tuple[int, str]] = []
        self.stream, self.underway, self.mode, self.waits = "main", list[int](), 0, False
        handles = itertools.count()
        fakes = {
            "device": lambda device: nullcontext(), "graph_pool_handle": lambda: next(handles),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None), "graph": self.graph,
            "current_stream": lambda: self.stream, "set_stream": partial(setattr, self, "stream"),
            "current_device": lambda: 0, "get_sync_debug_mode": lambda: self.mode, "set_sync_debug_mode": self.debug,
        }  # fmt: skip
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.ended, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: None, raising=False)

    def debug(self, mode: int | str) -> None:
        self.mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)  # type: ignore[arg-type, assignment]

    def ended(self, device: int, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    @contextmanager
    def graph(self, _: object, pool: int, **options: object) -> Iterator[None]:
        assert not self.underway, "captures_underway.empty() INTERNAL ASSERT FAILED"
        self.captures.append((pool, "broken off"))
        self.stream, before = "side", self.stream
        self.underway.append(pool)
        yield
        self.captures[-1], self.stream = (pool, "captured"), before
        self.underway.remove(pool)

    def look(self) -> None:
        """Do what makes the host wait."""
        if recording_now():
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.mode:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=2)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def graphs(after: int = 1) -> Recordings:
    return Recordings(CudaGraphRecorder(torch.device("cpu")), after=after, most=9)


def plus_one(x: Tensor) -> tuple[Tensor, ...]:
    return (x + 1,)


def run(recordings: Recordings, name: str, stage: Stage, key: object = 0) -> float:
    return recordings.run(name, key, stage, [torch.ones(1)])[0].item()


def test_graphs_of_different_stages_share_no_memory(cuda: Cuda) -> None:
    """They are replayed in another order than they were captured in, and read each other's outputs."""
    recordings = graphs()
    for key in range(2):
        for name in ("verify", "judge"):
            run(recordings, name, plus_one, key)
    pools = [pool for pool, _ in cuda.captures]
    assert pools[0] == pools[2] != pools[1] == pools[3]
    recordings.clear()  # torch takes no handle again whose graphs are gone
    run(recordings, "verify", plus_one)
    assert cuda.captures[-1][0] not in pools


def test_after_a_capture_that_failed_others_succeed(cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    """They get another pool; the stream and the allocator are as before. The failure is said once, and counted."""

    def fails(x: Tensor) -> tuple[Tensor, ...]:
        cuda.look()
        return plus_one(x)

    recordings = graphs()
    for key in range(2):
        assert run(recordings, "judge", fails, key) == 2
        assert (cuda.stream, cuda.underway) == ("main", [])
    run(recordings, "verify", plus_one)
    assert [what for _, what in cuda.captures] == ["broken off"] * 2 + ["captured"]
    assert len({pool for pool, _ in cuda.captures}) == 3 and recordings.made == len(recordings) == 1
    ((refused, kinds),) = recordings.refused.items()
    assert (refused.stage, kinds, refused.by_design) == ("judge", 2, False)
    assert "not permitted when stream is capturing" in refused.reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_stage_that_makes_the_host_wait_is_refused_before_it_is_captured(cuda: Cuda, caplog) -> None:
    """It is done to its end, once, and what the process was told before about waiting holds again."""
    cuda.mode, done = 2, []

    def waits(x: Tensor) -> tuple[Tensor, ...]:
        done.append(cuda.mode)
        if cuda.mode < 2:
            cuda.look()
        return plus_one(x)

    recordings = graphs(after=3)
    assert [run(recordings, "commit", waits) for _ in range(5)] == [2] * 5
    assert done == [2, 1, 2, 2, 2] and not cuda.captures
    assert [(each.stage, each.by_design) for each in recordings.refused] == [("commit", False)]
    assert len(caplog.records) == 1 and f"{__name__.rpartition('.')[2]}.py" in caplog.text, "it says where"
    for _ in range(3):
        run(recordings, "verify", plus_one)
    assert len(recordings) == 1


def test_code_of_a_users_is_refused_by_design(cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    def hooked(x: Tensor) -> tuple[Tensor, ...]:
        if recording_now():
            raise UnrecordableError("the model has hooks from elsewhere")
        return plus_one(x)

    recordings = graphs()
    for key in range(9):
        assert run(recordings, "verify", hooked, key) == 2
    assert recordings.refused == {("verify", "the model has hooks from elsewhere", True): 9}
    assert not caplog.records


def test_an_address_is_a_graphs_only_as_long_as_there_is_the_graph(cuda: Cuda) -> None:
    """Else a tensor of somebody else's that came to lie there would be written to."""
    recorder = CudaGraphRecorder(torch.device("cpu"))
    recording, (output,) = recorder.record("draft", plus_one, [torch.ones(1)])
    assert set(recorder._fixed) == {output.data_ptr()}
    del recording, output
    assert not recorder._fixed
