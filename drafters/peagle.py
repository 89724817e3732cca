"""P-EAGLE: an EAGLE-3 head that drafts all tokens in one forward, over masks (arXiv 2602.01469)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from jaxtyping import Int
from torch import Tensor, nn

from drafters.eagle import DECIDES_3, LoadedEagle, NewEagle3, columns_of, eagle3_for, fuses_pairs, published
from drafters.heads.assemble import MASK_KEYS, mask_of, needed
from drafters.heads.eagle import Eagle3Head
from drafters.heads.eagle_files import TOKENS, load_eagle, save_eagle
from drafters.heads.files import OURS, Checkpoint
from drafters.heads.parallel import FillsMasks, Masked, mask_token
from drafters.heads.training import (
    Anchors,
    Prediction,
    TargetStates,
    TextBatch,
    additive,
    borrowed,
    frozen_copy,
    most_frequent,
)
from drafters.own_model import FeatureDrafter, HeadOptions
from specdec import ModelRunner, Target
from specdec.arguments import instance, whole
from specdec.drafting.builders import AnyTree, tree_of
from specdec.drafting.window import ParallelScorer
from specdec.interfaces import Description, Drafter


class PEagleHead(Eagle3Head):
    """An EAGLE-3 head that was trained on masks in place of its own output. Their feature has states of its own."""

    options = (*Eagle3Head.options, "mask_token_id", "tokens")
    at_once = True
    in_speculators = ("peagle", "PEagleSpeculator")

    def __init__(self, config: Any, *, mask_token_id: int, tokens: int | None = None, **options: Any):
        super().__init__(config, **options)
        self.mask_token_id, self.tokens = whole("mask_token_id", mask_token_id, least=0), tokens
        # As its authors begin; their files have this shape.
        self.model.mask_hidden = nn.Parameter(torch.randn(1, 1, self.captured * self.captured_width))

    @classmethod
    def stored(cls, checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> dict[str, Any]:
        name, stored, ours = checkpoint.name, checkpoint.config, checkpoint.json(OURS) or {}
        mask = mask_of(name, stored)
        if mask is None:
            raise ValueError(f"{name}: its config.json names no mask token, so it is not P-EAGLE's: add mask_token_id")
        if stored.get("speculators_model_type") == "peagle":
            needed(name, tensors, "mask_hidden")
        fused = needed(name, tensors, "fc.weight")  # vLLM takes zeros, too, where there are no states of a mask
        tensors["mask_hidden"] = tensors.get("mask_hidden", fused.new_zeros(fused.shape[1])).reshape(1, 1, -1)
        proposals = (stored.get("speculators_config") or {}).get("proposal_methods") or [{}]
        return {"mask_token_id": mask, "tokens": ours.get("tokens") or proposals[0].get("speculative_tokens")}

    def said(self) -> dict[str, Any]:
        return dict.fromkeys(MASK_KEYS[:2], self.mask_token_id)  # vLLM's proposer reads the second name

    def describe(self) -> Description:
        found = super().describe()
        doubts = {name: value for name, value in found.doubts.items() if name != "residual"}
        return replace(found, kind="P-EAGLE head", doubts=doubts)

    def widened(self, width: int) -> "PEagleHead":
        return self


class PEagleDrafter(FeatureDrafter):
    """Drafts with a P-EAGLE head: one forward over what became final and a mask for every depth but the first.

    As with ``PARDDrafter``, depths know nothing of each other's tokens. ``shape`` None is a chain of as many tokens as
    the head's files say, else 5.
    """

    at_once = True
    usual: ClassVar = {"family": "eagle", "title": "P-EAGLE head", "layers": 4, "at_once": True}
    public = (
        published(
            name="peagle",
            title="a P-EAGLE head",
            formats=("native", "speculators"),
            holds=partial(fuses_pairs, masks=True),
            read=lambda path, target, **given: load_eagle(path, kind=PEagleHead, **given),
            takes=("embeddings", "hidden_layers"),
            decides=(*DECIDES_3, "mask_token_id"),
        ),
    )

    def __init__(
        self,
        head: PEagleHead,
        shape: AnyTree | None = None,
        *,
        hidden_layers: Sequence[int] | None = None,
        **options: Unpack[HeadOptions],
    ):
        instance("head", head, PEagleHead, "a P-EAGLE head, or load one with PEagleDrafter.from_pretrained(…)")
        builder = tree_of((head.tokens or TOKENS) if shape is None else shape)
        super().__init__(head, builder, hidden_layers=hidden_layers, **options)
        self.mask_token_id = head.mask_token_id
        self.has_leaf_probs = builder.has_leaf_probs  # a leaf's law is said by one more mask

    @classmethod
    def from_pretrained(cls, path: str | Path, *, shape: AnyTree | None = None, **options: Unpack[LoadedEagle]) -> Any:
        """Load a head with ``load_eagle``, from a folder or the hub."""
        return cls.loaded(path, load_eagle, shape, {**options, "kind": PEagleHead})

    def scorer_of(self, head: PEagleHead, runner: ModelRunner, **window: Any) -> ParallelScorer:
        rows = head.get_input_embeddings().weight.shape[0]
        if self.mask_token_id >= rows:
            raise ValueError(
                f"the head {self.name} has the mask token {self.mask_token_id}, and the embeddings have {rows} rows: "
                f"correct mask_token_id in its config.json"
            )
        hidden: Any = head.model.mask_hidden

        def feature() -> Tensor:
            return window["fuse"]([hidden.detach()])[0, 0]

        return ParallelScorer(runner, mask_token=self.mask_token_id, mask_feature=feature, **window)


class TrainedPEagle(FillsMasks):
    """P-EAGLE's head: all depths are trained in one forward, over masks that are fewer from depth to depth.

    The other arguments are those of ``NewEagle3``, with four layers by default. The mask token is by default the
    target's last id. With ``trains_embeddings`` the head has some of its own, which begin as the target's.
    """

    title, before = "P-EAGLE head", 1
    head: PEagleHead

    def __init__(
        self,
        *,
        depths: int = 8,
        keeps: float = 0.7,
        keeps_least: float = 0.2,
        mask_token_id: int | None = None,
        trains_embeddings: bool = True,
        **given: Unpack[NewEagle3],
    ):
        super().__init__(depths)
        self.drop(keeps, keeps_least)
        self.mask_token_id = mask_token_id
        self.given, self.draft_columns = NewEagle3(**{"layers": 4, **given}), columns_of(given)
        self.trains_embeddings = trains_embeddings

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        token = mask_token(target.name, target.vocab_size, self.mask_token_id)
        masks = {"owns_embeddings": self.trains_embeddings, "tokens": self.depths, "mask_token_id": token}
        head = eagle3_for(target, self.given, most_frequent(counts, self.draft_columns), PEagleHead, **masks).float()
        own: Any = head.get_input_embeddings()
        if own is not None and self.given.get("name") is None:
            own.weight.data.copy_(target.model.get_input_embeddings().weight)
        self.head, self.hidden_layers = head, tuple(head.hidden_layers or ())
        self._borrowed = borrowed(head, target)

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        head, masked = self.head, Masked.behind(batch, anchors, before=1)
        features = head.fuse([states.hidden[layer].to(head.dtype) for layer in self.hidden_layers])
        masks = head.model.fusion(head.model.mask_hidden).expand(len(features), masked.masks, -1)
        tokens = torch.cat([batch.tokens[:, 1:], batch.tokens[:, -1:]], 1)
        fill = tokens.new_full((len(tokens), masked.masks), head.mask_token_id)
        output = head.model(
            inputs_embeds=self._borrowed[0](torch.cat([tokens, fill], 1)),
            features=torch.cat([features, masks], 1),
            attention_mask=additive(masked.seen, features.dtype),
            position_ids=masked.positions,
        )
        return masked.prediction(output.last_hidden_state)

    def drafter(self) -> Drafter:
        return PEagleDrafter(frozen_copy(self.head), self.depths, optimize=False)

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        save_eagle(frozen_copy(self.head, torch.bfloat16), folder, notes=facts)
