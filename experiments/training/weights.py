"""How much every depth of a draft counts in the loss. Depth 1 is the first drafted token."""

import math
from abc import ABC, abstractmethod

from jaxtyping import Bool, Float
from torch import Tensor

from specdec.arguments import number

Table = Float[Tensor, "anchor depth"]


class Weights(ABC):
    """Weighs the places of drafts. A subclass is final, takes plain arguments and has one YAML file."""

    @abstractmethod
    def __call__(self, cross_entropy: Table, valid: Bool[Tensor, "anchor depth"]) -> Table:
        """A weight for every place; no gradient goes through it.

        Args:
            cross_entropy: −log q of the text's token.
        """


class Power(Weights):
    """``base ** (k − 1)`` at depth k: Medusa and EAGLE-3 take 0.8, MTP's fine-tuning 0.6 with a sum of one.

    Args:
        base: The factor from one depth to the next; 1 weighs all depths alike.
        normalized: Whether the weights of all depths add up to one.
    """

    def __init__(self, base: float = 0.8, normalized: bool = False):
        self.base = number("weights.base", base, "give a number above 0", lambda value: value > 0)
        self.normalized = normalized

    def __call__(self, cross_entropy: Table, valid: Bool[Tensor, "anchor depth"]) -> Table:
        values = [self.base**index for index in range(valid.shape[1])]
        total = sum(values) if self.normalized else 1.0
        return cross_entropy.new_tensor([value / total for value in values]).expand_as(cross_entropy)


class Exponential(Weights):
    """``exp(−(k − 1) / gamma)`` at depth k: DFlash takes 7 for blocks of 16 and 4 for shorter ones, DSpark 4.

    Args:
        gamma: After how many depths the weight has fallen to 1/e.
    """

    def __init__(self, gamma: float = 4.0):
        number("weights.gamma", gamma, "give a number above 0", lambda value: value > 0)
        self.power = Power(math.exp(-1 / gamma))

    def __call__(self, cross_entropy: Table, valid: Bool[Tensor, "anchor depth"]) -> Table:
        return self.power(cross_entropy, valid)


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

    def __call__(self, cross_entropy: Table, valid: Bool[Tensor, "anchor depth"]) -> Table:
        smooth = (1 - self.smoothing) * (-cross_entropy.detach()).exp() + self.smoothing
        reached = smooth.where(valid, 0.0).cumprod(1)
        return reached.flip(1).cumsum(1).flip(1)
