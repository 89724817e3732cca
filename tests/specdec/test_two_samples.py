"""Audits against a second subject: two of one law are not told apart, others are, as surely as was said."""

import numpy as np
import pytest
import scipy.stats

from specdec.checks import two_samples
from specdec.checks.two_samples import TwoSamples, first_alarms, homogeneous, shifted, smallest_seen

AUDITS, LEVEL = 1_000, 1e-3


class Peeking(TwoSamples):
    """Estimates from the very pairs that it then bets on."""

    def advance(self, prompt: int, ours: np.ndarray, theirs: np.ndarray) -> None:
        before = self.logs
        super().advance(prompt, ours, theirs)
        self.logs = before
        super().advance(prompt, ours, theirs)


def accused(kind: type[TwoSamples]) -> bool:
    """Whether more honest audits end in an alarm than chance explains."""
    found = 0
    for seed in range(10):
        law = np.random.default_rng(seed).dirichlet(np.full(50, 0.3))
        settings = {"prompts": 3, "horizon": 2, "level": LEVEL, "block": 32, "blocks": 60, "kind": kind}
        alarms, p_values = first_alarms((law, law), audits=AUDITS // 10, seed=seed, **settings)
        found += int(((alarms <= 60) | (p_values <= LEVEL / 2)).sum())
    return bool(scipy.stats.binom.sf(found - 1, AUDITS, LEVEL) < 1e-4)


def test_two_of_one_law_are_not_told_apart() -> None:
    assert not accused(TwoSamples)


def test_an_audit_that_cheats_is_noticed() -> None:
    assert accused(Peeking)


def test_a_bet_on_one_of_a_pair_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimated ratio of two equal laws is above 1 on average, unlike a pair's."""

    def gain(counts: np.ndarray, prior: float) -> np.ndarray:
        ratio = (counts[:, 0] + prior) / (counts[:, 1] + prior)
        return np.log(ratio[:, 0]).sum(1)

    monkeypatch.setattr(two_samples, "_gain", gain)
    assert accused(TwoSamples)


def test_power_is_what_is_said() -> None:
    settings = {"prompts": 2, "horizon": 2, "level": LEVEL, "block": 32}
    powers, blocks = smallest_seen(0.2, blocks=400, wanted=0.99, **settings)
    law = shifted(0.0)
    assert 0.5 * np.abs(shifted(0.2) - law).sum() == pytest.approx(0.2) and blocks < 400
    said = {each.distance: each for each in powers}
    assert said[0.2].power >= 0.99 and said[0.2].samples == 2 * 32 * blocks and said[0.1].samples is None
    assert said[0.4].power == said[0.4].chi_square == 1, "also where the alarm comes long before the last block"
    for shift in (0.2, 0.1):
        alarms, p_values = first_alarms((shifted(shift), law), audits=400, blocks=blocks, seed=9, **settings)
        assert abs((alarms <= blocks).mean() - said[shift].power) < 4 * (0.25 / 100 + 0.25 / 400) ** 0.5
        assert abs((p_values <= LEVEL / 2).mean() - said[shift].chi_square) < 4 * (0.25 / 100 + 0.25 / 400) ** 0.5


def test_the_p_values_of_two_of_one_law_are_uniform() -> None:
    """Outputs of two tokens, some of which are so rare that only their first token counts."""
    random = np.random.default_rng(1)
    law = random.dirichlet(np.full(30, 0.5))
    lots = random.choice(30, size=(300, 2, 200, 2), p=law)
    found = [homogeneous(*each.tolist()) for each in lots]
    assert scipy.stats.kstest(found, "uniform").pvalue > 1e-3
    assert homogeneous([], []) == 1, "an audit may have more prompts than blocks"
    assert homogeneous(lots[0, 0].tolist(), [[first, first] for first, _ in lots[0, 1].tolist()]) < 1e-6
