"""How often progress is told; two methods side by side."""

import io

import pytest
from rich.console import Console

from experiments.measuring.race import Emitted, Lane, run_lane
from experiments.reporting.progress import Every
from experiments.reporting.race import show_race
from experiments.results.sources import Source
from specdec import Engine, SamplingParams, Target
from tests.components import DRAFTERS, fitting
from tests.models import tiny_model


def test_settings() -> None:
    given = {None: None, 10: Every(prompts=10), "30s": Every(seconds=30), "5m": Every(seconds=300)}
    assert {value: Every.of(value) for value in given} == given
    for value in (0, -1, True, "30", "s", "1.5m", ""):
        with pytest.raises(ValueError, match="progress_every="):
            Every.of(value)


TEXTS = {1: b"one ", 2: b"two ", 3: b"three "}
PLAIN = Lane("plain", tuple(Emitted(t, Source.TARGET, float(t)) for t in (1, 2, 3)), 3, 3.0)
DRAFTED = ((1, Source.ACCEPTED, 1.0), (2, Source.EITHER, 1.0), (3, Source.TARGET, 1.5))
FAST = Lane("fast", tuple(Emitted(*each) for each in DRAFTED), 2, 1.5)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_pipe_gets_the_end_at_once_and_a_terminal_both_at_their_own_speed(terminal: bool) -> None:
    file, now = io.StringIO(), [100.0]  # time passes only while somebody sleeps

    def sleep(seconds: float) -> None:
        now[0] += seconds

    console = Console(file=file, width=100, force_terminal=terminal, color_system="truecolor" if terminal else None)
    show_race(console, [PLAIN, FAST], TEXTS, "what runs", clock=lambda: now[0], sleep=sleep)
    text = file.getvalue()
    if terminal:
        assert now[0] >= 103.0
        # Half way through plain decoding's time, it has one token and the other method all of its own.
        frames = text.split("what runs")
        middle = frames[len(frames) // 2 + 2]
        assert "1 tokens" in middle and "3 tokens" in middle
        return
    assert now[0] == 100.0 and "\x1b" not in text
    assert "«one »±two three" in text and "one two three" in text
    assert "3 tokens, 1 tokens/s, 3 target forwards" in text and "3 tokens, 2 tokens/s, 2 target forwards" in text
    assert "fast: 2.00x as fast, the same output" in text


def test_a_lane_is_the_engines_output_with_its_sources() -> None:
    model = tiny_model(vocab_size=64)
    drafter = DRAFTERS["model_chain_iid"](model)
    engine = Engine(Target(model), drafter, fitting(drafter), max_length=64)
    sampling, prompt = SamplingParams(max_new_tokens=14), [3, 4, 5, 3, 4, 5]
    plain, fast = (run_lane("x", engine, prompt, sampling, speculate=speculate) for speculate in (False, True))
    expected = engine.generate([prompt], sampling)[0]
    assert [token.token for token in fast.tokens] == [token.token for token in plain.tokens] == [*expected.token_ids]
    assert {token.source for token in plain.tokens} == {Source.TARGET}
    accepted = sum(token.source is Source.ACCEPTED for token in fast.tokens)
    assert accepted == sum(min(step.accepted, len(step.token_ids)) for step in expected.steps) > 0
    assert fast.rounds == len(expected.steps)
    times = [token.seconds for token in fast.tokens]
    assert times == sorted(times) and fast.seconds == pytest.approx(times[-1])
