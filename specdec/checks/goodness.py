"""Do tokens follow the law that they should have? Tests of goodness of fit and of independence, as p-values.

A token becomes the probability of all tokens that are more probable than it, plus a random share of its own
(Rosenblatt 1952, randomized because tokens are discrete). Where every token follows its law, these numbers are uniform
on [0, 1) and independent, whatever the contexts were.
"""

from collections.abc import Sequence

import numpy as np
import scipy.stats
import torch
from jaxtyping import Float, Int
from torch import Tensor

BINS, CELLS = 20, 5
RARE = 8.0  # outcomes with a smaller expected count are merged into one cell of a chi-square test


def numbers(
    weights: Float[Tensor, "row vocab"], tokens: Int[Tensor, " row"], generator: torch.Generator
) -> Float[Tensor, " row"]:
    """Return numbers that are uniform if every token was drawn with its row's weights."""
    weights, own = weights.double(), weights.double().gather(1, tokens[:, None])
    earlier = torch.arange(weights.shape[1], device=weights.device) < tokens[:, None]
    before = weights.where((weights > own) | (weights == own) & earlier, 0.0).sum(1)
    share = torch.rand(len(tokens), generator=generator, dtype=torch.float64).to(weights.device)
    return (before + share * own[:, 0]) / weights.sum(1)


def uniform(values: Sequence[float] | np.ndarray) -> float:
    """Return the p-value of a chi-square test of numbers being uniform on [0, 1)."""
    return float(scipy.stats.chisquare(np.histogram(values, bins=BINS, range=(0, 1))[0]).pvalue)


def independent(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float:
    """Return the p-value of a chi-square test of pairs of numbers being independent."""
    return contingency(np.histogram2d(first, second, bins=CELLS, range=((0, 1), (0, 1)))[0])


def contingency(table: Float[np.ndarray, "row column"]) -> float:
    """Return the p-value of a chi-square test of rows and columns being independent; 1 for fewer than two of either."""
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    return float(scipy.stats.chi2_contingency(table, correction=False)[1]) if min(table.shape) > 1 else 1.0  # type: ignore[arg-type]


def fits(counts: np.ndarray, law: np.ndarray) -> float:
    """Return the p-value of a chi-square test of counts following a law; 0 if something impossible was counted."""
    if counts[law == 0].any():
        return 0.0
    expected = law * (counts.sum() / law.sum())
    order = np.argsort(-expected, kind="stable")
    common = int((expected >= RARE).sum())
    # Where cells begin, by falling expected counts: the last one takes what is rare.
    starts = np.arange(common + bool(expected[order][common:].sum() >= RARE))
    if len(starts) < 2:
        return 1.0
    observed, expected = (np.add.reduceat(each[order], starts) for each in (counts, expected))
    return float(scipy.stats.chisquare(observed, expected).pvalue)
