"""EAGLE-3's head, trained with the training-time test (arXiv 2503.01840), and 3.1's (arXiv 2605.09992)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from drafters.eagle import EagleDrafter
from drafters.heads.base import FeatureHead
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.eagle_files import load_eagle, save_eagle
from experiments.training.heads.feature import TrainedFeatureHead, take_output
from specdec.interfaces import Drafter
from specdec.target.target import Target


class TrainedEagle3(TrainedFeatureHead):
    """One decoder layer over pairs of a fused state and an embedding.

    Args:
        name: A head to go on from; None for new weights.
        depths: Steps of the training-time test, and tokens of the drafts that are measured.
        hidden_layers: The target's states that are fused; None for an early, a middle and a late one.
        draft_vocabulary: How many tokens the head can draft: the most frequent supervised ones. None for all.
        layers: Decoder layers.
        intermediate_size: Width of the MLP; None for the target's.
        norm_before_residual: Whether the residual stream begins with the normed feature.
        norm_each: Whether each captured state has a norm of its own (3.1).
        feeds_normed: Whether the normed output is fed back (3.1).
        output_from_target: Whether a new output layer begins as the target's.
        detached: See ``TrainedFeatureHead``.
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        depths: int = 7,
        hidden_layers: Sequence[int] | None = None,
        draft_vocabulary: int | None = None,
        layers: int = 1,
        intermediate_size: int | None = None,
        norm_before_residual: bool = False,
        norm_each: bool = False,
        feeds_normed: bool = False,
        output_from_target: bool = True,
        detached: bool = False,
    ):
        super().__init__(depths=depths, detached=detached)
        self.name, self.layers = name, hidden_layers
        self.draft_vocabulary = draft_vocabulary
        self.output_from_target = output_from_target
        self.options = {
            "layers": layers,
            "intermediate_size": intermediate_size,
            "norm_before_residual": norm_before_residual,
            "norm_each": norm_each,
            "feeds_normed": feeds_normed,
        }

    @property
    def draft_columns(self) -> int | None:
        """The size of the draft vocabulary of new weights."""
        return self.draft_vocabulary if self.name is None else None

    def make(self, target: Target, draft_ids: Int[Tensor, " column"] | None) -> FeatureHead:
        """A new head, or the one that was named."""
        if self.name is not None:
            head = load_eagle(self.name, hidden_layers=None if self.layers is None else tuple(self.layers))
            if not isinstance(head, Eagle3Head):
                raise ValueError(
                    f"head.name={self.name!r} is an EAGLE-1 head, which is not trained here: give an EAGLE-3 one"
                )
            return head
        chosen = _layers_for(target) if self.layers is None else tuple(self.layers)
        head = Eagle3Head.for_target(target.model, hidden_layers=chosen, draft_ids=draft_ids, **self.options)
        if self.output_from_target:
            take_output(head, target)
        return head

    def drafter(self) -> Drafter:
        """A chain of the head's."""
        return EagleDrafter(self.copied(), self.depths, optimize=False)  # pyright: ignore[reportArgumentType]

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the head in bfloat16, in EAGLE's own layout."""
        save_eagle(self.rounded(), folder, notes=facts)  # pyright: ignore[reportArgumentType]


def _layers_for(target: Target) -> tuple[int, ...]:
    """The usual three layers, or for a shallow target three that it has."""
    count = target.num_layers or 0
    if count >= 7:
        return 2, count // 2, count - 3
    return tuple(sorted({min(1, count - 1), count // 2, count - 1}))
