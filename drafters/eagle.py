"""EAGLE: a head that continues the target's hidden states drafts a tree.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (the same heads, another tree; arXiv 2406.16858), EAGLE-3 (arXiv
2503.01840) and EAGLE-3.1 (arXiv 2605.09992).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from jaxtyping import Int
from torch import Tensor

from drafters.heads.assemble import mask_of
from drafters.heads.base import FeatureHead
from drafters.heads.eagle import Eagle3Head, EagleHead, default_layers
from drafters.heads.eagle_files import TOKENS, load_eagle, save_eagle
from drafters.heads.files import Public, has
from drafters.heads.training import take_output
from drafters.heads.unrolled import TrainedFeatureHead
from drafters.own_model import FeatureDrafter, HeadOptions, Loaded, LoadedFirst, layers_given
from specdec import Drafter, Target
from specdec.arguments import instance
from specdec.drafting.builders import AnyTree, ExpansionTree, TreeBuilder, tree_of

_SHAPE = ("layers", "intermediate_size", "norm_before_residual", "norm_each")
DECIDES = (
    *("fusion_bias", "owns_embeddings", "fed_back", "config.rope_parameters", "config.rms_norm_eps"),
    *("config.hidden_act", "config.num_hidden_layers", "config.vocab_size"),
)
DECIDES_3 = (
    *("hidden_layers", "captured", "captured_width", "norm_before_residual", "norm_joined", "norm_each"),
    *("feeds_normed", "owns_output", *DECIDES),
)


def published(**kind: Any) -> Public:
    """A kind of heads in files of EAGLE's layouts."""
    usual: dict[str, Any] = {
        "read": lambda path, target, **given: load_eagle(path, **given),
        "write": lambda head, folder, target, **to: save_eagle(head, folder, **to),
        "tokens": lambda head: head.tokens or TOKENS,
        "width": "captured_width",
    }
    return Public(**usual | kind)


def fuses_pairs(names: Sequence[str], config: Mapping[str, Any], *, masks: bool) -> bool:
    """Whether files hold an EAGLE-3 head, with or without masks."""
    return has(names, "midlayer.hidden_norm.", "layers.0.hidden_norm.") and masks is (mask_of("", config) is not None)


class LoadedEagle(Loaded, LoadedFirst, total=False):
    """``Loaded``, ``LoadedFirst``, and which ``embeddings`` a head reads (``load_eagle``)."""

    embeddings: str


class EagleDrafter(FeatureDrafter):
    """Drafts with an EAGLE head, by default the ``usual_tree``."""

    usual: ClassVar = {"family": "eagle"}
    public = (
        published(
            name="eagle",
            title="an EAGLE-1 head",
            formats=("native", "sglang"),
            holds=lambda names, config: (
                has(names, "fc.weight")
                and not has(names, "hidden_norm.", "midlayer.hidden")
                and not has(names, "layers.0.hidden_norm.")
            ),
            takes=("embeddings",),
            decides=DECIDES,
        ),
        published(
            name="eagle3",
            title="an EAGLE-3 head",
            formats=("native", "speculators", "sglang"),
            holds=partial(fuses_pairs, masks=False),
            takes=("embeddings", "hidden_layers"),
            decides=DECIDES_3,
        ),
    )

    def __init__(
        self,
        head: EagleHead | Eagle3Head,
        shape: AnyTree | None = None,
        *,
        hidden_layers: tuple[int, ...] | None = None,
        **options: Unpack[HeadOptions],
    ):
        instance("head", head, (EagleHead, Eagle3Head), "a head, or load one with EagleDrafter.from_pretrained(…)")
        if isinstance(head, Eagle3Head) and head.at_once:
            raise ValueError(
                f"the head {options.get('name') or type(head).__name__} fills masks, and was not trained to read its "
                f"own output: give the drafter of such heads"
            )
        tree = usual_tree(head.tokens) if shape is None else tree_of(shape)
        super().__init__(head, tree, hidden_layers=hidden_layers, **options)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, shape: AnyTree | None = None, **options: Unpack[LoadedEagle]) -> Any:
        """Load a head with ``load_eagle``, from a folder, the hub, or this package (``"bundled/…"``)."""
        return cls.loaded(path, load_eagle, shape, options)


def usual_tree(trained: int | None) -> TreeBuilder:
    """EAGLE-2's 59 nodes; on a machine without a GPU, where every node costs, a chain of 3; as deep as trained."""
    most = {} if trained is None else {"depth": min(trained, 8)}
    return ExpansionTree(**most) if torch.accelerator.is_available() else tree_of(min(trained or 3, 3))


class NewEagle3(TypedDict, total=False):
    """The head a training begins with: ``name``, or new weights with the ``draft_vocabulary`` most frequent tokens."""

    name: str | None
    hidden_layers: Sequence[int] | None
    draft_vocabulary: int | None
    layers: int
    intermediate_size: int | None
    norm_before_residual: bool
    norm_each: bool


class TrainedEagle3(TrainedFeatureHead):
    """EAGLE-3's head, trained with the training-time test, and 3.1's. The other arguments: see ``NewEagle3``.

    Args:
        depths: Steps of the training-time test, and tokens of the drafts that are measured.
    """

    title = "EAGLE-3 head"

    def __init__(self, *, depths: int = 7, feeds_normed: bool = False, **given: Unpack[NewEagle3]):
        super().__init__(depths)
        self.given, self.feeds_normed, self.draft_columns = given, feeds_normed, columns_of(given)

    def make(self, target: Target, draft_ids: Int[Tensor, " column"] | None) -> FeatureHead:
        return eagle3_for(target, self.given, draft_ids, feeds_normed=self.feeds_normed)

    def drafter(self) -> Drafter:
        return EagleDrafter(self.copied(), self.depths, optimize=False)

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        head = self.copied().to(torch.bfloat16)
        head.tokens = self.depths
        save_eagle(head, folder, notes=facts)


def columns_of(given: NewEagle3) -> int | None:
    """Returns how many tokens a new head can draft; None for all of them, or if it is loaded."""
    return given.get("draft_vocabulary") if given.get("name") is None else None


def eagle3_for(
    target: Target,
    given: NewEagle3,
    draft_ids: Int[Tensor, " column"] | None,
    kind: type[Eagle3Head] = Eagle3Head,
    **options: Any,
) -> Any:
    """Returns a head to train, of a class of ``Eagle3Head``; ``options`` of its ``for_target`` are for new weights."""
    name, layers = given.get("name"), layers_given(given.get("hidden_layers"))
    if name is not None:
        head = load_eagle(name, kind=kind, hidden_layers=layers)
        if not isinstance(head, Eagle3Head):
            raise ValueError(f"head.name={name!r} is an EAGLE-1 head, which is not trained here: give an EAGLE-3 one")
        return head
    count = target.num_layers or 0
    # In a shallow target the usual three would coincide.
    usual = default_layers(count) if count >= 7 else tuple(sorted({min(1, count - 1), count // 2, count - 1}))
    options |= {key: value for key, value in given.items() if key in _SHAPE}
    head = kind.for_target(target.model, hidden_layers=layers or usual, draft_ids=draft_ids, **options)
    take_output(head, target)
    return head
