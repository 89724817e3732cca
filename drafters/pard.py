"""PARD: a small causal LM that was adapted to fill masks drafts all tokens in one forward (arXiv 2504.18583)."""

from collections.abc import Mapping
from typing import Any, Self, Unpack

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafters.heads.assemble import mask_of
from drafters.heads.files import Public
from drafters.heads.parallel import FillsMasks, Masked, mask_token
from drafters.heads.training import Anchors, Prediction, TargetStates, TextBatch, additive, frozen_copy
from drafters.model import MODEL, ModelDrafter, ModelFiles, TrainedLM, is_model
from drafters.own_model import Options, Settings
from specdec import Drafter, ModelRunner, Target
from specdec.arguments import whole
from specdec.drafting.builders import AnyTree
from specdec.drafting.window import ParallelScorer

TOKENS = 8


class LoadedMasks(ModelFiles, Settings, total=False):
    """``LoadedModel``, and the token of masks; see ``PARDDrafter``."""

    mask_token_id: int | None


class PARDDrafter(ModelDrafter):
    """Drafts with one forward of a small model, over what became final, the root, and a mask for every other depth.

    The depths know nothing of each other's tokens, so that a level of a tree has the same tokens below every node. A
    chain whose tokens are drawn depth by depth follows q exactly. ``mask_token_id`` takes the place of the one that the
    model's configuration names.
    """

    at_once = True
    public = (
        Public(
            name="pard",
            title="a small causal LM that fills masks (PARD)",
            formats=("native",),
            holds=lambda names, config: is_model(names, config) and mask_of("it", config) is not None,
            tokens=lambda model: TOKENS,
            **{**MODEL, "decides": ("config.pard_token",)},
        ),
    )

    def __init__(
        self,
        model: PreTrainedModel,
        shape: AnyTree = TOKENS,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        mask_token_id: int | None = None,
        **options: Unpack[Options],
    ):
        super().__init__(model, shape, tokenizer=tokenizer, **options)
        self.has_leaf_probs = self.tree.has_leaf_probs  # a leaf's law is said by one more mask
        said = model.config.to_dict()
        if said.get("pard2") or said.get("spd_type") == "pard2":
            raise ValueError(
                f"the drafter {self.name} is PARD-2's, which adds the target's hidden states to its embeddings, not "
                f"supported here: give a PARD model"
            )
        mask = mask_of(self.name, said) if mask_token_id is None else whole("mask_token_id", mask_token_id, least=0)
        if mask is None:
            raise ValueError(
                f"the drafter {self.name} names no mask token (pard_token), so it was not trained to fill masks: give "
                f"mask_token_id, or drafter=model"
            )
        embeddings: Any = model.get_input_embeddings()
        rows = embeddings.weight.shape[0]
        if mask >= rows:
            raise ValueError(f"mask_token_id={mask}: the embeddings of the drafter {self.name} have {rows} rows")
        self.mask_token_id = mask

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride] (one more setting is taken)
        cls, name_or_path: str, *, shape: AnyTree = TOKENS, **options: Unpack[LoadedMasks]
    ) -> Self:
        """Load a model in the layout of its authors: transformers' own, with ``pard_token`` in its ``config.json``."""
        own: Any = options
        return super().from_pretrained(name_or_path, shape=shape, **own)

    def scorer_of(self, runner: ModelRunner, **common: Any) -> ParallelScorer:
        return ParallelScorer(runner, mask_token=self.mask_token_id, window=self.max_depth + 1, **common)


class TrainedPARD(FillsMasks, TrainedLM):
    """A small causal LM that learns to fill masks (its mask token, else the target's last id); see ``TrainedLM``."""

    title = "parallel drafter (PARD)"
    autoregressive = False

    def __init__(
        self,
        *,
        name: str | None = None,
        architecture: str = "llama",
        config: Mapping[str, Any] | None = None,
        depths: int = TOKENS,
        keeps: float = 0.7,
        keeps_least: float = 0.2,
        mask_token_id: int | None = None,
    ):
        super().__init__(name=name, architecture=architecture, config=config, depths=depths)
        self.drop(keeps, keeps_least)
        self.mask_token_id = mask_token_id

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        last = mask_token(target.name, target.vocab_size, self.mask_token_id)
        super().begin(target, counts)
        config = self.head.config
        own = None if self.mask_token_id is not None else mask_of(self.name or "head.config", config.to_dict())
        self.mask = last if own is None else own
        config.pard_token, config.spd_type = self.mask, "pard"  # as its authors' training does

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        masked = Masked.behind(batch, anchors, before=0)
        fill = batch.tokens.new_full((len(batch.tokens), masked.masks), self.mask)
        output = self.head.base_model(
            input_ids=torch.cat([batch.tokens, fill], 1),
            attention_mask=additive(masked.seen, torch.float32),
            position_ids=masked.positions,
            use_cache=False,
        )
        return masked.prediction(output.last_hidden_state)

    def drafter(self) -> Drafter:
        return PARDDrafter(frozen_copy(self.head), self.depths, optimize=False)
