"""A small causal LM of the target's vocabulary, distilled from it (DistillSpec, arXiv 2310.08461)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from drafters.model import ModelDrafter
from experiments.training.batch import Anchors, Batch, TargetStates, every_anchor
from experiments.training.heads.base import Prediction, TrainedHead, check_depths, frozen_copy, output_of
from experiments.training.states import additive, visible
from specdec.interfaces import Drafter
from specdec.target.loading import load
from specdec.target.target import Target


class TrainedLM(TrainedHead):
    """A model of any decoder-only architecture of transformers; with ``name``, one that is trained already.

    Args:
        name: A folder or a name on the hub to go on from; None for new weights.
        architecture: The architecture of new weights: a ``model_type`` of transformers, such as ``"llama"``.
        config: Its sizes, in the words of that architecture's configuration. Vocabulary and special tokens are the
            target's.
        depths: The length of the drafts that are measured while training. One token at a time is trained.

    Raises:
        ValueError: There is neither a name nor a configuration, or an argument is out of its range.
    """

    autoregressive = True

    def __init__(
        self,
        *,
        name: str | None = None,
        architecture: str = "llama",
        config: Mapping[str, Any] | None = None,
        depths: int = 4,
    ):
        super().__init__()
        if (name is None) == (not config):
            raise ValueError("head: give head.config (the sizes of a new model) or head.name (one to go on from)")
        self.name, self.architecture, self.sizes = name, architecture, dict(config or {})
        self.depths = check_depths(depths)
        self.model: PreTrainedModel | None = None
        self.tokenizer: PreTrainedTokenizerBase | None = None

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        """Make or load the model, in float32.

        Raises:
            ValueError: The loaded model's vocabulary is narrower than the target's.
        """
        self.tokenizer = target.tokenizer
        if self.name is not None:
            self.model = load(self.name, dtype="float32", device="cpu").model
        else:
            given: Any = target.model.config.get_text_config(decoder=True)
            special = {key: getattr(given, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
            config = AutoConfig.for_model(
                self.architecture,
                **{"vocab_size": target.vocab_size, "tie_word_embeddings": True, **special, **self.sizes},
            )
            self.model = AutoModelForCausalLM.from_config(config).float()
        assert self.model is not None
        width = output_of(self.model).weight.shape[0]
        if width != target.vocab_size:
            raise ValueError(
                f"the head has {width} tokens and the target {target.name} has {target.vocab_size}: "
                f"give a model of the target's vocabulary"
            )

    def anchors(self, batch: Batch, generator: torch.Generator) -> Anchors:
        """Every position with a supervised successor: a model needs no state of the target."""
        return every_anchor(batch, 1, before=0)

    def forward(self, batch: Batch, states: TargetStates, anchors: Anchors) -> Prediction:
        """The model's last states at the anchors."""
        assert self.model is not None
        mask = additive(visible(batch), torch.float32) if batch.packed else None
        output = self.model.base_model(
            input_ids=batch.tokens, attention_mask=mask, position_ids=batch.positions, use_cache=False
        )
        return Prediction([output.last_hidden_state.flatten(0, 1)[anchors.index]])

    def logits(
        self, states: Float[Tensor, "place width"], previous: Int[Tensor, " place"], depth: int
    ) -> Float[Tensor, "place column"]:
        """The output layer's."""
        assert self.model is not None
        return output_of(self.model)(states).float()

    def drafter(self) -> Drafter:
        """A chain of the model's own."""
        return ModelDrafter(frozen_copy(self.model), self.depths, optimize=False)

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the model in bfloat16, with the target's tokenizer."""
        frozen_copy(self.model).to(torch.bfloat16).save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
