"""Which kind of head a drafter has, and what heads of that kind usually bring."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.block import BlockDrafter
from drafters.feature import FeatureDrafter
from drafters.heads.eagle import EagleHead
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.mtp import MTPHead
from drafters.medusa import MedusaDrafter
from drafters.model import ModelDrafter
from experiments.inspecting.block import BlockFamily
from experiments.inspecting.feature import FeatureFamily
from experiments.inspecting.medusa import MedusaFamily
from experiments.inspecting.text import Text
from experiments.inspecting.wiring import Family, Variation, Wiring
from specdec.interfaces import Drafter
from specdec.target.target import Target


@dataclass(frozen=True)
class Usual:
    """What published heads of a kind bring on targets of 7 to 8 billion weights.

    Attributes:
        first: α at depth 1, in chat and in mathematics or code.
        lengths: Simulated or served length of a chain, likewise.
        depth: The length of that chain.
        source: Whose figures these are.
    """

    first: tuple[float, float]
    lengths: tuple[float, float]
    depth: int
    source: str


_DEEPSPEC = "Qwen3-8B at T = 1, arXiv 2607.05147"
USUAL: dict[str, Usual] = {
    "EAGLE-1 head": Usual((0.60, 0.80), (2.2, 3.5), 5, "roughly, by reports on Vicuna-7B"),
    "EAGLE-3 head": Usual((0.53, 0.81), (2.5, 5.3), 7, _DEEPSPEC),
    "MTP module": Usual((0.70, 0.90), (2.2, 3.4), 3, "roughly, by reports on DeepSeek-V3, GLM and Qwen"),
    "block head (DFlash)": Usual((0.72, 0.88), (2.8, 5.3), 7, _DEEPSPEC),
    "block head (DSpark)": Usual((0.72, 0.88), (3.2, 6.2), 7, _DEEPSPEC),
    "Medusa heads": Usual((0.45, 0.65), (1.7, 2.3), 4, "roughly, by reports on Vicuna-7B"),
}
"""By the name of the kind. A small model has no usual figures: they depend on its size."""


class ModelFamily(Family):
    """A small model, which reads nothing but tokens: there is nothing to connect in another way.

    Args:
        drafter: Bound to the target.
        target: The target.
    """

    def __init__(self, drafter: ModelDrafter, target: Target):
        self.target, self.depths = target, 4
        self.wiring = Wiring(head=drafter.model, layers=())

    @torch.no_grad()
    def logits(self, wiring: Wiring, text: Text) -> Iterator[Tensor]:
        """See ``Family.logits``."""
        tokens = text.batch.tokens.clamp(max=wiring.head.get_input_embeddings().weight.shape[0] - 1)
        logits = wiring.head(tokens, use_cache=False).logits.flatten(0, 1)
        for places in text.anchors.places(text.batch)[text.kept].unbind(1):
            yield logits[places]

    def variations(self, wiring: Wiring) -> Iterator[Variation]:
        """Yields nothing."""
        yield from ()


def family_of(drafter: Drafter, target: Target) -> Family:
    """Returns a bound drafter's head as something that can be run in several ways.

    Raises:
        ValueError: It has no trained head, or several.
    """
    if isinstance(drafter, FeatureDrafter):
        return FeatureFamily(drafter, target)
    if isinstance(drafter, BlockDrafter):
        return BlockFamily(drafter, target)
    if isinstance(drafter, MedusaDrafter):
        return MedusaFamily(drafter, target)
    if isinstance(drafter, ModelDrafter):
        return ModelFamily(drafter, target)
    raise ValueError(
        f"{type(drafter).__name__} is not one trained model, so there is nothing to inspect: give drafter=eagle, mtp, "
        f"block, medusa or model (of a combination its parts, one by one)"
    )


def kind_of(family: Family) -> str:
    """Returns the name of a head's kind."""
    if isinstance(family, FeatureFamily):
        kinds = {EagleHead: "EAGLE-1 head", Eagle3Head: "EAGLE-3 head", MTPHead: "MTP module"}
        return kinds.get(type(family.loaded), type(family.loaded).__name__)
    if isinstance(family, BlockFamily):
        return f"block head ({'DSpark' if family.head.config.shifted else 'DFlash'})"
    return "Medusa heads" if isinstance(family, MedusaFamily) else "model"
