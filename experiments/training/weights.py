"""How much every depth of a draft counts in the loss. Depth 1 is the first drafted token."""

import math
from abc import ABC, abstractmethod

import torch

from experiments.training.losses import Places, Table
from specdec.arguments import number


class Weights(ABC):
    """Weighs the places of drafts. A subclass is final, takes plain arguments and has one YAML file."""

    @abstractmethod
    def __call__(self, places: Places) -> Table:
        """A weight for every place; no gradient goes through it."""


class Power(Weights):
    """``base ** (k − 1)`` at depth k: Medusa and EAGLE-3 take 0.8, MTP's fine-tuning 0.6 with a sum of one.

    Args:
        base: The factor from one depth to the next; 1 weighs all depths alike.
        normalized: Whether the weights of all depths add up to one.
    """

    def __init__(self, base: float = 0.8, normalized: bool = False):
        self.base = number("weights.base", base, "give a number above 0", lambda value: value > 0)
        self.normalized = normalized

    @classmethod
    def exponential(cls, gamma: float = 4.0) -> "Power":
        """``exp(−(k − 1) / gamma)``: DFlash takes 7 for blocks of 16 and 4 for shorter ones, DSpark 4."""
        return cls(math.exp(-1 / number("weights.gamma", gamma, "give a number above 0", lambda value: value > 0)))

    def __call__(self, places: Places) -> Table:
        values = [self.base**index for index in range(places.acceptance.shape[1])]
        total = sum(values) if self.normalized else 1.0
        return places.acceptance.new_tensor([value / total for value in values]).expand_as(places.acceptance)


class DPace(Weights):
    """D-PACE: a place counts as much as what follows it is likely to be reached.

    With q_j the probability of the text's token at depth j and s_j = (1 − ``smoothing``) q_j + ``smoothing``, depth j
    weighs Σ_{k ≥ j} Π_{i ≤ k} s_i, over the valid depths of its draft.

    Args:
        smoothing: 0 takes the probabilities as they are, 1 weighs by the depths that follow.
    """

    def __init__(self, smoothing: float = 0.5):
        remedy = "give a number from 0 to 1"
        self.smoothing = number("weights.smoothing", smoothing, remedy, lambda value: 0 <= value <= 1)

    def __call__(self, places: Places) -> Table:
        smooth = (1 - self.smoothing) * places.likelihood + self.smoothing
        reached = smooth.where(places.anchors.valid, 0.0).cumprod(1)
        return reached.flip(1).cumsum(1).flip(1)


class ExpectedLength(Weights):
    """The derivative of a draft's expected length, (1/γ) Σ_j Π_{i ≤ j} α_i, by the α of every depth.

    With ``loss=tv`` that is AngelSpec's end-to-end total variation. It leaves out that tokens accepted at one depth are
    other than the target's at the next.
    """

    def __call__(self, places: Places) -> Table:
        alpha = places.acceptance.where(places.anchors.valid, 0.0)
        onward, found = torch.ones_like(alpha[:, 0]), []
        for each in reversed(alpha.unbind(1)):
            found.append(onward)
            onward = 1 + each * onward
        before = torch.cat([torch.ones_like(alpha[:, :1]), alpha.cumprod(1)[:, :-1]], 1)
        return before * torch.stack(found[::-1], 1) / alpha.shape[1]
