"""How likely a drafted token is to be accepted, by the drafter's margin: a logistic curve per position.

The margin before a token is the difference of the drafter's two largest log-probabilities. It is known before the token
is drawn, so it may decide whether there is a draft of it. vLLM estimates acceptance so from the logits of any drafter
(pull request 52228, 2026), without training.
"""

import numpy as np
from jaxtyping import Float, Int

from specdec.arguments import number

BINS = 32
"""Bins of the margin: a quarter of a nat each; the last one holds all larger margins."""
_WIDTH = 0.25
_EVERY = 8
"""Rounds from one fit to the next."""
_PRIOR = np.array([-1.0, 1.0])
"""The curve before anything was seen, intercept and slope: one half at a margin of one nat."""
_STRENGTH = 2.0
_LEVELS = 100

Margins = Float[np.ndarray, "batch depth"]


class MarginEstimator:
    """Estimates the probability that a token is accepted where those before it were, as σ(a + b · margin).

    Every position has its own curve. What happened is counted in bins of the margin, older rounds less and less, and
    the curves are fitted to the counts every few rounds. Before a count, the estimate of its token is judged: ``auc``.

    Args:
        depth: Positions of a draft.
        memory: The number of rounds after which a round counts for 1/e.
    """

    def __init__(self, depth: int, *, memory: float = 2000.0):
        self.depth = depth
        if not number("memory", memory, "give a number of rounds, such as 2000") > 0:
            raise ValueError(f"memory={memory} is a number of rounds: give a positive one")
        self._keep = float(np.exp(-1 / memory))
        self._counts = np.zeros((2, depth, BINS))  # of rejected and of accepted tokens
        self._judged = np.zeros((2, _LEVELS))  # the same by estimate, all positions together
        self.curves = np.tile(_PRIOR, (depth, 1))
        self._played = 0

    @property
    def average(self) -> Float[np.ndarray, " depth"]:
        """The share of tokens that were accepted of those whose predecessors were, by position."""
        rejected, accepted = self._counts.sum(-1)
        return (accepted + 1) / (accepted + rejected + 2)

    def probabilities(self, margins: Margins) -> Margins:
        """Return the probability of every token, given that those before it are accepted."""
        intercept, slope = self.curves[: margins.shape[1]].T
        return 1 / (1 + np.exp(-(intercept + slope * np.minimum(margins, BINS * _WIDTH))))

    def note(self, margins: Margins, proposed: Int[np.ndarray, " batch"], accepted: Int[np.ndarray, " batch"]) -> None:
        """Count a round: ``accepted`` of ``proposed`` tokens per row, whose margins these are."""
        position = np.arange(margins.shape[1])
        tried = (position < proposed[:, None]) & (position <= accepted[:, None])
        right = (position < accepted[:, None])[tried].astype(np.int64)
        estimate = (self.probabilities(margins)[tried] * _LEVELS).astype(np.int64).clip(max=_LEVELS - 1)
        self._judged += np.bincount(right * _LEVELS + estimate, minlength=2 * _LEVELS).reshape(2, _LEVELS)
        place = (margins[tried] / _WIDTH).clip(max=BINS - 1).astype(np.int64)
        cell = (right * self.depth + np.broadcast_to(position, tried.shape)[tried]) * BINS + place
        self._counts *= self._keep
        self._counts += np.bincount(cell, minlength=self._counts.size).reshape(self._counts.shape)
        self._played += 1
        if self._played % _EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        """Take two Newton steps of all curves, from where they are."""
        x = np.stack([np.ones(BINS), (np.arange(BINS) + 0.5) * _WIDTH])
        rejected, accepted = self._counts
        seen = rejected + accepted
        for _ in range(2):
            p = 1 / (1 + np.exp(-self.curves @ x))
            slope = (accepted - seen * p) @ x.T - _STRENGTH * (self.curves - _PRIOR)
            bend = np.einsum("db,ib,jb->dij", seen * p * (1 - p), x, x) + _STRENGTH * np.eye(2)
            step = np.linalg.solve(bend, slope[:, :, None])[:, :, 0]
            self.curves = self.curves + step.clip(-1.0, 1.0)

    def auc(self) -> float | None:
        """Return how often an accepted token had a larger estimate than a rejected one, ties half; None if unknown."""
        rejected, accepted = self._judged
        pairs = rejected.sum() * accepted.sum()
        below = rejected.cumsum() - rejected / 2
        return float((accepted * below).sum() / pairs) if pairs else None
