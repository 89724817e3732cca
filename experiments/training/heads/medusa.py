"""Medusa heads on the target's last state (Cai et al. 2024, arXiv 2401.10774: Medusa-1, the target frozen)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafters.medusa import MedusaDrafter
from drafters.medusa_heads import MedusaHeads
from experiments.training.batch import Anchors, Batch, TargetStates
from experiments.training.heads.base import Prediction, TrainedHead, check_depths, frozen_copy, output_of
from specdec.interfaces import Drafter
from specdec.target.target import Target


class TrainedMedusa(TrainedHead):
    """One head for every depth: head i reads the state before the root and predicts depth i + 1.

    Args:
        name: Heads to go on from, a folder or a name on the hub; None for new ones, which begin as the target's own
            output layer.
        depths: The number of heads.
        num_layers: Passes through the residual block of each.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(self, *, name: str | None = None, depths: int = 4, num_layers: int = 1):
        super().__init__()
        self.name, self.num_layers = name, num_layers
        self.depths = check_depths(depths)
        self.heads: MedusaHeads | None = None

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        """Make or load the heads, in float32.

        Raises:
            ValueError: Loaded heads are of another number or width.
        """
        output = output_of(target.model)
        vocab_size, hidden_size = output.weight.shape
        if self.name is not None:
            self.heads = MedusaHeads.from_pretrained(self.name, dtype=torch.float32)
            found = (self.heads.num_heads, self.heads.hidden_size, self.heads.vocab_size)
            if found != (self.depths, hidden_size, vocab_size):
                raise ValueError(
                    f"head.name={self.name!r} holds {found[0]} heads of width {found[1]} with {found[2]} tokens, and "
                    f"{self.depths} of width {hidden_size} with {vocab_size} are wanted for the target {target.name}"
                )
            return
        self.heads = MedusaHeads(
            num_heads=self.depths,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            num_layers=self.num_layers,
            base_model=target.name,
        )
        layers: Any = self.heads.heads
        for head in layers:
            head[-1].weight.data.copy_(output.weight)

    def forward(self, batch: Batch, states: TargetStates, anchors: Anchors) -> Prediction:
        """The outputs of the heads' residual blocks, of the state one position before each root."""
        heads = self._heads()
        hidden = states.hidden[-1].flatten(0, 1)[anchors.index - 1]
        hidden = hidden.to(next(heads.parameters()).dtype)
        layers: Any = heads.heads
        return Prediction([head[:-1](hidden) for head in layers])

    def logits(
        self, states: Float[Tensor, "place width"], previous: Int[Tensor, " place"], depth: int
    ) -> Float[Tensor, "place column"]:
        """The output layer's of one head."""
        head: Any = self._heads().heads[depth - 1]
        return head[-1](states).float()

    def drafter(self) -> Drafter:
        """A chain, sampled for sampled requests: acceptance is then what the figures estimate."""
        return MedusaDrafter(frozen_copy(self.heads), self.depths, sampling="iid", optimize=False)

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the heads in bfloat16, in FasterDecoding's first format."""
        frozen_copy(self.heads).to(torch.bfloat16).save_pretrained(folder)

    def _heads(self) -> MedusaHeads:
        assert self.heads is not None, "begin comes first"
        return self.heads
