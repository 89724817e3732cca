"""Losses at one place of a text: how far a head's distribution q is from the target's p there.

A loss knows nothing about heads, depths and batches: it maps two rows of log-probabilities to a number. Positions are
weighed by ``experiments.training.weights``, and added up by ``experiments.training.comparison``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.arguments import number

_LEAST = -1e4
"""Stands for the logarithm of zero, where 0 · log 0 is to be 0."""


@dataclass(frozen=True, eq=False)
class Compared:
    """Two distributions at some places, and the token that the text has there.

    Attributes:
        log_p: The target's, over the same columns (renormalized where the head's vocabulary is a part of the target's).
        labels: The column of the text's token; -1 where the head has no such column.
        progress: How much of the training is over, from 0 to 1.
    """

    log_q: Float[Tensor, "place column"]
    log_p: Float[Tensor, "place column"]
    labels: Int[Tensor, " place"]
    progress: float

    @cached_property
    def q(self) -> Float[Tensor, "place column"]:
        return self.log_q.exp()

    @cached_property
    def p(self) -> Float[Tensor, "place column"]:
        return self.log_p.exp()

    @cached_property
    def acceptance(self) -> Float[Tensor, " place"]:
        """α = Σ min(p, q): the probability that rejection sampling accepts a token drawn from q."""
        return torch.minimum(self.p, self.q).sum(-1)


class Loss(ABC):
    """Says how far q is from p at every place. A subclass is final, takes plain arguments and has one YAML file."""

    @abstractmethod
    def __call__(self, compared: Compared) -> Float[Tensor, " place"]:
        """A loss per place, logarithms in nats, with a gradient to ``log_q``."""


class CrossEntropy(Loss):
    """−log q of one token: the text's own, or the target's most probable one.

    Args:
        token: ``"text"``, or ``"argmax"`` for the target's most probable token. A text's token without a column in a
            reduced vocabulary costs nothing.
    """

    def __init__(self, token: str = "text"):
        if token not in ("text", "argmax"):
            raise ValueError(f"loss.token={token!r}: give text or argmax")
        self.token = token

    def __call__(self, compared: Compared) -> Float[Tensor, " place"]:
        labels = compared.labels if self.token == "text" else compared.log_p.argmax(-1)
        chosen = compared.log_q.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        return -chosen.where(labels >= 0, 0.0)


class ForwardKL(Loss):
    """KL(p ‖ q) = Σ p (log p − log q)."""

    def __call__(self, compared: Compared) -> Float[Tensor, " place"]:
        # As inner products, because differences of whole rows would be written to memory and read again.
        entropy = torch.linalg.vecdot(compared.p, compared.log_p.clamp(min=_LEAST))
        return entropy - torch.linalg.vecdot(compared.p, compared.log_q)


class ReverseKL(Loss):
    """KL(q ‖ p) = Σ q (log q − log p)."""

    def __call__(self, compared: Compared) -> Float[Tensor, " place"]:
        return (compared.q * (compared.log_q.clamp(min=_LEAST) - compared.log_p.clamp(min=_LEAST))).sum(-1)


class TotalVariation(Loss):
    """½ Σ |p − q| = 1 − α: what rejection sampling rejects (Leviathan et al. 2023, Theorem 3.5)."""

    def __call__(self, compared: Compared) -> Float[Tensor, " place"]:
        return 0.5 * (compared.p - compared.q).abs().sum(-1)


class NegativeLogAcceptance(Loss):
    """−log α. Its gradient is that of total variation divided by α: larger where little is accepted.

    Args:
        least: α is taken to be no smaller, so that the gradient stays finite.
    """

    def __init__(self, least: float = 1e-4):
        self.least = number("loss.least", least, "give a probability between 0 and 1", lambda value: 0 < value < 1)

    def __call__(self, compared: Compared) -> Float[Tensor, " place"]:
        return -compared.acceptance.clamp(min=self.least).log()


class HybridLK(Loss):
    """λ KL(p ‖ q) + (1 − λ)(1 − α) with λ = exp(−``sharpness`` · α), no gradient through λ (arXiv 2602.23881).

    KL leads while little is accepted, where total variation has almost no gradient; total variation at the end.

    Args:
        sharpness: How fast KL fades as α grows.
    """

    def __init__(self, sharpness: float = 3.0):
        self.sharpness = number("loss.sharpness", sharpness, "give a number of at least 0", lambda value: value >= 0)

    def __call__(self, compared: Compared) -> Float[Tensor, " place"]:
        share = (-self.sharpness * compared.acceptance.detach()).exp()
        return share * ForwardKL()(compared) + (1 - share) * TotalVariation()(compared)


class Scheduled(Loss):
    """One loss at the beginning, another at the end, and between them a mixture that moves linearly."""

    def __init__(self, first: Loss, last: Loss):
        self.first, self.last = first, last

    def __call__(self, compared: Compared) -> Float[Tensor, " place"]:
        return (1 - compared.progress) * self.first(compared) + compared.progress * self.last(compared)


class WeightedSum(Loss):
    """A sum of losses. Raises ValueError: there are not as many factors as losses."""

    def __init__(self, terms: Sequence[Loss], weights: Sequence[float]):
        if not terms or len(terms) != len(weights):
            raise ValueError(f"loss has {len(terms)} terms and {len(weights)} weights: give one weight for each term")
        self.terms, self.weights = list(terms), list(weights)

    def __call__(self, compared: Compared) -> Float[Tensor, " place"]:
        total = torch.zeros_like(compared.log_q[:, 0])
        for weight, term in zip(self.weights, self.terms, strict=True):
            total = total + weight * term(compared)
        return total
