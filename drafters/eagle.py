"""EAGLE: a head that continues the target's hidden states drafts a tree.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (the same heads, another tree; arXiv 2406.16858), EAGLE-3 (arXiv
2503.01840) and EAGLE-3.1 (arXiv 2605.09992).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from drafters.feature import FeatureDrafter
from drafters.heads.base import FeatureHead
from drafters.heads.eagle import EagleHead
from drafters.heads.eagle3 import Eagle3Head, default_layers
from drafters.heads.eagle_files import load_eagle
from drafters.heads.trained_on import trained_on
from drafters.own_model import layers_given
from specdec.arguments import instance
from specdec.drafting.builders import AnyTree, ExpansionTree, tree_of
from specdec.target.target import Target
from specdec.types import DraftSampling


class EagleDrafter(FeatureDrafter):
    """Drafts with an EAGLE head.

    Args:
        head: The head.
        shape: A tree builder, or what ``TreeShape.of`` takes; None for EAGLE-2's tree of 59 nodes.
        sampling: How siblings are drawn for sampled requests: ``"iid"``, ``"without_replacement"``,
            ``"deterministic"`` or ``"coupled"``; None for ``"deterministic"`` with a tree of the most probable paths,
            and ``"iid"`` with a shape.
        temperature: The drafter's own; None follows each request.
        hidden_layers: The target's hidden states that the head reads, in place of those that its files name.
        name: Shown in error messages.
        attention: See ``ModelRunner``; for the head's forwards.
        optimize: See ``ModelRunner``; for the head's forwards.
        kv_cache: See ``ModelRunner``; for the head's keys and values.

    Raises:
        ValueError: An argument is of the wrong type or out of its range.
    """

    def __init__(
        self,
        head: EagleHead | Eagle3Head,
        shape: AnyTree | None = None,
        *,
        sampling: DraftSampling | str | None = None,
        temperature: float | None = None,
        hidden_layers: tuple[int, ...] | None = None,
        name: str = "",
        attention: str = "auto",
        optimize: bool = True,
        kv_cache: str | None = None,
    ):
        instance("head", head, (EagleHead, Eagle3Head), "a head, or load one with EagleDrafter.from_pretrained(…)")
        self._layers = layers_given(hidden_layers)
        super().__init__(
            head,
            ExpansionTree() if shape is None else tree_of(shape),
            sampling=sampling,
            temperature=temperature,
            name=name or type(head).__name__,
            attention=attention,
            optimize=optimize,
            kv_cache=kv_cache,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        shape: AnyTree | None = None,
        sampling: DraftSampling | str | None = None,
        temperature: float | None = None,
        hidden_layers: Sequence[int] | None = None,
        embeddings: str = "auto",
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        attention: str = "auto",
        optimize: bool = True,
        kv_cache: str | None = None,
        any_target: bool = False,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> "EagleDrafter":
        """Load a head from a folder, the hub, or this package.

        Args:
            path: See ``load_eagle``.
            shape: See the class.
            sampling: See the class.
            temperature: See the class.
            hidden_layers: See the class.
            embeddings: ``"own"`` for the checkpoint's, ``"target"`` for the target's; ``"auto"`` takes the
                checkpoint's if it has some and they are finite.
            dtype: What to load the weights in; ``bind`` casts them to the target's.
            device: Where to load them; None for the CPU, from where ``bind`` copies them to the target's device.
            attention: See the class.
            optimize: See the class.
            kv_cache: See the class.
            any_target: Whether it may run on another target than the one that its ``training.json`` names.
            revision: Branch, tag or commit of the hub repository.
            subfolder: Folder of the checkpoint within the local folder or the hub repository.
            token: For a repository that is not public.
            cache_dir: Where downloaded files are kept.
            force_download: Download files again even if they are there.
            local_files_only: Use only files that are there, without asking the hub.

        Raises:
            ValueError: There is no such checkpoint, or it is none of an EAGLE head, or incomplete.
        """
        where: dict[str, Any] = {
            "revision": revision,
            "subfolder": subfolder,
            "token": token,
            "cache_dir": cache_dir,
            "force_download": force_download,
            "local_files_only": local_files_only,
        }
        head = load_eagle(
            path,
            hidden_layers=layers_given(hidden_layers),
            embeddings=embeddings,
            dtype=dtype,
            device=device or "cpu",
            **where,
        )
        drafter = cls(
            head,
            shape,
            sampling=sampling,
            temperature=temperature,
            name=str(path),
            attention=attention,
            optimize=optimize,
            kv_cache=kv_cache,
        )
        if not any_target:
            drafter.trained_on = trained_on(path, **where)
        return drafter

    def layers_for(self, head: FeatureHead, target: Target) -> tuple[int, ...]:
        """Returns those that were given, else the head's own, else the usual ones."""
        if self._layers is not None:
            return self._layers
        if head.hidden_layers is not None:
            return head.hidden_layers
        assert target.num_layers is not None
        return default_layers(target.num_layers)
