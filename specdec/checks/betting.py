"""Does a stream of outputs follow a known law? Testing by betting, valid whenever it is stopped, and its power.

A bet's stake is multiplied at each output by the ratio of another law's probability to that of the right one. Under the
right law no bet gains on average, so the wealth ever reaches 1 / level with a probability of at most level (Ville's
inequality; Shafer 2021, "Testing by betting"; Waudby-Smith & Ramdas 2024): it is an e-value, at whatever output one
looks. The stake is spread over bets on every mistake with a name, and on what the outputs so far look like (a Dirichlet
estimate around the law). The e-value is the mean; there is nothing to correct for.

A fixed-sample chi-square test of every prompt stands beside it, Bonferroni over prompts; each has half of the level.
All is done for many audits at once (the leading axis), so the same lines judge an audit and simulate thousands.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Num

from specdec.checks.goodness import fits

ESTIMATE, MOST = "what the outputs look like", 4.0
"""The bet without a name, and its largest ratio for one output."""
MOSTS = (MOST, 16.0, 64.0, 256.0, 1024.0)
"""The largest ratios that a bet on a mistake is tried with: what should never come out may be worth a high stake."""
ALIKE = 10.0  # mistakes are named together under which outputs are equally probable to within this factor
FAITH = 1.0  # outputs per cell that the law counts for in the estimate


@dataclass(frozen=True)
class Question:
    """The laws that an audit compares at every prompt, and how sure it has to be.

    Attributes:
        laws: By prompt: the law of the cells that should hold.
        mistakes: By name, then by prompt: the law of a mistake.
        level: Largest probability of a false alarm.
        tolerance: Total variation between an honest engine's law and ``laws``, from rounding; no alarm comes of it.
        block: Outputs of one prompt between two looks.
        shares: By prompt: its part of all blocks; empty gives all the same.
    """

    laws: Sequence[Float[np.ndarray, " _"]]
    mistakes: Mapping[str, Sequence[Float[np.ndarray, " _"]]]
    level: float = 1e-3
    tolerance: float = 1e-5
    block: int = 64
    shares: Sequence[float] = ()

    def order(self, blocks: int) -> Int[np.ndarray, " block"]:
        """The prompt of every block: always the one that lacks most of its share."""
        shares = np.array(self.shares or [1.0] * len(self.laws))
        shares, given, order = shares / shares.sum(), np.zeros(len(shares)), np.zeros(blocks, dtype=np.int64)
        for block in range(blocks):
            order[block] = np.argmax(shares * (block + 1) - given)
            given[order[block]] += 1
        return order

    def named(self, prompt: int, name: str) -> Float[np.ndarray, " cell"]:
        """The logarithm of a mistake's bet in every cell: of all that are tried, the one that it makes grow fastest."""
        law = self.mistakes[name][prompt]
        return max((self.ratio(prompt, law, most) for most in MOSTS), key=lambda log: float(law @ log))

    def growth(self, prompt: int, name: str) -> float:
        return float(self.mistakes[name][prompt] @ self.named(prompt, name))

    def ratio(
        self, prompt: int, other: Float[np.ndarray, "*audit cell"], most: float = MOST
    ) -> Float[np.ndarray, "*audit cell"]:
        """The logarithm of a bet's factor in every cell, such that it gains nothing under any law within tolerance."""
        law = self.laws[prompt]
        factor = np.minimum(np.divide(other, law, out=np.full(other.shape, most), where=law > 0), most)
        # A bet that may lose all would lose all to rounding.
        factor = 0.02 + 0.98 * factor
        fair = (factor * law).sum(-1, keepdims=True)
        spread = factor.max(-1, keepdims=True) - factor.min(-1, keepdims=True)
        return np.log(factor / np.maximum(fair + self.tolerance * spread, 1e-300))


class Wealth:
    """The wealth of every bet, in audits that go on at the same time; ``seen`` counts outputs by prompt and cell."""

    def __init__(self, question: Question, audits: int = 1):
        self.question, self.bets = question, [*question.mistakes, ESTIMATE]
        self.logs = np.zeros((audits, len(self.bets)))
        self.seen: list[Float[np.ndarray, "audit _"]] = [np.zeros((audits, len(law))) for law in question.laws]
        self._named = [
            np.array([question.named(prompt, name) for name in question.mistakes]).reshape(-1, len(law))
            for prompt, law in enumerate(question.laws)
        ]

    @property
    def log_e(self) -> Float[np.ndarray, " audit"]:
        """The logarithm of the e-value, which is the mean over the bets."""
        highest = self.logs.max(1, keepdims=True)
        return highest[:, 0] + np.log(np.exp(self.logs - highest).mean(1))

    @property
    def alarm(self) -> np.ndarray:
        return self.log_e >= np.log(2.0 / self.question.level)

    def estimate(self, prompt: int) -> Float[np.ndarray, "audit cell"]:
        seen, law = self.seen[prompt], self.question.laws[prompt]
        return (seen + FAITH * len(law) * law) / (seen.sum(1, keepdims=True) + FAITH * len(law))

    @property
    def likeliest(self) -> list[str]:
        """The mistakes under which the first audit's outputs are most probable, the best first.

        Wealth does not say so, as what should never come out has one largest ratio for all.
        """
        logs = dict.fromkeys(self.question.mistakes, 0.0)
        for name, laws in self.question.mistakes.items():
            for seen, law, honest in zip(self.seen, laws, self.question.laws, strict=True):
                logs[name] += float(seen[0] @ np.log(np.maximum(0.02 * honest + 0.98 * law, 1e-6)))
        order = sorted(logs, key=lambda name: -logs[name])
        return [name for name in order if logs[name] > logs[order[0]] - np.log(ALIKE)]

    def advance(self, prompt: int, counts: Num[np.ndarray, "audit cell"]) -> None:
        """Settle the bets on a block of outputs of one prompt, given as counts by cell."""
        named = counts @ self._named[prompt].T
        estimated = (counts * self.question.ratio(prompt, self.estimate(prompt))).sum(1, keepdims=True)
        self.seen[prompt] = self.seen[prompt] + counts
        self.logs += np.concatenate([named, estimated], 1)


def p_value(question: Question, seen: Sequence[Num[np.ndarray, " _"]]) -> float:
    """The p-value of chi-square tests of all prompts, Bonferroni over them."""
    # Rounding may make some of the impossible.
    laws = [np.maximum(law, question.tolerance / len(law)) for law in question.laws]
    return min(1.0, len(laws) * min(fits(*each) for each in zip(seen, laws, strict=True)))


@dataclass(frozen=True)
class Power:
    """How surely a mistake is seen.

    Attributes:
        distance: Total variation that it makes at its most telling prompt.
        samples: Outputs, over all prompts, after which the e-value has seen it with the wanted power; None if the most
            that are allowed do not do.
        power: The probability that the e-value sees it within the most that are allowed, by simulated audits.
    """

    mistake: str
    distance: float
    samples: int | None
    power: float


def first_alarms(
    question: Question,
    laws: Sequence[Float[np.ndarray, " _"]],
    *,
    audits: int,
    blocks: int,
    seed: int,
    wealth: Callable[[Question, int], Wealth] = Wealth,
    rarely: bool = False,
) -> tuple[Int[np.ndarray, " audit"], list[Int[np.ndarray, "audit _"]]]:
    """Returns the block at whose end each of many simulated audits sounds the alarm (``blocks`` + 1: never).

    Also the outputs by prompt, for fixed-sample tests; all blocks are played unless every audit has sounded it.
    ``rarely`` looks less often the more blocks there have been, which is faster, and finds nothing earlier.
    """
    generator = np.random.default_rng(seed)
    state, found = wealth(question, audits), np.full(audits, blocks + 1)
    total = [np.zeros((audits, len(law)), dtype=np.int64) for law in laws]
    order, block = question.order(blocks), 0
    while block < blocks and not (found <= blocks).all():
        piece = order[block : block + (1 + block // 64 if rarely else 1)]
        block += len(piece)
        for prompt, count in zip(*np.unique(piece, return_counts=True), strict=True):
            law = laws[prompt]
            counts = generator.multinomial(int(count) * question.block, law / law.sum(), size=audits)
            state.advance(int(prompt), counts)
            total[prompt] += counts
        found = np.where(state.alarm & (found > blocks), block, found)
    return found, total


def power(question: Question, name: str, *, blocks: int, wanted: float, audits: int = 400, seed: int = 0) -> Power:
    """Returns how surely a mistake is seen within so many blocks, by simulated audits."""
    laws = question.mistakes[name]
    distances = [0.5 * float(np.abs(law - other).sum()) for law, other in zip(question.laws, laws, strict=True)]
    alarms, _ = first_alarms(question, laws, audits=audits, blocks=blocks, seed=seed, rarely=True)
    needed = int(np.sort(alarms)[int(np.ceil(wanted * audits)) - 1])
    return Power(
        mistake=name,
        distance=max(distances),
        samples=None if needed > blocks else needed * question.block,
        power=float((alarms <= blocks).mean()),
    )
