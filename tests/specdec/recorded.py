"""An engine whose recorded rounds are compared with the rounds themselves, bit for bit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.drafting.scored import ScoredSession
from specdec.engine.engine import Engine
from specdec.execution.recorder import Recorder, Recording, Stage, TapeRecorder
from specdec.host import without_looking
from specdec.interfaces import Drafter
from specdec.target.runner import ModelRunner
from specdec.target.target import Target


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
        assert recording is not None, "every stage of this project can be repeated"

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
    recorder = engine._rounds.recordings._recorder = Comparing()
    recorder.engine = engine
    return engine, recorder
