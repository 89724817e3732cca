"""EAGLE: a head that continues the target's hidden states drafts a tree.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (the same heads, another tree; arXiv 2406.16858), EAGLE-3 (arXiv
2503.01840) and EAGLE-3.1 (arXiv 2605.09992).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from jaxtyping import Int
from torch import Tensor

from drafters.feature import FeatureDrafter
from drafters.heads.base import FeatureHead
from drafters.heads.eagle import Eagle3Head, EagleHead, default_layers
from drafters.heads.eagle_files import load_eagle, save_eagle
from drafters.heads.training import take_output
from drafters.heads.unrolled import TrainedFeatureHead
from drafters.own_model import Loaded, Options, layers_given
from specdec.arguments import instance
from specdec.drafting.builders import AnyTree, ExpansionTree, tree_of
from specdec.interfaces import Drafter
from specdec.target.target import Target


class EagleDrafter(FeatureDrafter):
    """Drafts with an EAGLE head.

    Args:
        shape: A tree builder, or what ``TreeShape.of`` takes; None for EAGLE-2's tree of 59 nodes.
        hidden_layers: The target's hidden states that the head reads, in place of those that its files name.
    """

    def __init__(
        self,
        head: EagleHead | Eagle3Head,
        shape: AnyTree | None = None,
        *,
        hidden_layers: tuple[int, ...] | None = None,
        **options: Unpack[Options],
    ):
        instance("head", head, (EagleHead, Eagle3Head), "a head, or load one with EagleDrafter.from_pretrained(…)")
        if isinstance(head, Eagle3Head) and head.mask_token_id is not None:
            raise ValueError(
                f"the head {options.get('name') or 'Eagle3Head'} is P-EAGLE's, which was not trained to read its own "
                f"output: give drafter=peagle, or PEagleDrafter"
            )
        tree = ExpansionTree() if shape is None else tree_of(shape)
        super().__init__(head, tree, hidden_layers=hidden_layers, **{"name": type(head).__name__, **options})

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        shape: AnyTree | None = None,
        hidden_layers: Sequence[int] | None = None,
        embeddings: str = "auto",
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        **options: Unpack[Loaded],
    ) -> "EagleDrafter":
        """Load a head from a folder, the hub, or this package.

        Arguments and errors are those of ``load_eagle`` and of the class. ``bind`` copies the weights to the target's
        device and dtype.
        """
        chosen = layers_given(hidden_layers)

        def load(**where: Any) -> EagleHead | Eagle3Head:
            return load_eagle(path, hidden_layers=chosen, embeddings=embeddings, dtype=dtype, device=device, **where)

        return cls.loaded(path, load, shape, options)


class TrainedEagle3(TrainedFeatureHead):
    """EAGLE-3's head, trained with the training-time test, and 3.1's.

    The other arguments are those of ``Eagle3Head`` and ``TrainedFeatureHead``.

    Args:
        name: A head to go on from; None for new weights.
        depths: Steps of the training-time test, and tokens of the drafts that are measured.
        hidden_layers: The target's states that are fused; None for an early, a middle and a late one.
        draft_vocabulary: How many tokens the head can draft: the most frequent supervised ones. None for all.
        intermediate_size: Width of the MLP; None for the target's.
        output_from_target: Whether a new output layer begins as the target's.
    """

    title = "EAGLE-3 head"

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
        super().__init__(depths, detached=detached)
        self.name, self.layers = name, None if hidden_layers is None else tuple(hidden_layers)
        self.draft_columns = draft_vocabulary if name is None else None
        self.output_from_target = output_from_target
        self.options: dict[str, Any] = {
            "layers": layers,
            "intermediate_size": intermediate_size,
            "norm_before_residual": norm_before_residual,
            "norm_each": norm_each,
            "feeds_normed": feeds_normed,
        }

    def make(self, target: Target, draft_ids: Int[Tensor, " column"] | None) -> FeatureHead:
        return eagle3_for(target, self.name, self.layers, draft_ids, self.options, from_target=self.output_from_target)

    def drafter(self) -> Drafter:
        return EagleDrafter(self.copied(), self.depths, optimize=False)

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the head in bfloat16, in EAGLE's own layout."""
        save_eagle(self.copied().to(torch.bfloat16), folder, notes=facts)


def eagle3_for(
    target: Target,
    name: str | None,
    layers: tuple[int, ...] | None,
    draft_ids: Int[Tensor, " column"] | None,
    options: Mapping[str, Any],
    *,
    from_target: bool,
) -> Eagle3Head:
    """Returns a head to train.

    Args:
        name: A head to go on from; None for new weights.
        layers: The target's states that are fused; None for an early, a middle and a late one.
        draft_ids: The target's ids that it is to draft; None for all.
        options: Of ``Eagle3Head.for_target``, for new weights.
        from_target: Whether a new output layer begins as the target's.

    Raises:
        ValueError: It is an EAGLE-1 head.
    """
    if name is not None:
        head = load_eagle(name, hidden_layers=layers)
        if not isinstance(head, Eagle3Head):
            raise ValueError(f"head.name={name!r} is an EAGLE-1 head, which is not trained here: give an EAGLE-3 one")
        return head
    count = target.num_layers or 0
    # In a shallow target the usual three would coincide.
    usual = default_layers(count) if count >= 7 else tuple(sorted({min(1, count - 1), count // 2, count - 1}))
    head = Eagle3Head.for_target(target.model, hidden_layers=layers or usual, draft_ids=draft_ids, **options)
    if from_target:
        take_output(head, target)
    return head
