"""Look-ups by themselves, and through an engine."""

from typing import Any

from specdec import Completion, Drafter, Engine, SamplingParams, Sizes, Target
from specdec.drafting.lookup import RatedDrafter
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from verifiers.rejection import RejectionVerifier

TARGET = Target(tiny_model(vocab_size=8, layers=1))


def begun(drafter: RatedDrafter, sequence: list[int]) -> Any:
    """A session with one request."""
    session = drafter.bind(TARGET, Sizes(max_batch_size=1, max_length=200))
    session.admit(0, sequence, SamplingParams())
    return session


def outputs(drafter: Drafter | None, times: int = 1) -> list[Completion]:
    """A target's greedy output, as often one after another."""
    wanted, target = SamplingParams(max_new_tokens=48, ignore_eos=True), Target(tiny_model(vocab_size=64))
    with shapes_unchecked(), Engine(target, drafter, RejectionVerifier(), max_length=80) as engine:
        return [engine.generate([[1, 2, 3]], wanted)[0] for _ in range(times)]
