"""Tiny random-weight models of every supported architecture, built from configs."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
GEMMA = COMMON | {"head_dim": 8, "sliding_window": 6}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "bos_token_id": None, "eos_token_id": None}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", COMMON),
    "llama_mqa_tied": ("llama", COMMON | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", COMMON),
    "qwen2_mixed_sliding": ("qwen2", COMMON | SLIDING),
    "qwen3": ("qwen3", COMMON | {"head_dim": 16}),
    "mistral_sliding": ("mistral", COMMON | {"sliding_window": 7}),
    "mistral_full": ("mistral", COMMON | {"sliding_window": None}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", GEMMA | {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "phi3": ("phi3", COMMON),
    "gpt2": ("gpt2", GPT2),
}
"""The type of every model, and its configuration."""


def tiny_model(
    architecture: str = "llama", *, vocab_size: int = 64, seed: int = 0, scale: float = 1.0, layers: int | None = None
) -> PreTrainedModel:
    torch.manual_seed(seed)
    model_type, fields = ARCHITECTURES[architecture]
    config = AutoConfig.for_model(model_type, vocab_size=vocab_size, **fields)
    if layers is not None:
        config.num_hidden_layers = layers
    # SDPA leaves out softcaps and sinks in some versions; a model's own attention is what it means.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            # Wide enough that attention and the next token depend on the whole context.
            parameter.data.mul_(5.0 if "embed" not in name and "wte" not in name else 10.0)
    if scale != 1.0:
        model.get_output_embeddings().weight.data.mul_(scale)
    return model
