"""Figures of a head over the places of its drafts: accuracy, acceptance, simulated length, coverage, calibration.

All figures are teacher-forced: a depth is judged with the text's own tokens above it. What the head does in the engine
is measured by ``experiments.training.served``. Temperatures make a confidence head's predictions right, depth by depth
(DSpark, arXiv 2607.05147: sequential temperature scaling).
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from drafters.heads.training import Anchors
from experiments.training.losses import Places

_BINS = 15
"""Bins of the calibration error."""
_GRID = torch.logspace(-1, 1, 81, base=4, dtype=torch.float64)
"""Temperatures that are tried: from 1/4 to 4."""


class Tally:
    """Adds up places, over batches and over processes."""

    def __init__(self, depths: int, device: torch.device):
        self.depths = depths
        # Per depth: places, agreements, agreements in a row, α, products of α.
        self.sums = torch.zeros(5, depths, dtype=torch.float64, device=device)
        self.coverage = torch.zeros(2, dtype=torch.float64, device=device)
        # Per depth and bin of the predicted probability of getting there: places, predictions, α products.
        self.bins = torch.zeros(3, depths, _BINS, dtype=torch.float64, device=device)
        self.confident = False

    def add(self, places: Places, *, autoregressive: bool = False) -> None:
        """Add the places of a batch; ``autoregressive`` is ``TrainedHead.autoregressive``."""
        valid, alpha, agrees = places.anchors.valid, places.acceptance.double(), places.agrees
        first = valid[:, 0]
        self.coverage += torch.stack([first.sum(), (first & places.covered[:, 0]).sum()])
        if autoregressive:
            valid, alpha, agrees = unfolded(places.anchors, alpha, agrees, self.depths)
        alpha = alpha.clamp(0, 1).where(valid, 0.0)
        agrees = (agrees & valid).double()
        reached = alpha.cumprod(1)
        self.sums += torch.stack([each.sum(0) for each in (valid.double(), agrees, agrees.cumprod(1), alpha, reached)])
        if places.confidence is not None:
            self.confident = True
            self.bins += binned(places.confidence.double().where(valid, 0.0).cumprod(1), reached, valid)

    def reduce(self, add: Callable[[Tensor], Tensor]) -> None:
        """Add up what all processes have."""
        self.sums, self.coverage, self.bins = add(self.sums), add(self.coverage), add(self.bins)

    def figures(self) -> dict[str, float]:
        """The figures by name; those of a depth end with it (``acceptance/2``).

        ``accuracy`` is the share of places where q's most probable token is p's. ``acceptance`` is the mean α: the
        conditional rate, given that all before was accepted and the text's. ``reached`` is the mean product of α up to
        the depth, the unconditional rate. A simulated length is one plus the sum of the latter; the greedy one counts
        agreements in place of α.
        """
        places, agreed, in_row, alpha, reached = self.sums.cpu()
        there = places.clamp(min=1)
        found: dict[str, float] = {}
        for name, values in (("accuracy", agreed), ("acceptance", alpha), ("reached", reached)):
            found |= {f"{name}/{depth}": float(v) for depth, v in enumerate(values / there, start=1)}
        found["simulated_length"] = 1 + float((reached / there).sum())
        found["simulated_length_greedy"] = 1 + float((in_row / there).sum())
        found["coverage"] = float(self.coverage[1] / self.coverage[0].clamp(min=1))
        if self.confident:
            errors = calibration_errors(self.bins.cpu())
            found |= {f"calibration_error/{depth}": float(v) for depth, v in enumerate(errors, start=1)}
            found["calibration_error"] = float(errors.mean())
        return found


def unfolded(
    anchors: Anchors, alpha: Float[Tensor, "anchor 1"], agrees: Bool[Tensor, "anchor 1"], depths: int
) -> tuple[Bool[Tensor, "anchor depth"], Float[Tensor, "anchor depth"], Bool[Tensor, "anchor depth"]]:
    """Returns validity, acceptance and agreement of deeper drafts, whose depth d is depth 1 of d − 1 tokens later.

    Between anchors of two texts there is a position that is none, a text's last one.
    """
    places = anchors.index[:, None] + torch.arange(depths, device=alpha.device)
    row = torch.full((int(places.max()) + 1 if len(places) else 0,), -1, device=alpha.device)
    row[anchors.index] = torch.arange(len(places), device=alpha.device).where(anchors.valid[:, 0], -1)
    later = row[places]
    return (later >= 0).long().cumprod(1).bool(), alpha[later, 0], agrees[later, 0]


def binned(predicted: Tensor, happened: Tensor, valid: Bool[Tensor, "anchor depth"]) -> Float[Tensor, "3 depth bin"]:
    """Counts, sums of predictions and sums of rates, by depth and by bin of the prediction."""
    bins = (predicted * _BINS).long().clamp(max=_BINS - 1).T
    empty = predicted.new_zeros(predicted.shape[1], _BINS)
    each = (part.where(valid, 0.0).T for part in (valid.double(), predicted, happened))
    return torch.stack([empty.scatter_add(1, bins, numbers) for numbers in each])


def calibration_errors(bins: Float[Tensor, "3 depth bin"]) -> Float[Tensor, " depth"]:
    """The expected calibration error at every depth: |mean prediction − mean rate| of the bins, weighted."""
    counts, predicted, happened = bins
    return (predicted - happened).abs().sum(1) / counts.sum(1).clamp(min=1)


def calibrated(found: Sequence[Places]) -> tuple[list[float], list[float]]:
    """A temperature for every depth, and the calibration errors that are left, of held-out text's confidences."""
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
    """
    temperatures, errors, above = [], [], torch.ones_like(logits[:, :1])
    for given, happened, there in zip(*(each.split(1, 1) for each in (logits, reached, valid)), strict=True):
        predicted = above * (given / _GRID).sigmoid()
        tried = calibration_errors(binned(predicted, happened.expand_as(predicted), there.expand_as(predicted)))
        best = min(range(len(_GRID)), key=lambda index: (float(tried[index]), abs(index - len(_GRID) // 2)))
        temperatures.append(float(_GRID[best]))
        errors.append(float(tried[best]))
        above = predicted[:, best, None]
    return temperatures, errors
