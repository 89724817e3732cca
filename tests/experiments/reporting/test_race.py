"""Two methods side by side: what is measured, and what is shown when."""

import io

import pytest
from rich.console import Console

from experiments.measuring.race import Emitted, Lane, run_lane
from experiments.reporting.tokens import show_race
from experiments.results.sources import Source
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.components import DRAFTERS, fitting
from tests.models import tiny_model

TEXTS = {1: b"one ", 2: b"two ", 3: b"three "}
PLAIN = Lane("plain", tuple(Emitted(t, Source.TARGET, float(t)) for t in (1, 2, 3)), 3, 3.0)
FAST = Lane(
    "fast",
    (Emitted(1, Source.ACCEPTED, 1.0), Emitted(2, Source.EITHER, 1.0), Emitted(3, Source.TARGET, 1.5)),
    2,
    1.5,
)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def shown(*, terminal: bool) -> tuple[str, Clock]:
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, width=100, force_terminal=terminal, color_system="truecolor" if terminal else None)
    show_race(console, [PLAIN, FAST], TEXTS, "what runs", clock=clock, sleep=clock.sleep)
    return file.getvalue(), clock


def test_a_pipe_gets_the_end_at_once_with_marks() -> None:
    text, clock = shown(terminal=False)
    assert clock.now == 100.0
    assert "«one »±two three" in text
    assert "one two three" in text
    assert "3 tokens, 1 tokens/s, 3 target forwards" in text
    assert "3 tokens, 2 tokens/s, 2 target forwards" in text
    assert "fast: 2.00x as fast, the same output" in text
    assert "\x1b" not in text


def test_a_terminal_sees_both_at_their_own_speed() -> None:
    text, clock = shown(terminal=True)
    assert clock.now >= 103.0
    # Half way through plain decoding's time, it has one token and the other method all of its own.
    frames = text.split("what runs")
    middle = frames[len(frames) // 2 + 2]
    assert "1 tokens" in middle
    assert "3 tokens" in middle


def test_a_lane_is_the_engines_output_with_its_sources() -> None:
    model = tiny_model(vocab_size=64)
    drafter = DRAFTERS["model_chain_iid"](model)
    engine = Engine(Target(model), drafter, fitting(drafter), max_length=64)
    sampling = SamplingParams(max_new_tokens=14)
    prompt = [3, 4, 5, 3, 4, 5]
    plain = run_lane("plain", engine, prompt, sampling, speculate=False)
    fast = run_lane("model", engine, prompt, sampling, speculate=True)
    expected = engine.generate([prompt], sampling)[0]
    assert tuple(token.token for token in fast.tokens) == tuple(token.token for token in plain.tokens)
    assert tuple(token.token for token in fast.tokens) == expected.token_ids
    assert {token.source for token in plain.tokens} == {Source.TARGET}
    accepted = sum(token.source is Source.ACCEPTED for token in fast.tokens)
    assert accepted == sum(min(step.accepted, len(step.token_ids)) for step in expected.steps)
    assert fast.rounds == len(expected.steps)
    times = [token.seconds for token in fast.tokens]
    assert times == sorted(times)
    assert fast.seconds == pytest.approx(times[-1])
