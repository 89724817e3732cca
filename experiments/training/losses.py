"""Losses: how far a head's distribution q is from the target's p, at one place of a text or over whole drafts.

A loss knows nothing about heads and batches: it maps rows of log-probabilities to numbers. Depths are weighed by
``experiments.training.weights``, and everything is added up by ``experiments.training.comparison``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from drafters.heads.training import Anchors
from specdec.arguments import number

Table = Float[Tensor, "anchor depth"]
Mask = Bool[Tensor, "anchor depth"]
LEAST = -1e4
"""Stands for the logarithm of zero, where 0 · log 0 is to be 0."""


@dataclass(frozen=True, eq=False)
class Compared:
    """Two distributions at some places, and the token that the text has there.

    Attributes:
        log_p: The target's, over the same columns (renormalized where the head's vocabulary is a part of the target's).
        labels: The column of the text's token; -1 where the head has no such column.
        progress: How much of the training is over, from 0 to 1.
        log_mass: The logarithm of what these columns have of the target's probability.
        ends: The columns of tokens that end a text.
    """

    log_q: Float[Tensor, "place column"]
    log_p: Float[Tensor, "place column"]
    labels: Int[Tensor, " place"]
    progress: float
    log_mass: Float[Tensor, "place 1"] | float = 0.0
    ends: Sequence[int] = ()

    @cached_property
    def q(self) -> Float[Tensor, "place column"]:
        return self.log_q.exp()

    @cached_property
    def p(self) -> Float[Tensor, "place column"]:
        return self.log_p.exp()

    @cached_property
    def whole_p(self) -> Float[Tensor, "place column"]:
        """The target's probabilities of these columns among all of its vocabulary."""
        return self.p if isinstance(self.log_mass, float) else (self.log_p + self.log_mass).exp()

    @cached_property
    def acceptance(self) -> Float[Tensor, " place"]:
        """How likely rejection sampling is to accept a token drawn from q: α = Σ min(p, q), whatever the columns."""
        return torch.minimum(self.whole_p, self.q).sum(-1)

    @cached_property
    def log_likelihood(self) -> Float[Tensor, " place"]:
        """Logarithm of q of the text's token; about -∞ if the head has no column for it."""
        return self._of_text(self.log_q)[:, 0].where(self.labels >= 0, LEAST)

    @cached_property
    def log_ratio(self) -> Float[Tensor, " place"]:
        """Logarithm of r = q / p of the text's token."""
        ratio = self._of_text(self.log_q) - self._of_text(self.log_p) - self.log_mass
        return ratio[:, 0].where(self.labels >= 0, LEAST)

    def _of_text(self, rows: Float[Tensor, "place column"]) -> Float[Tensor, "place 1"]:
        return rows.gather(-1, self.labels.clamp(min=0)[:, None])

    @property
    def accepted(self) -> Float[Tensor, " place"]:
        """How likely rejection sampling is to go on along the text: a = min(1, r)."""
        return self.log_ratio.clamp(max=0).exp()

    @property
    def cost(self) -> Float[Tensor, " place"]:
        """The mean of 1 − a over the tokens that do not end the text, Σ [p − q]+ / Σ p."""
        p, ends = self.whole_p, list(self.ends)
        ending = (p[:, ends] - self.q[:, ends]).clamp(min=0).sum(-1)
        return (1 - self.acceptance - ending) / (1 - p[:, ends].sum(-1)).clamp(min=1e-6)


@dataclass(frozen=True, eq=False)
class Places:
    """The findings at every place of the drafts, without gradients. Places that are not valid hold anything.

    Attributes:
        acceptance: ``Compared.acceptance``.
        agrees: Whether q's most probable token is p's.
        covered: Whether the head has a column for p's most probable token.
        likelihood: q of the text's token.
        ratio: q / p of the text's token.
        cost: ``Compared.cost``.
        confidence: The confidence head's probability; None without one.
    """

    anchors: Anchors
    acceptance: Table
    agrees: Mask
    covered: Mask
    likelihood: Table
    ratio: Table
    cost: Table
    confidence: Table | None = None


class DraftLoss(ABC):
    """A loss over whole drafts. A subclass is final, takes plain arguments and has one entry in ``loss.yaml``.

    Attributes:
        by_place: Whether ``Weights`` weigh its depths.
        everywhere: Whether drafts at all positions are compared first (``experiments.training.edr``).
    """

    by_place = everywhere = False

    @abstractmethod
    def over(self, drafts: Iterable[Compared], valid: Mask, factors: Tensor | None) -> Table:
        """A loss for every place of some drafts, which come depth by depth, with a gradient to every ``log_q``."""


class Loss(DraftLoss):
    """Says how far q is from p at every place, whatever the rest of the draft is."""

    by_place = True

    def over(self, drafts: Iterable[Compared], valid: Mask, factors: Tensor | None) -> Table:
        return torch.stack([self(compared) for compared in drafts], 1)

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
        if self.token == "text":
            return -compared.log_likelihood.where(compared.labels >= 0, 0.0)
        return -compared.log_q.gather(-1, compared.log_p.argmax(-1, keepdim=True))[:, 0]


class ForwardKL(Loss):
    """KL(p ‖ q) = Σ p (log p − log q)."""

    def __call__(self, compared: Compared) -> Float[Tensor, " place"]:
        # As inner products, because differences of whole rows would be written to memory and read again.
        entropy = torch.linalg.vecdot(compared.p, compared.log_p.clamp(min=LEAST))
        return entropy - torch.linalg.vecdot(compared.p, compared.log_q)


class ReverseKL(Loss):
    """KL(q ‖ p) = Σ q (log q − log p)."""

    def __call__(self, compared: Compared) -> Float[Tensor, " place"]:
        return (compared.q * (compared.log_q.clamp(min=LEAST) - compared.log_p.clamp(min=LEAST))).sum(-1)


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
        found = [weight * term(compared) for weight, term in zip(self.weights, self.terms, strict=True)]
        return torch.stack(found).sum(0)


class BlockVerification(DraftLoss):
    """−(1/β) log of a draft's mean score ** β, where the score of depth i is how likely block verification accepts i.

    Let R_i be the product of q / p of the text's tokens down to depth i, and m_i the least of R_0 = 1 to R_i. Then the
    score Σ_x min(m_{i−1} p(x), R_{i−1} q(x)) is that probability, on average over texts of the target (arXiv
    2609.34832). β rises from 0, the mean logarithm, to 1 over half of the steps. The value is the mean of −log score
    with the weights of the gradient.
    """

    def over(self, drafts: Iterable[Compared], valid: Mask, factors: Tensor | None) -> Table:
        product = least = torch.zeros(len(valid), 1, device=valid.device)
        found, progress = [], 0.0
        for each in drafts:
            row = torch.minimum(least + each.log_p + each.log_mass, product + each.log_q)
            found.append(row.logsumexp(-1).clamp(min=-80.0))  # so that gradients stay finite
            product, progress = product + each.log_ratio[:, None], each.progress
            least = torch.minimum(least, product)
        scores = torch.stack(found, 1)
        weights = (min(1.0, 2 * progress) * scores.detach()).masked_fill(~valid, LEAST).softmax(1)
        return -weights * scores
