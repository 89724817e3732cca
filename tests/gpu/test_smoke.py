"""Recorded rounds give the tokens of the same rounds as they are, through several sizes of attention and back.

Greedy and sampled requests in one batch; plainly, with a drafter, and with it again and again on one engine. The test
itself is tried on a CPU, where recordings that are wrong must fail it.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import specdec.forward as forward_module
from specdec import Engine, SamplingParams, Target
from specdec.engine import recording as recording_module
from specdec.execution.recorder import Recordings, TapeRecorder
from tests.components import DRAFTERS, EVERYWHERE, VERIFIERS, skip_unfit, tried
from tests.models import tiny_model

GREEDY = SamplingParams(max_new_tokens=48, ignore_eos=True, seed=0)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.9)


def check_recorded(model: Any, drafter: str, contexts: Sequence[int], tokens: int, rule: str = EVERYWHERE) -> None:
    """Assert equal tokens, that every stage was recorded, and that the last pass was replayed."""
    made, verifier = DRAFTERS[drafter](model), VERIFIERS[rule]()
    skip_unfit(made, verifier)
    lengths = [length for length in contexts for _ in range(2)]
    prompts = [[(7 * (place % 23) + 3 * row + place // 97) % 11 for place in range(n)] for row, n in enumerate(lengths)]
    sampling = [
        replace(SAMPLED if row % 2 else GREEDY, max_new_tokens=tokens, stream=row) for row in range(len(lengths))
    ]
    expected: dict[bool, list[tuple[int, ...]]] = {}
    for recording, passes in {"off": (False, True), "rounds": (False, True, True, True)}.items():
        options: dict[str, Any] = {"max_batch_size": 2, "max_length": max(contexts) + 64, "recording": recording}
        with Engine(Target(model), made, verifier, **options) as engine:
            for speculate in passes:
                before = engine.recording_counts
                outputs = [done.token_ids for done in engine.generate(prompts, sampling, speculate=speculate)]
                assert outputs == expected.setdefault(speculate, outputs), "graphs overwrite each other"
            after = engine.recording_counts
    assert not after.refused, after.refused
    assert (after.replayed - before.replayed) / (after.rounds - before.rounds) >= 0.8, "rounds do not come again"


@pytest.fixture(autouse=True)
def recorded_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "RECORD_AFTER", 2)
    monkeypatch.setattr(forward_module, "_LEAST_KEYS", 64)  # attention reads one of four numbers of positions


@pytest.mark.gpu
@pytest.mark.parametrize(("drafter", "verifier"), [(d, v) for v in VERIFIERS for d in DRAFTERS if tried(d, v)])
def test_recorded_rounds_give_the_same_tokens(drafter: str, verifier: str) -> None:
    contexts, tokens = ((50, 115, 170, 10), 48) if verifier == EVERYWHERE else ((62, 10), 16)
    check_recorded(tiny_model().cuda(), drafter, contexts, tokens, verifier)


class Stale(TapeRecorder):
    """Hands out the outputs of the first time again, as graphs do that others have written over."""

    def record(self, name: str, *given: Any) -> Any:
        recording, outputs = super().record(name, *given)
        kept = [each.clone() for each in outputs]

        def replay(*inputs: Tensor) -> Sequence[Tensor]:
            assert recording is not None
            recording(*inputs)
            return kept

        return (replay if name == "judge" else recording), outputs


class Refusing(TapeRecorder):
    """Records no forward, as a graph that meets a read by the host."""

    def record(self, name: str, *given: Any) -> Any:
        if name == "verify":
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(name, *given)


unchanged = Recordings.run


def forgetful(self: Recordings, *given: Any, **options: Any) -> Any:
    """Drops all recordings whenever anything comes, as an engine whose target seems to change."""
    self.clear()
    return unchanged(self, *given, **options)


@pytest.mark.parametrize(
    ("mutant", "complaint"),
    [
        (None, None),
        (Stale, "graphs overwrite each other"),
        (Refusing, "stream is capturing"),
        (forgetful, "rounds do not come again"),
    ],
)
def test_recordings_that_are_wrong_fail_it(mutant: Any, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant is forgetful:
        monkeypatch.setattr(Recordings, "run", forgetful)
    elif mutant is not None:
        monkeypatch.setattr("specdec.engine.recording.TapeRecorder", mutant)
    model = tiny_model()
    wrong = nullcontext() if mutant is None else pytest.raises((AssertionError, RuntimeError), match=complaint)
    with wrong:
        check_recorded(model, "model_chain_iid", (62, 10), 8)
