"""Heads that read pairs, computed the slow and obvious way: the reference for what is drafted with a cache.

A head's forward over its whole sequence of pairs, with weights taken by name and nothing of transformers or of this
project called. The attention and the MLP are Llama's.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, theta: float, positions: Tensor | None = None) -> Tensor:
    """Rotary embedding of ``[position, head, channel]``: channel i turns together with channel i + half."""
    half, places = x.shape[2] // 2, torch.arange(len(x)) if positions is None else positions
    angle = places[:, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(x: Tensor, weights: Weights, config: Any) -> Tensor:
    q, k, v = ((x @ weights[f"{part}_proj.weight"].T).view(len(x), -1, config.head_dim) for part in "qkv")
    q, k = (turned(each, config.rope_parameters["rope_theta"]) for each in (q, k))
    q, k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1).transpose(0, 1) for each in (q, k, v))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(0, 1).flatten(1) @ weights["o_proj.weight"].T


def mlp(x: Tensor, weights: Weights) -> Tensor:
    gate = torch.nn.functional.silu(x @ weights["gate_proj.weight"].T)
    return (gate * (x @ weights["up_proj.weight"].T)) @ weights["down_proj.weight"].T


def under(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The weights whose names begin so, without the prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def eagle(weights: Weights, config: Any, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """EAGLE-1: what is fed back, and what the output layer reads."""
    layer = under(weights, "layers.0.")
    x = torch.cat([embeds, features], dim=-1) @ weights["fc.weight"].T + weights["fc.bias"]
    x = x + attention(x, under(layer, "self_attn."), config)
    x = x + mlp(norm(x, layer["post_attention_layernorm.weight"], config.rms_norm_eps), under(layer, "mlp."))
    return x, x


def eagle3(
    weights: Weights, config: Any, embeds: Tensor, features: Tensor, *, normed_residual: bool, feeds_normed: bool
) -> tuple[Tensor, Tensor]:
    """EAGLE-3: what is fed back, and what the output layer reads."""
    layer, eps = under(weights, "midlayer."), config.rms_norm_eps
    e = norm(embeds, layer["input_layernorm.weight"], eps)
    g = norm(features, layer["hidden_norm.weight"], eps)
    x = g if normed_residual else features
    x = x + attention(torch.cat([e, g], dim=-1), under(layer, "self_attn."), config)
    x = x + mlp(norm(x, layer["post_attention_layernorm.weight"], eps), under(layer, "mlp."))
    out = norm(x, weights["norm.weight"], eps)
    return (out if feeds_normed else x), out


def mtp(weights: Weights, config: Any, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """An MTP module with a Llama layer, by MiMo's names: what is fed back, and what the output layer reads."""
    eps = config.rms_norm_eps
    hidden = norm(features, weights["hidden_layernorm.weight"], eps)
    token = norm(embeds, weights["token_layernorm.weight"], eps)
    x = torch.cat([hidden, token], dim=-1) @ weights["input_proj.weight"].T
    x = x + attention(norm(x, weights["input_layernorm.weight"], eps), under(weights, "self_attn."), config)
    x = x + mlp(norm(x, weights["post_attention_layernorm.weight"], eps), under(weights, "mlp."))
    out = norm(x, weights["final_layernorm.weight"], eps)
    return out, out
