"""What a head predicts over a text, depth by depth, and how that compares with another way of running it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from experiments.inspecting.text import Text
from experiments.training.comparison import column_of

_POWERS = (0.25, 0.5, 1.0, 1.5, 2.0)

RANKS = 4
"""So many of a head's most probable tokens are looked at."""

_SHARE, _LEAST = 0.05, 0.03
"""A gain in length counts from this share of the drafted part on, and from this many tokens on."""
_SURE = 4.0
"""Standard errors that a gain must be away from zero: several dozen alternatives are tried."""
_SURE_BY_PROMPT = 2.5
"""The same with one figure per prompt, whose places resemble each other."""


@dataclass(frozen=True, eq=False)
class Measured:
    """What a head predicted for the drafts of a text, given the text's own tokens above each depth.

    Attributes:
        alpha: α = Σ min(p, q) at temperature 1.
        ranks: How many tokens the head finds more probable than the target's most probable one; -1 if it cannot draft
            that one at all.
        rows: The prompt of each draft.
    """

    alpha: Float[Tensor, "draft depth"]
    ranks: Int[Tensor, "draft depth"]
    rows: Int[Tensor, " draft"]

    @property
    def lengths(self) -> Float[Tensor, " draft"]:
        """The expected number of tokens of each draft's round: one more than what is accepted of a chain."""
        return 1 + self.alpha.cumprod(1).sum(1)

    @property
    def length(self) -> float:
        """The mean of ``lengths``: the simulated length."""
        return float(self.lengths.mean())

    @property
    def acceptance(self) -> list[float]:
        """The mean α by depth: the conditional rate."""
        return self.alpha.mean(0).tolist()

    @property
    def reached(self) -> list[float]:
        """The mean product of α up to each depth: the unconditional rate."""
        return self.alpha.cumprod(1).mean(0).tolist()

    def accuracy(self, rank: int) -> list[float]:
        """By depth, how often the target's most probable token is the head's of this rank, from 0."""
        return (self.ranks == rank).double().mean(0).tolist()

    @property
    def coverage(self) -> float:
        """How often the head can draft the target's most probable token."""
        return float((self.ranks[:, 0] >= 0).double().mean())


@dataclass(frozen=True)
class Gain:
    """How much longer drafts are than those of another way to run a head, on the same places.

    Attributes:
        tokens: The mean difference in length.
        error: Its standard error over places.
        counts: Whether it is more than chance and more than a trifle.
    """

    tokens: float
    error: float
    counts: bool


@torch.no_grad()
def measure(text: Text, logits: Iterable[Tensor], columns: Int[Tensor, " column"] | None, labels: int = 0) -> Measured:
    """Compare logits with the target's distributions.

    Args:
        text: The text.
        logits: The logits of the kept drafts, one tensor for each depth.
        columns: The target's ids of their columns, ascending; None if they are the target's.
        labels: How many tokens behind the one that is drafted is compared.
    """
    alphas, ranks = [], []
    for depth, found in enumerate(logits, start=1):
        log_p = text.target_at(depth, labels)
        width = found.shape[-1] if columns is not None else min(found.shape[-1], log_p.shape[-1])
        p = (log_p[:, :width] if columns is None else log_p.index_select(-1, columns)).exp()
        q = found.float()[:, :width]
        best = column_of(log_p.argmax(-1), columns)
        best = best.where(best < width, -1)
        chosen = q.gather(-1, best.clamp(min=0)[:, None])
        ranks.append((q > chosen).sum(-1).where(best >= 0, -1))
        alphas.append(torch.minimum(p, q.softmax(-1)).sum(-1).double().clamp(0, 1).nan_to_num())
    return Measured(torch.stack(alphas, 1).cpu(), torch.stack(ranks, 1).cpu(), text.rows.cpu())


@torch.no_grad()
def ignorance(text: Text) -> float:
    """The α at depth 1 of something that knows which tokens are frequent here, and nothing else."""
    p = text.target_at(1).exp()
    frequent = p.mean(0)
    found = []
    for power in _POWERS:  # the frequencies themselves are not quite what overlaps most
        q = frequent.pow(power)
        found.append(float(torch.minimum(p, q / q.sum()).sum(-1).mean()))
    return max(found)


def gain(new: Measured, old: Measured) -> Gain:
    """Compare two ways of running a head on the same places."""
    more = new.lengths - old.lengths
    mean, error = float(more.mean()), float(more.std() / math.sqrt(len(more)))
    rows = new.rows.unique()
    by_row = torch.stack([more[new.rows == row].mean() for row in rows])
    sure = mean > _SURE * error
    if len(rows) > 1:
        sure = sure and float(by_row.mean()) > _SURE_BY_PROMPT * float(by_row.std()) / math.sqrt(len(rows))
    return Gain(mean, error, sure and mean > max(_LEAST, _SHARE * (old.length - 1)))
