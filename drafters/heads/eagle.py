"""EAGLE-1's head, which EAGLE-2 uses with another tree (Li et al. 2024, arXiv 2401.15077 and 2406.16858)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from drafters.heads.base import FeatureBackbone, FeatureHead, config_for
from drafters.heads.layers import decoder_layer, rotary


class _Backbone(FeatureBackbone):
    def __init__(self, head: "EagleHead"):
        config = head.config
        super().__init__(config)
        width = config.hidden_size
        self.feature_width = width
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if head.owns_embeddings else None
        self.fc = nn.Linear(2 * width, width, bias=head.fusion_bias)
        self.fusion = nn.Identity()
        self.layers = nn.ModuleList(decoder_layer(config, index) for index in range(config.num_hidden_layers))
        self.layers[0].input_layernorm = nn.Identity()  # what comes out of fc is not normed
        self.norm = nn.Identity()  # the output is meant to be the target's, whose output layer reads it
        self.rotary_emb = rotary(config)

    def join(
        self, embeds: Float[Tensor, "batch node hidden"], features: Float[Tensor, "batch node width"]
    ) -> Float[Tensor, "batch node joined"]:
        """Returns embedding and feature, projected to one width."""
        return self.fc(torch.cat([embeds, features], dim=-1))


class EagleHead(FeatureHead):
    """A decoder layer that predicts the target's next normalized last hidden state; the target's output layer reads it.

    Args:
        config: Llama's or Qwen3's, of the target's sizes, with the head's number of layers.
        fusion_bias: Whether the joining projection has a bias.
        owns_embeddings: Whether the head has embeddings; it borrows the target's otherwise.
    """

    def __init__(self, config: PreTrainedConfig, *, fusion_bias: bool = True, owns_embeddings: bool = False):
        super().__init__(config)
        self.hidden_layers = (-1,)
        self.captured, self.captured_width = 1, config.hidden_size
        self.fusion_bias, self.owns_embeddings = fusion_bias, owns_embeddings
        self.model = _Backbone(self)
        self.lm_head = None
        self.draft_ids = None
        self.fed_back = config.num_hidden_layers

    @classmethod
    def for_target(cls, target: PreTrainedModel, *, layers: int = 1, fusion_bias: bool = True) -> "EagleHead":
        """Returns a new head with random weights for a target, of the target's sizes."""
        config = config_for(target, layers=layers)
        return cls(config, fusion_bias=fusion_bias)

    def like(self, config: PreTrainedConfig, *, captured_width: int) -> "EagleHead":
        """Returns a new head with other sizes and the same options."""
        assert captured_width == config.hidden_size, "what it predicts are the target's hidden states"
        return EagleHead(config, fusion_bias=self.fusion_bias, owns_embeddings=self.owns_embeddings)
