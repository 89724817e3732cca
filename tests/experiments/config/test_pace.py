"""The demo takes as many prompts and tokens as this machine can in the time that a reader has, on the same target."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.commands import demo as pace
from experiments.commands.demo import LEAST_PROMPTS, LEAST_TOKENS, Pace, fit_to_machine, pace_of
from experiments.datasets.prompt import Prompt
from experiments.demo import demo
from experiments.measuring.jobs import Job
from specdec.requests import SamplingParams
from tests.experiments.runs import Configure

BESIDES = 50.0


def test_fewer_prompts_and_then_fewer_tokens_on_the_same_target(configure: Configure) -> None:
    def end(count: int, tokens: int) -> float:
        return BESIDES + 1.1 * count * (made.prompt + tokens * made.token)

    taken = []
    for speed in (1, 1.2, 1.4, 1.6, 1.75, 2, 6):  # times slower than a machine that just manages all
        config = configure("demo", "dataset.count=8", "sampling.max_new_tokens=64")
        made = Pace(prompt=1.0 * speed, token=0.16 * speed, plain=0.02 * speed)
        said = fit_to_machine(config, made, 8, BESIDES)
        count, tokens = config.dataset.count, config.sampling.max_new_tokens
        taken.append((count, tokens))
        assert config.target.inflate == "110m"
        assert f"Plain decoding takes {20 * speed:g} ms per token here: 8 prompts of 64 tokens by all" in said
        if (count, tokens) != (8, 64):
            assert f"(time_limit=150), so {count} of {tokens} tokens" in said
            assert f"taken, and done after {end(count, tokens):.0f} s" in said
            more = (count + 1, tokens) if tokens == 64 else (count, tokens + 8)
            assert end(*more) > 150, "not fewer than needed"
        assert ("the fewest that mean anything" in said) == (end(count, tokens) > 150)
    assert taken[0] == (8, 64) and taken[-1] == (LEAST_PROMPTS, LEAST_TOKENS)
    assert taken == sorted(taken, reverse=True) and len(set(taken)) > 4
    assert {tokens for count, tokens in taken if count > LEAST_PROMPTS} == {64}, "prompts first"


def test_what_was_asked_for_is_never_exceeded(configure: Configure) -> None:
    slow = Pace(prompt=100.0, token=10.0, plain=1.0)
    config = configure("demo", "dataset.count=2", "sampling.max_new_tokens=20")
    fit_to_machine(config, slow, 2, BESIDES)
    assert (config.dataset.count, config.sampling.max_new_tokens) == (2, 20), "below the floors: as it is"
    config = configure("demo", "time_limit=null")
    asked = config.dataset.count, config.sampling.max_new_tokens
    assert fit_to_machine(config, slow, 8, BESIDES).endswith("s after the start")
    assert (config.dataset.count, config.sampling.max_new_tokens) == asked


def test_what_is_timed_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of every kind captures for 10 s; then a prompt takes 2 s, a token 0.25 s and 0.125 s."""
    now = [0.0]
    seen: set[tuple[bool, float]] = set()

    def generate(prompts: Sequence[Any], sampling: Sequence[SamplingParams], *, speculate: bool) -> list[Any]:
        (own,) = sampling
        now[0] += 10.0 * ((speculate, own.temperature) not in seen)
        seen.add((speculate, own.temperature))
        prefilled = now[0] + 2.0
        now[0] = prefilled + own.max_new_tokens * (0.125 if speculate else 0.25)
        return [SimpleNamespace(timestamps=SimpleNamespace(prefilled=prefilled))]

    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    engine: Any = SimpleNamespace(generate=generate)
    job = Job(Prompt("a", ("a",)), 0, (1, 2), SamplingParams(max_new_tokens=64))
    plainly, drafting = (SimpleNamespace(engine=engine, speculate=speculate) for speculate in (False, True))
    methods: Any = [plainly, drafting]
    assert pace_of(methods, job, [0.0, 1.0]) == Pace(prompt=8.0, token=0.75, plain=0.25)


@pytest.mark.full
def test_resuming_keeps_what_was_decided(
    configure: Configure, saved: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["engine.max_length=128", "target.inflate=null", "target.dtype=float32", "~methods.medusa", "~methods.eagle"]
    more += ["dataset.count=8", "sampling.max_new_tokens=56", f"methods.model.name={saved / 'drafter'}"]
    for seconds, resume in ((100.0, "false"), (0.0, "true")):
        monkeypatch.setattr(pace, "pace_of", lambda *given, each=seconds: Pace(each, each, 0.01))
        config = configure("demo", *tiny, *more, f"resume={resume}")
        assert demo(config).complete
        assert (config.dataset.count, config.sampling.max_new_tokens) == (LEAST_PROMPTS, LEAST_TOKENS)
