"""Do two streams of outputs follow one law, whatever it is? Testing by betting, valid whenever it is stopped.

If both follow one law, pairs (x, y) and (y, x) of an output of each are equally probable, so the bet 2 r(x) / (r(x) +
r(y)) gains nothing on average, for any r chosen before the pair was seen (Pandeva et al. 2022, "E-valuating classifier
two-sample tests"; Shekhar & Ramdas 2023). Here r(x) estimates, from earlier blocks, how many times more often x comes
from the one: by an output's first tokens, and by how often these had come before, which shows where probability moves
between likely and unlikely outputs though no output comes twice. A chi-square test of homogeneity stands beside it,
Bonferroni over prompts; each has half of the level.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from specdec.checks.betting import Bets, Power
from specdec.checks.goodness import RARE, contingency

PRIORS = (1.0, 8.0, 64.0)
"""Outputs of each side that an estimate begins with: few learn fast, many lose less where laws differ little."""
OFTEN = 48
"""Classes of outputs by how often they had come before: each ends at twice the count of the one below."""
TOKENS = 64
"""Tokens of the law that power is tried with, whose probabilities are as 1 / rank."""


class TwoSamples(Bets):
    """Bets on which of two subjects an output comes from; ``horizon`` tokens of it are compared."""

    def __init__(self, prompts: int, horizon: int, level: float = 1e-3, audits: int = 1):
        self.horizon, self.level = horizon, level
        tokens = [f"first {length} tokens" if length > 1 else "first token" for length in range(1, horizon + 1)]
        self.bets = [
            f"{bet}, prior {prior:g}"
            for each in tokens
            for bet in (each, f"frequency of the {each}")
            for prior in PRIORS
        ]
        self.logs = np.zeros((audits, len(self.bets)))
        self._came = [[np.zeros((audits, 2, 1))] * horizon for _ in range(prompts)]
        self._often = np.zeros((horizon, audits, 2, OFTEN))

    def advance(
        self, prompt: int, ours: Int[np.ndarray, "audit length output"], theirs: Int[np.ndarray, "audit length output"]
    ) -> None:
        """Settle the bets on a block of pairs at one prompt: for every length, numbers of the outputs' first tokens."""
        gains: list[np.ndarray] = []
        for length in range(self.horizon):
            labels = np.stack([ours[:, length], theirs[:, length]], 1)
            came = self._came[prompt][length]
            more = int(labels.max()) + 1 - came.shape[2]
            came = np.pad(came, [(0, 0), (0, 0), (0, max(more, 0))])
            bins = np.log2(_at(came, labels).sum(1) + 1).astype(np.int64)
            for table, keys in ((came, labels), (self._often[length], bins)):
                gains += [_gain(_at(table, keys), prior) for prior in PRIORS]
            self._came[prompt][length] = _counted(came, labels)
            self._often[length] = _counted(self._often[length], bins)
        self.logs += np.stack(gains, 1)


def _at(
    table: Float[np.ndarray, "audit side label"], labels: Int[np.ndarray, "audit drawn output"]
) -> Float[np.ndarray, "audit side drawn output"]:
    """The counts of both sides at the labels that each side has drawn."""
    flat = labels.reshape(len(labels), 1, -1)
    return np.take_along_axis(table, flat, 2).reshape(len(table), 2, *labels.shape[1:])


def _gain(counts: Float[np.ndarray, "audit side drawn output"], prior: float) -> Float[np.ndarray, " audit"]:
    ratio = (counts[:, 0] + prior) / (counts[:, 1] + prior)
    return np.log(2 * ratio[:, 0] / ratio.sum(1)).sum(1)


def _counted(
    table: Float[np.ndarray, "audit side label"], labels: Int[np.ndarray, "audit side output"]
) -> Float[np.ndarray, "audit side label"]:
    audits, sides = np.arange(labels.shape[0])[:, None, None], np.arange(labels.shape[1])[None, :, None]
    table = table.copy()
    np.add.at(table, (audits, sides, labels), 1.0)
    return table


def homogeneous(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Returns the p-value of a chi-square test of two lots of outputs having one law.

    An output counts as its first tokens: as many as came often enough in both lots together.
    """
    counts: dict[tuple[int, ...], np.ndarray] = {}
    for side, lot in enumerate((ours, theirs)):
        for output in lot:
            counts.setdefault(tuple(output), np.zeros(2))[side] += 1
    for length in range(max(map(len, counts), default=0), 0, -1):
        for path in [each for each in counts if len(each) == length and counts[each].sum() < 2 * RARE]:
            counts[path[:-1]] = counts.get(path[:-1], np.zeros(2)) + counts.pop(path)
    return contingency(np.array(list(counts.values())).reshape(-1, 2))


def shifted(shift: float) -> Float[np.ndarray, " token"]:
    """A law whose probabilities are as 1 / rank, with so much of them moved from the likelier half to the other."""
    law = 1.0 / np.arange(1, TOKENS + 1)
    law /= law.sum()
    likely = law.cumsum() <= 0.5
    return law * np.where(likely, 1 - shift / law[likely].sum(), 1 + shift / law[~likely].sum())


def smallest_seen(
    shift: float, *, blocks: int, wanted: float, audits: int = 100, seed: int = 0, **settings: Any
) -> tuple[list[Power], int]:
    """Returns how surely a subject is seen that moves some probability of every prompt's first token, by its amount.

    By simulated audits with ``settings`` of ``first_alarms``. Also the number of blocks after which a move of ``shift``
    is seen; at most ``blocks``.
    """

    def alarms(shift: float, blocks: int, *, whole: bool = True) -> tuple[np.ndarray, np.ndarray]:
        laws = shifted(shift), shifted(0.0)
        return first_alarms(laws, blocks=blocks, audits=audits, seed=seed, whole=whole, **settings)

    first, _ = alarms(shift, blocks, whole=False)
    blocks = min(int(np.sort(first)[int(np.ceil(wanted * audits)) - 1]), blocks)
    found = []
    for each in (2 * shift, shift, shift / 2):
        seen, p_values = alarms(each, blocks)
        needed = int(np.sort(seen)[int(np.ceil(wanted * audits)) - 1])
        found.append(
            Power(
                mistake=f"{each:g} moved",
                distance=each,
                samples=None if needed > blocks else 2 * needed * settings["block"],
                power=float((seen <= blocks).mean()),
                chi_square=float((p_values <= settings["level"] / 2).mean()),
            )
        )
    return found, blocks


def first_alarms(
    laws: tuple[Float[np.ndarray, " token"], Float[np.ndarray, " token"]],
    *,
    prompts: int,
    horizon: int,
    level: float,
    block: int,
    blocks: int,
    audits: int,
    seed: int,
    kind: type[TwoSamples] = TwoSamples,
    whole: bool = True,
) -> tuple[Int[np.ndarray, " audit"], Float[np.ndarray, " audit"]]:
    """Returns the block at whose end each of many simulated audits sounds the alarm, and the chi-square p-values.

    The first tokens follow the laws of both sides, all later ones the second. Unless ``whole``, the blocks after the
    last alarm of all are left out, and p-values are of fewer.
    """
    generator = np.random.default_rng(seed)
    state, found, done = kind(prompts, horizon, level, audits), np.full(audits, blocks + 1), 0
    totals = np.zeros((prompts, audits, 2, len(laws[0])))
    while done < blocks and (whole or not (found <= blocks).all()):
        looks = min(prompts * (1 + done // (64 * prompts)), blocks - done)
        for prompt in range(min(prompts, looks)):
            pairs = block * len(range(prompt, looks, prompts))
            sides = []
            for side, law in enumerate(laws):
                tokens = [generator.choice(len(law), size=(audits, pairs), p=law)]
                for _ in range(horizon - 1):
                    later = generator.choice(len(law), size=(audits, pairs), p=laws[1])
                    tokens.append(np.minimum(tokens[-1], 9) * len(law) + later)
                totals[prompt, :, side] += _counted(np.zeros((audits, 1, len(law))), tokens[0][:, None])[:, 0]
                sides.append(np.stack(tokens, 1))
            state.advance(prompt, *sides)
        done += looks
        found = np.where(state.alarm & (found > blocks), done, found)
    return found, np.array([_worst(totals[:, audit]) for audit in range(audits)])


def _worst(counts: Float[np.ndarray, "prompt side token"]) -> float:
    found = []
    for table in counts:
        rare = table.sum(0) < 2 * RARE
        found.append(contingency(np.vstack([table[:, ~rare].T, table[:, rare].sum(1)])))
    return min(1.0, len(counts) * min(found))
