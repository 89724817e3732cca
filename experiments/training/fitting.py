"""How long and how fast to train: settings, learning rates, and the optimizers."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from specdec.arguments import number, whole
from specdec.machine import is_native
from specdec.requests import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How long and how fast to train.

    Attributes:
        muon_lr: Peak learning rate of Muon (Jordan et al. 2024) for the matrices between embeddings and output layers;
            None leaves them to AdamW.
        decay: ``"linear"`` or ``"cosine"``, down to zero after the warm-up; ``"late"`` stays at the peak
            until the last quarter of the steps and then falls linearly (Hu et al. 2024, arXiv 2404.06395), so that the
            number of steps can be chosen late, too; ``"none"`` stays at the peak.
        micro_batch: Rows that a process runs at a time; None for all of its own. It changes memory, not the result.
        clip: Gradients are scaled down to this norm; 0 for never.
        chunk: Anchors whose logits are in memory at a time (``Comparison``). On a CPU it should be so few that their
            logits stay in its cache; on a GPU as many as there is memory for, which saves computing them twice.
        temperature, top_k, top_p: Of the requests that the head is trained for.
    """

    steps: int
    batch_size: int
    length: int
    lr: float
    muon_lr: float | None = None
    warmup: int = 50
    decay: str = "linear"
    save_every: int = 100
    micro_batch: int | None = None
    weight_decay: float = 0.01
    clip: float = 1.0
    chunk: int = 256
    log_every: int = 10
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        apart = "decay", "top_k", "top_p"
        given = {name: value for name, value in vars(self).items() if value is not None and name not in apart}
        for name, value in given.items():
            if name in ("lr", "muon_lr", "temperature"):
                number(f"fit.{name}", value, "give a number above 0", lambda value: 0 < value < math.inf)
            elif name in ("weight_decay", "clip"):
                number(f"fit.{name}", value, "give a number of at least 0", lambda value: value >= 0)
            else:
                whole(f"fit.{name}", value, least=1)
        if self.length < 4:
            raise ValueError(f"fit.length={self.length}: give at least 4, so that a draft has something to follow")
        if self.warmup > self.steps:
            # The decay would begin before the first step, with a negative learning rate.
            raise ValueError(f"fit.warmup={self.warmup} is above fit.steps={self.steps}: give at most as many")
        if self.decay not in ("linear", "cosine", "late", "none"):
            raise ValueError(f"fit.decay={self.decay!r}: give linear, cosine, late or none")
        _ = self.law  # refuses what is no filter

    @property
    def law(self) -> SamplingParams:
        """The sampling of these requests."""
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def factor(self, step: int) -> float:
        """The factor of the peak learning rates in a step."""
        left = (self.steps - step) / (self.steps - self.warmup + 1)
        cosine = 0.5 - 0.5 * math.cos(math.pi * min(1.0, left))
        late = (self.steps - step) / (0.25 * self.steps)
        falling = {"linear": left, "cosine": cosine, "late": min(1.0, late), "none": 1.0}[self.decay]
        return min((step + 1) / self.warmup, falling)


def optimizers_of(module: nn.Module, config: FitConfig, vocabularies: Iterable[int]) -> list[torch.optim.Optimizer]:
    """Muon for matrices, if it is wanted and there are any, and last AdamW for everything else.

    Args:
        vocabularies: Widths that mark embeddings and output layers, which are no matrices for Muon.
    """
    widths = set(vocabularies)
    matrices, others = [], []
    for parameter in module.parameters():
        if parameter.requires_grad:
            inner = config.muon_lr is not None and parameter.ndim == 2 and widths.isdisjoint(parameter.shape)
            (matrices if inner else others).append(parameter)
    made: list[torch.optim.Optimizer] = []
    if matrices:
        assert config.muon_lr is not None
        if not is_native(torch.bfloat16, matrices[0].device):
            slow = "this device has no bfloat16 arithmetic, in which Muon computes: steps take many times as long; %s"
            logger.warning(slow, "fit.muon_lr=null fit.lr=2e-3 trains with AdamW alone")
        made.append(torch.optim.Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=config.weight_decay))
    if others:
        made.append(torch.optim.AdamW(others, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made
