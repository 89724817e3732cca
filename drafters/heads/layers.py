"""Parts of heads, put together from transformers' own."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP


def rms_norm(config: Any, width: int | None = None) -> nn.Module:
    """Returns an RMSNorm over ``width`` channels (by default the hidden size)."""
    return LlamaRMSNorm(width or config.hidden_size, eps=config.rms_norm_eps)


def rotary(config: Any) -> nn.Module:
    """Returns the rotary embedding that a configuration describes."""
    return LlamaRotaryEmbedding(config)  # Qwen3's is the same


def decoder_layer(config: Any, index: int) -> nn.Module:
    """Returns an ordinary decoder layer: Qwen3's, which norms queries and keys, for a configuration of its kind."""
    kind: Any = Qwen3DecoderLayer if isinstance(config, Qwen3Config) else LlamaDecoderLayer
    return with_biases(kind(config, index), config)


def with_biases(layer: nn.Module, config: Any) -> nn.Module:
    """Returns a layer whose output projection has a bias only if the configuration's ``output_bias`` says so.

    Llama's attention has biases everywhere or nowhere. Qwen2's has none at the output.
    """
    attention: Any = layer.self_attn
    if attention.o_proj.bias is not None and not getattr(config, "output_bias", True):
        attention.o_proj = nn.Linear(attention.o_proj.in_features, attention.o_proj.out_features, bias=False)
    return layer


class PairLayer(nn.Module):
    """EAGLE-3's first layer: a decoder layer whose attention reads embedding and feature side by side.

    Its residual stream begins with the feature: as it came, or normed (``norm_before_residual``).

    Args:
        config: As for Llama's or Qwen3's decoder layer.
        index: The layer's number in the cache.
        norm_before_residual: Whether the residual stream begins with the normed feature.
    """

    def __init__(self, config: Any, index: int, *, norm_before_residual: bool):
        super().__init__()
        kind: Any = Qwen3Attention if isinstance(config, Qwen3Config) else LlamaAttention
        self.self_attn: Any = kind(config, index)
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(self.self_attn, name)
            setattr(
                self.self_attn, name, nn.Linear(2 * config.hidden_size, own.out_features, bias=own.bias is not None)
            )
        with_biases(self, config)
        self.mlp = (Qwen3MLP if isinstance(config, Qwen3Config) else LlamaMLP)(config)
        self.input_layernorm = rms_norm(config)
        self.hidden_norm = rms_norm(config)
        self.post_attention_layernorm = rms_norm(config)
        self.norm_before_residual = norm_before_residual

    def forward(self, joined: Float[Tensor, "batch node joined"], **kwargs: Any) -> Float[Tensor, "batch node hidden"]:
        """Returns the layer's output, un-normed.

        Args:
            joined: Embeddings and features, side by side.
            **kwargs: What a decoder layer of transformers is given besides.
        """
        embeds, features = joined.chunk(2, dim=-1)
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        attended, _ = self.self_attn(hidden_states=torch.cat([self.input_layernorm(embeds), normed], dim=-1), **kwargs)
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class NormEach(nn.Module):
    """Norms each of several hidden states, which lie side by side, by itself (EAGLE-3.1, arXiv 2605.09992)."""

    def __init__(self, config: Any, count: int, width: int):
        super().__init__()
        self.norms = nn.ModuleList(rms_norm(config, width) for _ in range(count))

    def forward(self, states: Float[Tensor, "*rows joined"]) -> Float[Tensor, "*rows joined"]:
        parts = states.chunk(len(self.norms), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], dim=-1)


class Fusion(nn.Module):
    """Makes a feature of captured hidden states: an optional norm, then one linear layer."""

    def __init__(self, norm: nn.Module, linear: nn.Linear):
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, states: Float[Tensor, "*rows joined"]) -> Float[Tensor, "*rows width"]:
        return self.linear(self.norm(states))
