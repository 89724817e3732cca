"""Audits by betting: honest decoders are not accused, mistaken ones are, as surely as was said."""

from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch

from specdec.checks.betting import ESTIMATE, Question, Wealth, first_alarms, p_value, power
from specdec.checks.goodness import fits
from specdec.checks.mistakes import HONEST, MISTAKES, Cells, Place, joint
from specdec.requests import SamplingParams

AUDITS, VOCAB, LEVEL = 1_000, 40, 1e-3
generator = torch.Generator().manual_seed(5)
TARGET = 1.3 * torch.randn(VOCAB + 1, VOCAB, generator=generator)
DRAFTER = TARGET + 0.6 * torch.randn(VOCAB + 1, VOCAB, generator=generator)
PLACES = [Place.of(p, q, SamplingParams(temperature=0.7, top_p=0.9)) for p, q in zip(TARGET, DRAFTER, strict=True)]
"""After every token, and last after the prompt."""


def place(prefix: tuple[int, ...]) -> Place:
    return PLACES[prefix[-1] if prefix else VOCAB]


def question(drafted: int = 1, horizon: int = 2) -> tuple[Cells, Question]:
    cells, laws = joint(lambda paths: [place(path) for path in paths], horizon=horizon, drafted=drafted)
    return cells, Question([laws.pop(HONEST)], {name: [law] for name, law in laws.items()}, level=LEVEL, block=32)


def draw(law: np.ndarray, u: float) -> int:
    """The first index whose cumulative mass exceeds u, or the last one."""
    return min(int(np.searchsorted(law.cumsum(), u, side="right")), len(law) - 1)


def decode(mistake: str, length: int, drafted: int, numbers: Callable[[], float]) -> list[int]:
    """Speculative decoding as it is written in engines, with a mistake in it."""
    tokens: list[int] = []

    def whole(law: np.ndarray) -> int:
        return draw(law / law.sum(), numbers())

    def last(at: Place) -> int:
        return whole(at.q if mistake == "bonus_from_q" else at.p)

    while len(tokens) < length:
        for _ in range(drafted):
            at = place(tuple(tokens))
            if mistake in ("temperature_ignored", "top_p_ignored"):
                tokens.append(whole(at.raw_p if mistake == "temperature_ignored" else at.whole_p))
                break
            p, q = (at.whole_p, at.whole_q) if mistake == "late_top_p" else (at.p, at.q)
            noise = numbers()
            drafted_token = int(q.argmax()) if mistake == "one_hot" else draw(q / q.sum(), noise)
            says = at.raw_q if mistake == "temperature_once" else q
            if (noise if mistake == "shared_noise" else numbers()) * says[drafted_token] <= p[drafted_token]:
                tokens.append(drafted_token)
                continue
            residual = np.maximum(p - says, 0)
            if mistake == "residual_from_p":
                residual = p
            if mistake == "late_top_p":
                residual = residual * (at.p > 0) if (residual * (at.p > 0)).any() else at.p
            tokens.append(draw(residual, numbers()) if mistake == "residual_unscaled" else whole(residual))
            break
        else:
            tokens.append(last(place(tuple(tokens))))
    return tokens[:length]


@pytest.mark.parametrize("drafted", [1, 2])
@pytest.mark.parametrize("name", [HONEST, *MISTAKES])
def test_the_law_of_a_mistake_is_that_of_a_decoder_with_it(name: str, drafted: int) -> None:
    cells, asked = question(drafted)
    random = np.random.default_rng(len(name))
    counts = np.zeros(cells.count)
    for _ in range(4_000):
        counts[cells.cell(decode(name, 2, drafted, random.random))] += 1
    law = asked.laws[0] if name == HONEST else asked.mistakes[name][0]
    assert law.sum() == pytest.approx(1) and fits(counts, law) > 1e-4
    shown = name != HONEST and 0.5 * np.abs(law - asked.laws[0]).sum() > 0.05
    assert not shown or fits(counts, asked.laws[0]) < 1e-6, "and it is told from the right one"
    assert shown or name == HONEST or (name == "bonus_from_q" and drafted == 2), "which lies behind the horizon"


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


class Forgets(Wealth):
    """Begins anew at every prompt's block where the last one was lost."""

    def advance(self, prompt: int, counts: np.ndarray) -> None:
        super().advance(prompt, counts)
        self.logs = np.maximum(self.logs, 0)


def false_alarms(wealth: type[Wealth], blocks: int = 60) -> int:
    """Alarms of audits of honest decoders, each of which has laws of its own."""
    found = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        laws = [random.dirichlet(np.full(60, 0.3)) for _ in range(3)]
        others = {
            f"mistake {n}": [0.9 * law + 0.1 * random.dirichlet(np.full(60, 0.3)) for law in laws] for n in range(4)
        }
        asked = Question(laws, others, level=LEVEL, block=32)
        alarms, totals = first_alarms(asked, laws, audits=AUDITS // 20, blocks=blocks, seed=seed, wealth=wealth)
        p_values = [p_value(asked, [total[audit] for total in totals]) for audit in range(AUDITS // 20)]
        found += int(((alarms <= blocks) | (np.array(p_values) <= LEVEL / 2)).sum())
    return found


def sure(alarms: int) -> bool:
    """Whether so many alarms in honest audits are too many to be chance."""
    return bool(scipy.stats.binom.sf(alarms - 1, AUDITS, LEVEL) < 1e-4)


def test_honest_decoders_are_not_accused() -> None:
    assert not sure(false_alarms(Wealth))


@pytest.mark.parametrize("wealth", [Peeking, Best, Forgets])
def test_an_audit_that_cheats_is_noticed(wealth: type[Wealth]) -> None:
    assert sure(false_alarms(wealth))


@pytest.mark.parametrize("name", MISTAKES)
def test_power_is_what_is_said(name: str) -> None:
    """At a number of outputs where about half of the audits see the mistake, and at the number that is planned."""
    _, asked = question()
    said = power(asked, name, blocks=200, wanted=0.99)
    assert said.samples is not None and said.distance > 0.02
    needed = said.samples // asked.block
    alarms, _ = first_alarms(asked, asked.mistakes[name], audits=AUDITS, blocks=200, seed=99)
    assert (alarms <= needed).mean() > 0.97
    half = max(int(np.median(alarms)) - 1, 1)
    told, found = power(asked, name, blocks=half, wanted=0.99).power, (alarms <= half).mean()
    assert abs(told - found) < 4 * (0.25 / 400 + 0.25 / AUDITS) ** 0.5


def test_the_chi_square_test_has_the_power_that_is_said() -> None:
    _, asked = question()
    said = power(asked, "late_top_p", blocks=12, wanted=0.99).chi_square
    counts = np.random.default_rng(3).multinomial(12 * 32, asked.mistakes["late_top_p"][0], size=400)
    found = np.mean([p_value(asked, [row]) <= LEVEL / 2 for row in counts])
    assert 0.02 < said < 0.98 and abs(said - found) < 0.12, "the noncentral law is one of many counts"


def test_a_mistake_without_a_name_is_seen() -> None:
    """Tokens of the second half of the vocabulary come a fifth more often: only the estimate bets on that."""
    _, asked = question()
    law = asked.laws[0] * np.where(np.arange(len(asked.laws[0])) % 2, 1.5, 1.0)
    state = Wealth(asked)
    for block in np.random.default_rng(0).multinomial(32, law / law.sum(), size=400):
        state.advance(0, block[None])
    assert state.alarm[0] and asked.bets[int(state.logs[0].argmax())] == ESTIMATE


def test_rounding_is_no_mistake() -> None:
    """Laws that differ by the tolerance, in the direction that a bet likes best, make no bet gain."""
    law = np.array([0.5, 0.3, 0.2, 0.0])
    moved = law + np.array([-1e-3, 0.0, 0.0, 1e-3])
    for tolerance, gains in ((1e-3, False), (0.0, True)):
        asked = Question([law], {"a mistake": [np.array([0.4, 0.3, 0.2, 0.1])]}, tolerance=tolerance)
        factor = np.exp(asked.ratio(0, asked.mistakes["a mistake"][0]))
        assert (factor @ moved > 1 + 1e-12) == gains
