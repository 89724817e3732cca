"""Heads of block drafters for tests, and their logits by definition."""

from typing import Any

import torch
from torch import Tensor

from drafters.heads.block import BlockHead
from specdec.target.target import Target

VOCAB, HIDDEN = 64, 32


def head_for(target: Target, *, seed: int = 3, **settings: Any) -> BlockHead:
    """A head whose random weights are large enough that everything it reads shows in its logits."""
    torch.manual_seed(seed)
    settings = {"block_size": 5, "mask_token_id": VOCAB - 1, "hidden_layers": (1, 3)} | settings
    head = BlockHead.for_target(target.model, **settings).eval()
    for parameter in head.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
        else:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return head


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE by its definition: pairs (i, i + d/2) as complex numbers, turned by position times frequency."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


@torch.no_grad()
def dense_logits(head: BlockHead, target: Target, features: Tensor, tokens: list[int], *, causal: bool) -> Tensor:
    """The logits of one block behind one row's context, in float64, written from the papers' description."""
    config = head.config
    weights = {name: tensor.detach().double() for name, tensor in head.state_dict().items()}
    table = target.model.get_input_embeddings().weight.double()
    output = target.model.get_output_embeddings().weight.double()
    theta, eps, dim = config.rope_parameters["rope_theta"], config.rms_norm_eps, config.head_dim
    count, slots = len(features), len(tokens)
    place = torch.arange(count + slots)
    context = _norm(features.double() @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = table[tokens] * config.input_embedding_scale
    hidden = x
    for index in range(config.num_hidden_layers):
        part = {n.removeprefix(f"layers.{index}."): w for n, w in weights.items() if n.startswith(f"layers.{index}.")}
        normed = _norm(x, part["input_layernorm.weight"], eps)
        both = torch.cat([context, normed])
        query = (normed @ part["self_attn.q_proj.weight"].T).view(slots, -1, dim)
        key = (both @ part["self_attn.k_proj.weight"].T).view(count + slots, -1, dim)
        value = (both @ part["self_attn.v_proj.weight"].T).view(count + slots, -1, dim)
        if config.layer_kind == "qwen3":
            query = _norm(query, part["self_attn.q_norm.weight"], eps)
            key = _norm(key, part["self_attn.k_norm.weight"], eps)
        query, key = _turned(query, place[count:], theta), _turned(key, place, theta)
        groups = query.shape[1] // key.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) / dim**0.5
        if causal:
            scores = scores.masked_fill(place > place[count:, None], -torch.inf)
        if config.layer_types[index] == "sliding_attention":
            scores = scores.masked_fill(place[count:, None] - place >= config.sliding_window, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(groups, 1))
        x = x + mixed.reshape(slots, -1) @ part["self_attn.o_proj.weight"].T
        normed = _norm(x, part["post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(normed @ part["mlp.gate_proj.weight"].T)
        x = x + (gate * (normed @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T
        hidden = x
    logits = _norm(hidden, weights["norm.weight"], eps) @ output.T * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


ROWS = (7, 0, 3)


def context_of(head: BlockHead, rows: tuple[int, ...] = ROWS) -> Tensor:
    return torch.randn(len(rows), max(rows), head.feature_width, generator=torch.Generator().manual_seed(1))
