"""A head of your own: Medusa heads that share the target's output layer, so that only their blocks are trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.heads.training import Anchors, Prediction, TargetStates, TextBatch, TrainedHead, output_of
from drafters.medusa import MedusaDrafter, MedusaHeads, ResidualBlock
from specdec import Target


class SharedOutput(TrainedHead):
    """One residual block per depth, and the target's own output layer, frozen, after each.

    Args:
        depths: How many tokens a draft has.
    """

    def __init__(self, depths: int = 3):
        super().__init__(depths)

    def begin(self, target: Target, counts: Tensor | None) -> None:
        """Make the blocks. What is the target's stands in a tuple, so that it is no part of this module."""
        self.borrowed = (output_of(target.model),)
        width = self.borrowed[0].in_features
        self.blocks = torch.nn.ModuleList(ResidualBlock(width) for _ in range(self.depths))

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        """An anchor is a root's position, so the newest state that a draft may read is one position before it."""
        hidden = states.hidden[-1].flatten(0, 1)[anchors.index - 1].float()
        return Prediction([block(hidden) for block in self.blocks])

    def logits(self, states: Tensor, previous: Tensor, depth: int) -> Tensor:
        """The trainer asks for these piece by piece, and keeps none."""
        (output,) = self.borrowed
        return output(states.to(output.weight.dtype)).float()

    def drafter(self) -> MedusaDrafter:
        """What the engine drafts with while the head is trained."""
        return MedusaDrafter(self.as_medusa(), self.depths, sampling="iid", optimize=False)

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Medusa's own format, so that ``drafter=medusa drafter.name=FOLDER`` loads it."""
        self.as_medusa().save_pretrained(folder)

    def as_medusa(self) -> MedusaHeads:
        (output,) = self.borrowed
        vocab_size, width = output.weight.shape
        heads = MedusaHeads(num_heads=self.depths, hidden_size=width, vocab_size=vocab_size)
        with torch.no_grad():
            for number, block in enumerate(self.blocks):
                heads.get_submodule(f"heads.{number}.0").load_state_dict(block.state_dict())
                heads.get_parameter(f"heads.{number}.1.weight").copy_(output.weight)
        return heads.requires_grad_(False).eval()
