"""Tokens as numbers that are uniform if they were drawn from the law that they should have, and tests of that.

A token becomes the probability of all tokens that are more probable than it, plus a random share of its own
(Rosenblatt 1952, randomized because tokens are discrete). Where every token follows its law, these numbers are uniform
on [0, 1) and independent, whatever the contexts were.
"""

from collections.abc import Sequence

import numpy as np
import scipy.stats
import torch
from jaxtyping import Float
from torch import Tensor

LEVEL = 1e-5
"""A drafter that does nothing wrong fails one of the statistical checks with this probability."""
LOOKS = 3
"""The number of times that everything is tested while draws come in, so that a proof ends the check."""
BINS, CELLS = 20, 5
FEWEST = 400
"""Draws below which nothing is tested: 20 per bin."""


def number(weights: Float[Tensor, " vocab"], token: int, generator: torch.Generator) -> float:
    """Returns a number that is uniform if the token was drawn with these weights."""
    own = weights[token]
    before = (weights > own) | (weights == own) & (torch.arange(len(weights), device=weights.device) < token)
    share = float(torch.rand(1, generator=generator, dtype=torch.float64))
    return float((weights.where(before, 0.0).sum() + share * own) / weights.sum())


def uniform(numbers: Sequence[float]) -> float:
    """Returns the p-value of a chi-square test of numbers being uniform on [0, 1)."""
    counts = np.histogram(numbers, bins=BINS, range=(0, 1))[0]
    return float(scipy.stats.chisquare(counts).pvalue)


def independent(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the p-value of a chi-square test of pairs of numbers being independent."""
    table = np.histogram2d(first, second, bins=CELLS, range=((0, 1), (0, 1)))[0]
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    return float(scipy.stats.chi2_contingency(table)[1])  # type: ignore[arg-type]


def tokens_fit(counts: np.ndarray, law: np.ndarray) -> float:
    """Returns the chi-square p-value of counts of tokens; tokens expected fewer than 8 times are taken together."""
    expected = law * counts.sum()
    common = expected >= 8
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    if wanted[-1] < 8:  # too little: with the least of the others
        if len(wanted) < 3:
            return 1.0
        smallest = int(np.argmin(wanted[:-1]))
        rest_observed, rest_wanted = observed.pop(), wanted.pop()
        observed[smallest] += rest_observed
        wanted[smallest] += rest_wanted
    return float(scipy.stats.chisquare(observed, wanted, sum_check=False).pvalue)
