"""EAGLE: a head that continues the target's hidden states drafts a tree.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (the same heads, another tree; arXiv 2406.16858), EAGLE-3 (arXiv
2503.01840) and EAGLE-3.1 (arXiv 2605.09992).
"""

from drafters.feature import FeatureDrafter
from drafters.heads.eagle import EagleHead
from drafters.heads.eagle3 import Eagle3Head, default_layers
from specdec.arguments import instance
from specdec.drafting.builders import AnyTree, ExpansionTree
from specdec.modeling.target import Target
from specdec.types import DraftSampling


class EagleDrafter(FeatureDrafter):
    """Drafts with an EAGLE head.

    Args:
        head: The head.
        tree: A tree builder, or what ``TreeShape.of`` takes; None for EAGLE-2's tree of 59 nodes.
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
        tree: AnyTree | None = None,
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
        tree = ExpansionTree() if tree is None else tree
        if sampling is None:
            sampling = DraftSampling.DETERMINISTIC if isinstance(tree, ExpansionTree) else DraftSampling.IID
        self._layers = hidden_layers
        super().__init__(
            head,
            tree,
            sampling=sampling,
            temperature=temperature,
            name=name or type(head).__name__,
            attention=attention,
            optimize=optimize,
            kv_cache=kv_cache,
        )

    def layers_for(self, target: Target) -> tuple[int, ...]:
        """Returns those that were given, else the head's own, else the usual ones."""
        if self._layers is not None:
            return tuple(self._layers)
        if self.head.hidden_layers is not None:
            return self.head.hidden_layers
        assert target.num_layers is not None
        return default_layers(target.num_layers)
