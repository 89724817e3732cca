"""Does a stream of outputs follow a known law? Testing by betting, valid whenever it is stopped, and its power.

Somebody who believes in another law bets on it against the one that should hold: a stake is multiplied by the ratio of
both probabilities at each output. Where the right law holds, no bet gains on average, so the wealth ever reaches
1 / level with a probability of at most level (Ville's inequality; Shafer 2021, "Testing by betting"; Waudby-Smith &
Ramdas 2024). Wealth is hence an e-value, at whatever output one looks or stops. Here the stake is spread over several
bets: on every mistake with a name, and on what the outputs so far look like (a Dirichlet estimate around the law, made
before the outputs that it bets on are seen). The e-value is the sum; there is nothing to correct for.

A fixed-sample chi-square test of every prompt stands beside it, Bonferroni over prompts. Each of both tests has half of
the level.

All is done for many audits at once (the leading axis), so the same lines judge an audit and simulate thousands.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy.stats
from jaxtyping import Float, Int, Num

from specdec.checks.goodness import RARE, fits

ESTIMATE = "what the outputs look like"
"""The bet without a name."""
MOST = 4.0
"""The largest ratio of a bet, for one output."""
FAITH = 1.0
"""Outputs per cell that the law counts for in the estimate."""


@dataclass(frozen=True)
class Question:
    """The laws that an audit compares at every prompt, and how sure it has to be.

    Attributes:
        laws: By prompt: the law of the cells that should hold.
        mistakes: By name, then by prompt: the law of a mistake.
        level: Largest probability of a false alarm.
        tolerance: Total variation between an honest engine's law and ``laws``, from rounding; no alarm comes of it.
        block: Outputs of every prompt between two looks.
    """

    laws: Sequence[Float[np.ndarray, " cell"]]
    mistakes: Mapping[str, Sequence[Float[np.ndarray, " cell"]]]
    level: float = 1e-3
    tolerance: float = 1e-5
    block: int = 64

    @property
    def bets(self) -> list[str]:
        return [*self.mistakes, ESTIMATE]

    def ratio(self, prompt: int, other: Float[np.ndarray, "*audit cell"]) -> Float[np.ndarray, "*audit cell"]:
        """The logarithm of a bet's factor in every cell, such that it gains nothing under any law within tolerance."""
        law = self.laws[prompt]
        factor = np.minimum(np.divide(other, law, out=np.full(other.shape, MOST), where=law > 0), MOST)
        # A bet that may lose all would lose all to rounding.
        factor = 0.02 + 0.98 * factor
        fair = (factor * law).sum(-1, keepdims=True)
        spread = factor.max(-1, keepdims=True) - factor.min(-1, keepdims=True)
        return np.log(factor / np.maximum(fair + self.tolerance * spread, 1e-300))


@dataclass
class Wealth:
    """The wealth of every bet, in audits that go on at the same time.

    Attributes:
        logs: Its logarithm.
        seen: By prompt: the outputs so far, by cell.
    """

    question: Question
    audits: int = 1
    logs: Float[np.ndarray, "audit bet"] = field(init=False)
    seen: list[Float[np.ndarray, "audit cell"]] = field(init=False)

    def __post_init__(self) -> None:
        self.logs = np.zeros((self.audits, len(self.question.bets)))
        self.seen = [np.zeros((self.audits, len(law))) for law in self.question.laws]
        self._named = [
            np.stack([self.question.ratio(prompt, laws[prompt]) for laws in self.question.mistakes.values()])
            if self.question.mistakes
            else np.zeros((0, len(law)))
            for prompt, law in enumerate(self.question.laws)
        ]

    def estimate(self, prompt: int) -> Float[np.ndarray, "audit cell"]:
        """The law that the outputs so far look like."""
        seen, law = self.seen[prompt], self.question.laws[prompt]
        return (seen + FAITH * len(law) * law) / (seen.sum(1, keepdims=True) + FAITH * len(law))

    def advance(self, prompt: int, counts: Num[np.ndarray, "audit cell"]) -> None:
        """Settle the bets on a block of outputs of one prompt, given as counts by cell."""
        named = counts @ self._named[prompt].T
        estimated = (counts * self.question.ratio(prompt, self.estimate(prompt))).sum(1, keepdims=True)
        self.seen[prompt] = self.seen[prompt] + counts
        self.logs += np.concatenate([named, estimated], 1)

    @property
    def log_e(self) -> Float[np.ndarray, " audit"]:
        """The logarithm of the e-value."""
        highest = self.logs.max(1, keepdims=True)
        return highest[:, 0] + np.log(np.exp(self.logs - highest).mean(1))

    @property
    def alarm(self) -> np.ndarray:
        """Whether the e-value has reached its bound."""
        return self.log_e >= np.log(2.0 / self.question.level)


def p_value(question: Question, seen: Sequence[Num[np.ndarray, " cell"]]) -> float:
    """Returns the p-value of chi-square tests of all prompts, Bonferroni over them."""
    found = [fits(counts, _possible(question, prompt)) for prompt, counts in enumerate(seen)]
    return min(1.0, len(found) * min(found))


def _possible(question: Question, prompt: int) -> Float[np.ndarray, " cell"]:
    """The law with a little probability for the impossible, of which rounding may make some."""
    law = np.maximum(question.laws[prompt], question.tolerance / len(question.laws[prompt]))
    return law / law.sum()


@dataclass(frozen=True)
class Power:
    """How surely a mistake is seen.

    Attributes:
        mistake: Its name.
        distance: Total variation that it makes at its most telling prompt.
        samples: Outputs, over all prompts, after which the e-value has seen it with the wanted power; None if the
            most that are allowed do not do.
        power: The probability that the e-value sees it within the most that are allowed, by simulated audits.
        chi_square: The same of the chi-square test.
    """

    mistake: str
    distance: float
    samples: int | None
    power: float
    chi_square: float


def first_alarms(
    question: Question,
    laws: Sequence[Float[np.ndarray, " cell"]],
    *,
    audits: int,
    blocks: int,
    seed: int,
    wealth: Callable[[Question, int], Wealth] = Wealth,
) -> tuple[Int[np.ndarray, " audit"], list[Int[np.ndarray, "audit cell"]]]:
    """Returns the block at whose end each of many simulated audits sounds the alarm (``blocks`` + 1: never).

    Also the outputs by prompt, for fixed-sample tests; all blocks are played unless every audit has sounded it.
    """
    generator = np.random.default_rng(seed)
    state, found = wealth(question, audits), np.full(audits, blocks + 1)
    total = [np.zeros((audits, len(law)), dtype=np.int64) for law in laws]
    for block in range(1, blocks + 1):
        for prompt, law in enumerate(laws):
            counts = generator.multinomial(question.block, law / law.sum(), size=audits)
            state.advance(prompt, counts)
            total[prompt] += counts
        found = np.where(state.alarm & (found > blocks), block, found)
        if (found <= blocks).all():
            break
    return found, total


def power(question: Question, name: str, *, blocks: int, wanted: float, audits: int = 400, seed: int = 0) -> Power:
    """Returns how surely a mistake is seen within so many blocks of every prompt, by simulated audits."""
    laws = question.mistakes[name]
    distances = [0.5 * float(np.abs(law - other).sum()) for law, other in zip(question.laws, laws, strict=True)]
    alarms, _ = first_alarms(question, laws, audits=audits, blocks=blocks, seed=seed)
    needed = int(np.sort(alarms)[int(np.ceil(wanted * audits)) - 1])
    missed = 1.0
    for prompt, other in enumerate(laws):
        missed *= 1 - _chi_square_power(question, prompt, other, blocks * question.block)
    return Power(
        mistake=name,
        distance=max(distances),
        samples=None if needed > blocks else needed * question.block * len(laws),
        power=float((alarms <= blocks).mean()),
        chi_square=1 - missed,
    )


def _chi_square_power(question: Question, prompt: int, other: np.ndarray, samples: int) -> float:
    law, order = _possible(question, prompt), np.argsort(-_possible(question, prompt), kind="stable")
    law, other = law[order], other[order]
    cells = int((samples * law >= RARE).sum())
    cells += bool(samples * law[cells:].sum() >= RARE)
    if cells < 2:
        return 0.0
    law, other = (np.add.reduceat(each, np.arange(cells)) for each in (law, other))
    limit = scipy.stats.chi2.isf(question.level / 2 / len(question.laws), cells - 1)
    shift = samples * float(((other - law) ** 2 / law).sum())
    return float(scipy.stats.ncx2.sf(limit, cells - 1, shift)) if shift > 0 else 0.0
