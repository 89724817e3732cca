"""Temperatures for a confidence head, depth by depth (DSpark, arXiv 2607.05147: sequential temperature scaling)."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from experiments.training.comparison import Places

_BINS = 15
_GRID = torch.logspace(-1, 1, 81, base=4, dtype=torch.float64)
"""Temperatures that are tried: from 1/4 to 4."""


def calibrated(found: Sequence[Places]) -> tuple[list[float], list[float]]:
    """Returns a temperature for every depth, and the calibration errors that are left.

    Args:
        found: Places with a confidence, from held-out text.
    """
    valid = torch.cat([places.anchors.valid for places in found])
    rates = torch.cat([places.acceptance for places in found]).double().clamp(0, 1)
    confidences = [places.confidence for places in found if places.confidence is not None]
    logits = torch.cat(confidences).double().logit(eps=1e-6)
    return sequential_temperatures(logits.cpu(), rates.where(valid, 0.0).cumprod(1).cpu(), valid.cpu())


def sequential_temperatures(
    logits: Float[Tensor, "anchor depth"], reached: Float[Tensor, "anchor depth"], valid: Bool[Tensor, "anchor depth"]
) -> tuple[list[float], list[float]]:
    """Returns temperatures, found one depth after the other with those above fixed, and the errors that are left.

    At depth k it is the product Π_{i ≤ k} σ(z_i / τ_i) that is compared with how often a draft gets that far, because
    this product decides how much is drafted.

    Args:
        logits: The confidence head's z.
        reached: The probability of getting to each depth.
        valid: Which places count.
    """
    temperatures, errors = [], []
    above = torch.ones_like(logits[:, 0])
    for depth in range(logits.shape[1]):
        there = valid[:, depth]
        predicted = above[there] * (logits[there, depth] / _GRID[:, None]).sigmoid()
        tried = [calibration_error(each, reached[there, depth]) for each in predicted]
        best = min(range(len(tried)), key=lambda index: (tried[index], abs(index - len(tried) // 2)))
        temperatures.append(float(_GRID[best]))
        errors.append(tried[best])
        above = above * (logits[:, depth] / _GRID[best]).sigmoid()
    return temperatures, errors


def calibration_error(predicted: Float[Tensor, " anchor"], happened: Float[Tensor, " anchor"]) -> float:
    """Returns the expected calibration error over bins of equal width: |mean prediction − mean rate|, weighted."""
    if not len(predicted):
        return 0.0
    bins = (predicted * _BINS).long().clamp(max=_BINS - 1)
    gaps = torch.zeros(_BINS, dtype=torch.float64).scatter_add_(0, bins, predicted - happened)
    return float(gaps.abs().sum() / len(predicted))
