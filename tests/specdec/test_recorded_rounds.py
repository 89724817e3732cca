"""Rounds that are recorded at some lengths, slots and trees, and replayed at others."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec.engine.recording as recording_module
from drafters.model import ModelDrafter
from specdec import Drafter, Engine, ModelRunner, Outcome, SamplingParams, Target
from specdec.drafting.scored import ScoredSession
from specdec.engine.read_back import Fetch
from specdec.engine.round import Rounds
from specdec.execution.recorder import Recorder, Recording, Stage, TapeRecorder
from specdec.host import without_looking
from tests.components import DRAFTERS, STRONGEST, VERIFIERS, perturbed
from tests.gpu.dry.fake_tensors import overlaps_itself
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
    found += [each for model in session.models if isinstance(model, ModelRunner) for each in model.cache.tensors]
    if isinstance(session, ScoredSession):
        found += tensors_in(session.scorer)
        if session.policy is not None:
            found += [*tensors_in(session.policy), *tensors_in(session.policy.calibration)]
    return found + tensors_in(session)


def tensors_in(owner: object) -> list[Tensor]:
    return [value for value in vars(owner).values() if isinstance(value, Tensor)]


class Comparing(Recorder):
    """Records like ``TapeRecorder``; every replay is compared with the stage itself, bit for bit, state included."""

    engine: Engine  # set after it was made

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
        asked = [replace(each, max_new_tokens=12 + 6 * i) for i, each in enumerate(SAMPLING[:5])]
        engine.generate(prompts()[:5], asked)
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


class Clobbering(Recorder):
    """Records like CUDA graphs that share memory, in the worst case that torch allows.

    Stages have a pool each, as in ``CudaGraphRecorder``. Inputs are read and outputs written at fixed addresses. Who
    was captured first knows nothing of the outputs of those captured later in its pool: a replay writes over them.
    """

    def __init__(self, one_pool: bool):
        self._inner, self._one_pool = TapeRecorder(), one_pool
        self._made: list[tuple[str, Sequence[Tensor]]] = []
        self._fixed: set[int] = set()

    def record(self, name: str, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording | str, Sequence[Tensor]]:
        places = [each if each.data_ptr() in self._fixed else each.clone() for each in inputs]
        program, made = self._inner.record(name, stage, places)
        assert not isinstance(program, str), f"{name}: {program}"
        outputs = [each.clone(memory_format=torch.contiguous_format) for each in made]
        number, pool = len(self._made), "" if self._one_pool else name
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
            for place, each in zip(outputs, results, strict=True):
                place.copy_(each)
            return outputs

        return replay, outputs

    def clear(self) -> None:
        self._made.clear()
        self._fixed.clear()


@pytest.mark.parametrize(
    ("drafter", "one_pool"),
    [
        ("model_tree_iid", False),
        ("medusa", True),  # mutant
        complete("eagle3_expansion", False, strong=False),
    ],
)
def test_graphs_that_share_memory_as_far_as_they_may_change_nothing(target, drafter, one_pool, monkeypatch) -> None:
    """Over several bounds of positions; results at fixed addresses are read before the next round overwrites them."""
    monkeypatch.setattr("specdec.engine.round.bucket_of", lambda keys: -(-keys // 24) * 24)
    options = {"max_batch_size": 3, "max_length": 64, "prefill_chunk": 7}
    asked = [replace(each, max_new_tokens=(30, 14)[i % 2]) for i, each in enumerate(SAMPLING)]
    made, rule = DRAFTERS[drafter](target.model), RejectionVerifier()
    with Engine(target, made, rule, recording="off", **options) as engine:
        wanted = [engine.generate(prompts(), asked, speculate=speculate) for speculate in (False, True)]
    with Engine(target, made, rule, recording="rounds", **options) as engine:
        engine._rounds.recorder.recordings._recorder = Clobbering(one_pool)
        try:
            found = [engine.generate(prompts(), asked, speculate=speculate) for speculate in (False, True)]
        except (RuntimeError, IndexError, ValueError):  # numbers that were overwritten
            assert one_pool
            return
        assert engine._rounds.recorder.recordings.replays > 100, "too little was replayed"
    tokens = [[[each.token_ids for each in outputs] for outputs in both] for both in (found, wanted)]
    assert (tokens[0] == tokens[1]) is not one_pool


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

    for recordable in (None, True):
        Elsewhere.recordable = recordable
        engine, _ = recorded(target, DRAFTERS["medusa"](target.model), Elsewhere(), max_batch_size=1)
        engine.generate(prompts()[:1], SamplingParams(max_new_tokens=30))
        assert bool(engine._rounds.recorder.recordings.kept) == bool(recordable)
