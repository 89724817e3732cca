"""What heads have in common that read pairs: the target's hidden state at t, and token t+1."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from drafters.heads.bound import DraftHead, sizes_like
from specdec.cache.transformers_cache import CACHE


def config_for(target: PreTrainedModel, *, layers: int, intermediate_size: int | None = None) -> LlamaConfig:
    """Returns the configuration of a new head of a target's widths (MLPs too, unless given), with plain RoPE."""
    text: Any = target.config.get_text_config(decoder=True)
    given = {} if intermediate_size is None else {"intermediate_size": intermediate_size}
    sizes: dict[str, Any] = {**sizes_like(text), **given}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return LlamaConfig(vocab_size=text.vocab_size, num_hidden_layers=layers, rope_parameters=rope, **sizes)


class FeatureBackbone(nn.Module):
    """A head without its output layer: joins embeddings and features, and runs decoder layers over them.

    A subclass sets the modules and says how the two are joined.

    Attributes:
        embed_tokens: The input embeddings; None if they are borrowed from the target (``FeatureHead.bound``).
        fusion: Makes a feature of the target's hidden states, which it is given side by side.
        feature_width: The width of a feature.
    """

    embed_tokens: nn.Module | None
    layers: nn.ModuleList
    norm: nn.Module
    rotary_emb: nn.Module
    fusion: nn.Module
    feature_width: int

    def __init__(self, config: Any, *, owns_embeddings: bool):
        super().__init__()
        self.config, self.feature_width = config, config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if owns_embeddings else None
        self.rotary_arguments: dict[str, Any] = {}  # what the rotary embedding is given besides positions

    @abstractmethod
    def join(
        self, embeds: Float[Tensor, "batch node hidden"], features: Float[Tensor, "batch node width"]
    ) -> Float[Tensor, "batch node joined"]:
        """Returns what the first layer reads."""

    def forward(
        self,
        input_ids: Int[Tensor, "batch node"] | None = None,
        features: Float[Tensor, "batch node width"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "batch node"] | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "batch node hidden"] | None = None,
        output_hidden_states: bool = False,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Runs pairs through the layers; arguments as of transformers' models. Features are zero if not given."""
        embeds: Any = inputs_embeds
        if embeds is None:
            if self.embed_tokens is None:
                raise ValueError("this head has no embeddings: it borrows the target's, call FeatureHead.bound first")
            embeds = self.embed_tokens(input_ids)
        if position_ids is None:
            start = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(start, start + embeds.shape[1], device=embeds.device)[None]
        slides = "sliding_attention" in (getattr(self.config, "layer_types", None) or ())
        made = create_sliding_window_causal_mask if slides else create_causal_mask
        mask = made(self.config, embeds, attention_mask, past_key_values, position_ids)
        given = embeds.new_zeros(*embeds.shape[:2], self.feature_width) if features is None else features
        hidden = self.join(embeds, given)
        rotary = self.rotary_emb(embeds, position_ids=position_ids, **self.rotary_arguments)
        inputs: list[Tensor] = []
        for layer in self.layers:
            inputs.append(hidden)
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_ids=position_ids,
                position_embeddings=rotary,
                **{CACHE: past_key_values},
                **kwargs,
            )
        normed = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=normed,
            **{CACHE: past_key_values},
            hidden_states=(*inputs, hidden, normed) if output_hidden_states else None,
        )


class FeatureHead(DraftHead):
    """A causal LM over pairs: row t is (feature of position t, token t+1), and its logits are of token t+2.

    A feature is made of the target's hidden states (``fuse``), or it is the head's own output for the pair before
    (``hidden_states[fed_back]``) where the target has not been run yet.

    Attributes:
        lm_head: The output layer; None if it is borrowed from the target.
        hidden_layers: The hidden states of the target that a feature is made of; None if its files do not say.
        fed_back: Which of the head's own hidden states is the next pair's feature. ``hidden_states`` are the inputs of
            all layers, then the last layer's output, and last the same after the norm.
    """

    base_model_prefix = "model"

    model: FeatureBackbone
    lm_head: nn.Module | None
    hidden_layers: tuple[int, ...] | None
    fed_back: int

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # an MTP module's layer may have experts

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    @property
    def feature_width(self) -> int:
        return self.model.feature_width

    def fuse(self, states: Sequence[Float[Tensor, "batch position hidden"]]) -> Float[Tensor, "batch position width"]:
        return self.model.fusion(torch.cat(list(states), dim=-1))

    def forward(
        self,
        input_ids: Int[Tensor, "batch node"] | None = None,
        *,
        position_ids: Int[Tensor, "batch node"] | None = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Runs pairs, as ``FeatureBackbone.forward``; the last ``logits_to_keep`` get logits, or all for 0."""
        output = self.model(input_ids=input_ids, position_ids=position_ids, past_key_values=past_key_values, **kwargs)
        if self.lm_head is None:
            raise ValueError("this head has no output layer: it borrows the target's, call FeatureHead.bound first")
        hidden = output.last_hidden_state
        return CausalLMOutputWithPast(
            logits=self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden),
            **{CACHE: past_key_values},
            hidden_states=output.hidden_states,
        )
