"""Audits by betting: honest decoders are not accused, mistaken ones are, as surely as was said."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from transformers.generation import logits_process as warpers

from specdec.checks.betting import ESTIMATE, Question, Wealth, first_alarms, p_value, power
from specdec.checks.mistakes import EDGES, FILTERS_FIRST, HONEST, MISTAKES, OF_SERVERS, Cells, Place, joint
from specdec.checks.telling import Telling, planned
from specdec.requests import SamplingParams

AUDITS, VOCAB, LEVEL = 1_000, 40, 1e-3
SERVERS = ("temperature_ignored", "top_p_ignored")
SHOWN = [name for name in MISTAKES if name in SERVERS or name not in (*OF_SERVERS, FILTERS_FIRST)]
"""Mistakes that show in a few tokens: a nucleus of these leaves nothing for most of a server's own settings."""
Numbers = Callable[..., float]
"""Draws a number from [0, 1), given where it makes a difference."""


def places(vocab: int) -> list[Place]:
    generator = torch.Generator().manual_seed(5)
    target = 1.3 * torch.randn(vocab + 1, vocab, generator=generator)
    drafter = target + 0.6 * torch.randn(vocab + 1, vocab, generator=generator)
    sampling = SamplingParams(temperature=0.7, top_p=0.9)
    return [Place.of(p, q, sampling) for p, q in zip(target, drafter, strict=True)]


def question(vocab: int = VOCAB, drafted: int = 1, horizon: int = 2, undrafted: int = 0) -> tuple[Cells, Question]:
    at, sizes = places(vocab), {"horizon": horizon, "drafted": drafted, "undrafted": undrafted}
    cells, laws = joint(lambda paths: [at[[vocab, *path][-1]] for path in paths], **sizes)
    return cells, Question([laws[HONEST]], {name: [laws[name]] for name in SHOWN}, level=LEVEL, block=32)


def draw(law: np.ndarray, numbers: Numbers) -> int:
    return min(int(np.searchsorted(law.cumsum(), numbers(*law.cumsum()), side="right")), len(law) - 1)


def decode(
    mistake: str, length: int, drafted: int, undrafted: int, at: Sequence[Place], numbers: Numbers
) -> tuple[int, ...]:
    """Speculative decoding as it is written in engines, with a mistake in it."""
    tokens: list[int] = []

    def here() -> Place:
        return at[tokens[-1] if tokens else -1]

    def whole(law: np.ndarray) -> int:
        return draw(law / law.sum(), numbers)

    while len(tokens) < length:
        if mistake in SERVERS:
            tokens.append(whole(here().served[mistake]))
            continue
        if len(tokens) < undrafted:
            tokens.append(whole(here().p))
            continue
        for _ in range(drafted):
            now = here()
            p, q = (now.whole_p, now.whole_q) if mistake == "late_top_p" else (now.p, now.q)
            says = now.raw_q if mistake == "temperature_once" else q
            stays = np.minimum(p / says.clip(1e-99), 1)
            shared = stays if mistake == "shared_noise" else ()
            noise = numbers(*q.cumsum(), *shared)
            token = int(q.argmax()) if mistake == "one_hot" else draw(q, lambda *_, u=noise: u)
            if (noise if mistake == "shared_noise" else numbers(stays[token])) < stays[token]:
                tokens.append(token)
                if len(tokens) == length:
                    break
                continue
            residual = np.maximum(p - says, 0)
            if mistake == "residual_from_p":
                residual = p
            if mistake == "late_top_p":
                residual = residual * (now.p > 0) if (residual * (now.p > 0)).any() else now.p
            tokens.append(draw(residual, numbers) if mistake == "residual_unscaled" else whole(residual))
            break
        else:
            tokens.append(whole(here().q if mistake == "bonus_from_q" else here().p))
    return tuple(tokens)


def every_course(play: Callable[[Numbers], tuple[int, ...]]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """The probability and the outcome of every course that the numbers of a decoder can take."""
    script: list[int] = []
    while True:
        weight, counts, taken = [1.0], list[tuple[int, int]](), iter([*script])

        def numbers(*breaks: float, weight: Any = weight, counts: Any = counts, taken: Any = taken) -> float:
            edges = np.unique(np.clip([0.0, 1.0, *breaks], 0.0, 1.0))
            choice = next(taken, 0)
            counts.append((choice, len(edges) - 1))
            weight[0] *= edges[choice + 1] - edges[choice]
            return (edges[choice] + edges[choice + 1]) / 2

        outcome = play(numbers)
        yield weight[0], outcome
        while counts and counts[-1][0] == counts[-1][1] - 1:
            counts.pop()
        if not counts:
            return
        script = [*(choice for choice, _ in counts[:-1]), counts[-1][0] + 1]


@pytest.mark.parametrize(("vocab", "drafted", "horizon", "undrafted"), [(8, 1, 2, 0), (4, 2, 3, 0), (6, 1, 2, 1)])
@pytest.mark.parametrize("name", [HONEST, *SHOWN])
def test_the_law_of_a_mistake_is_that_of_a_decoder_with_it(name, vocab, drafted, horizon, undrafted) -> None:
    cells, asked = question(vocab, drafted, horizon, undrafted)
    found, at = np.zeros(cells.count), places(vocab)
    for weight, tokens in every_course(lambda numbers: decode(name, horizon, drafted, undrafted, at, numbers)):
        found[cells.cell(tokens)] += weight
    law = asked.laws[0] if name == HONEST else asked.mistakes[name][0]
    assert found.sum() == pytest.approx(1, abs=1e-9) and np.abs(found - law).max() < 1e-9
    told = 0.5 * np.abs(found - asked.laws[0]).sum() > 0.01
    assert told or name == HONEST or vocab < 8, "and it is told from the right one"
    assert told or name != "bonus_from_q" or horizon <= drafted or undrafted, "where the bonus token is reached"
    assert told or name != "one_hot" or not undrafted


Settings = dict[str, Any]
SERVED: dict[str, tuple[Settings, Settings]] = {
    "temperature_ignored": ({}, {"temperature": None}),
    "temperature_default": ({}, {"temperature": 0.7}),
    "top_k_ignored": ({"top_k": 30}, {"top_k": None}),
    "top_p_ignored": ({"top_p": 0.9}, {"top_p": None}),
    "min_p_ignored": ({"min_p": 0.1}, {"min_p": None}),
    "penalty_ignored": ({"repetition_penalty": 1.3}, {"repetition_penalty": None}),
    "own_top_k": ({}, {"top_k": 20}),
    "own_top_p": ({}, {"top_p": 0.95}),
    "own_min_p": ({"min_p": 0.01}, {"min_p": 0.05}),
    "own_filters": ({"top_k": 50}, {"top_k": 40, "min_p": 0.05}),
    "generation_config": ({"top_p": 0.9}, {"top_k": 20, "top_p": 0.8}),
    "own_penalty": ({}, {"repetition_penalty": 1.1}),
    FILTERS_FIRST: ({"top_p": 0.9, "min_p": 0.01}, {}),
}
"""What is asked for besides a temperature of 0.8, and what servers do instead."""
WARPERS: dict[str, Callable[[Any], Any]] = {
    "repetition_penalty": warpers.RepetitionPenaltyLogitsProcessor,
    "temperature": warpers.TemperatureLogitsWarper,
    "top_k": warpers.TopKLogitsWarper,
    "top_p": warpers.TopPLogitsWarper,
    "min_p": warpers.MinPLogitsWarper,
}


def served(name: str) -> Iterator[tuple[Telling, np.ndarray]]:
    """A few prompts of an audit for servers' settings, and what one makes of them by transformers' code."""
    (given, instead), generator = SERVED[name], torch.Generator().manual_seed(3)
    asked = {"temperature": 0.8, **given}
    order = sorted(WARPERS, key=lambda each: name == FILTERS_FIRST and each == "temperature")
    for number, spread in enumerate((1.2, 2.0, 2.5)):
        logits = spread * torch.randn(150, generator=generator)
        before = [*range(12), *logits.topk(2).indices.tolist()]
        at, scores = Place.of(logits, logits, SamplingParams(**asked), before), logits[None].double()
        for setting in order:
            if (value := (asked | instead).get(setting)) is not None:
                scores = WARPERS[setting](value)(torch.tensor([before]), scores)
        law, parts = scores.softmax(-1)[0].numpy(), MISTAKES[name][1](at)
        assert parts.recovered == pytest.approx(law, abs=1e-6) and parts.bonus is parts.recovered
        assert not parts.stays.any()
        cells, laws = joint(lambda paths, at=at: [at], horizon=1, drafted=1, names=list(SERVED))
        yield Telling(str(number), (0,), cells, laws), law


@pytest.mark.parametrize("name", SERVED)
def test_a_server_with_settings_of_its_own_is_told_by_name(name: str) -> None:
    """It decodes by transformers' code. Where the alarm comes early, some settings may be hard to tell apart."""
    candidates, laws = zip(*served(name), strict=True)
    prompts, asked = planned(candidates, list(SERVED), level=LEVEL, block=32)
    state, random = Wealth(asked), np.random.default_rng(1)
    told: list[str] = []
    for prompt in asked.order(100).tolist():
        law, cells = laws[int(prompts[prompt].id)], prompts[prompt].cells
        drawn = random.choice(len(law), size=asked.block, p=law / law.sum())
        state.advance(prompt, np.bincount([cells.cell([token]) for token in drawn], minlength=cells.count)[None])
        told = told or (state.likeliest if state.alarm[0] else [])
    assert name in told and len(told) <= 4 and state.likeliest[0] == name


class Peeking(Wealth):
    """Estimates the law from the very outputs that it then bets on."""

    def advance(self, prompt: int, counts: np.ndarray) -> None:
        self.seen[prompt] = self.seen[prompt] + counts
        super().advance(prompt, counts)
        self.seen[prompt] = self.seen[prompt] - counts


class Best(Wealth):
    """Takes the bet that went best for all that was staked."""

    @property
    def log_e(self) -> np.ndarray:
        return self.logs.max(1) + np.log(50)


def many_alarms(wealth: type[Wealth], blocks: int = 180) -> bool:
    """Whether audits of honest decoders, each of which has laws of its own, raise more alarms than chance does."""
    found = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        laws = [random.dirichlet(np.full(60, 0.3)) for _ in range(3)]
        others = {str(n): [0.9 * law + 0.1 * random.dirichlet(np.full(60, 0.3)) for law in laws] for n in range(4)}
        asked = Question(laws, others, level=LEVEL, block=32)
        alarms, totals = first_alarms(asked, laws, audits=AUDITS // 20, blocks=blocks, seed=seed, wealth=wealth)
        p_values = [p_value(asked, [total[audit] for total in totals]) for audit in range(AUDITS // 20)]
        found += int(((alarms <= blocks) | (np.array(p_values) <= LEVEL / 2)).sum())
    return bool(scipy.stats.binom.sf(found - 1, AUDITS, LEVEL) < 1e-4)


@pytest.mark.parametrize("wealth", [Wealth, Peeking, Best])
def test_honest_decoders_are_accused_by_audits_that_cheat_alone(wealth: type[Wealth]) -> None:
    assert many_alarms(wealth) is (wealth is not Wealth)


@pytest.mark.parametrize("name", SHOWN)
def test_power_is_what_is_said(name: str) -> None:
    _, asked = question()
    said = power(asked, name, blocks=200, wanted=0.99)
    assert said.samples is not None and said.distance > 0.02
    needed = said.samples // asked.block
    alarms, _ = first_alarms(asked, asked.mistakes[name], audits=AUDITS, blocks=200, seed=99)
    assert (alarms <= needed).mean() > 0.97
    half = max(int(np.median(alarms)) - 1, 1)
    told, found = power(asked, name, blocks=half, wanted=0.99).power, (alarms <= half).mean()
    assert abs(told - found) < 4 * (0.25 / 400 + 0.25 / AUDITS) ** 0.5


def test_a_mistake_without_a_name_is_seen() -> None:
    """Tokens of the second half of the vocabulary come a fifth more often: only the estimate bets on that."""
    _, asked = question()
    law = asked.laws[0] * np.where(np.arange(len(asked.laws[0])) % 2, 1.5, 1.0)
    state = Wealth(asked)
    for block in np.random.default_rng(0).multinomial(32, law / law.sum(), size=400):
        state.advance(0, block[None])
    assert state.alarm[0] and state.bets[int(state.logs[0].argmax())] == ESTIMATE


def test_a_place_where_rounding_decides_what_is_drawn_is_known() -> None:
    """The nucleus ends within a rounding error: its laws differ by the token that is in one of them only."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, moved in ((0.8, True), (0.8 + 1e-4, False), (1.0, False)):
        at = Place.of(logits, logits, SamplingParams(temperature=1.0, top_p=top_p))
        _, laws = joint(lambda paths, at=at: [at] * len(paths), horizon=2, drafted=1, names=["one_hot"])
        assert (max(np.abs(laws[name] - laws[HONEST]).sum() for name in EDGES) > 0.1) == moved


def test_rounding_is_no_mistake() -> None:
    """Laws that differ by the tolerance, in the direction that a bet likes best, make no bet gain."""
    law = np.array([0.5, 0.3, 0.2, 0.0])
    moved = law + np.array([-1e-3, 0.0, 0.0, 1e-3])
    for tolerance, gains in ((1e-3, False), (0.0, True)):
        asked = Question([law], {"a mistake": [np.array([0.4, 0.3, 0.2, 0.1])]}, tolerance=tolerance)
        factor = np.exp(asked.ratio(0, asked.mistakes["a mistake"][0]))
        assert (factor @ moved > 1 + 1e-12) == gains
