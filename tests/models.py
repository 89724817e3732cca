"""Tiny random-weight models of every supported architecture, built from configs."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

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
GEMMA = COMMON | {"head_dim": 8, "sliding_window": 6}

ARCHITECTURES: dict[str, Callable[[int], Any]] = {
    "llama": lambda vocab: LlamaConfig(vocab_size=vocab, **COMMON),
    "llama_mqa_tied": lambda vocab: LlamaConfig(
        vocab_size=vocab, **COMMON | {"num_key_value_heads": 1}, tie_word_embeddings=True
    ),
    "qwen2": lambda vocab: Qwen2Config(vocab_size=vocab, **COMMON),
    "qwen2_mixed_sliding": lambda vocab: Qwen2Config(
        vocab_size=vocab, **COMMON, use_sliding_window=True, sliding_window=6, max_window_layers=2
    ),
    "qwen3": lambda vocab: Qwen3Config(vocab_size=vocab, **COMMON, head_dim=16),
    "mistral_sliding": lambda vocab: MistralConfig(vocab_size=vocab, **COMMON, sliding_window=7),
    "mistral_full": lambda vocab: MistralConfig(vocab_size=vocab, **COMMON, sliding_window=None),
    "gemma2": lambda vocab: Gemma2Config(
        vocab_size=vocab, **GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda vocab: Gemma3TextConfig(
        vocab_size=vocab, **GEMMA, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "phi3": lambda vocab: Phi3Config(vocab_size=vocab, **COMMON),
    "gpt2": lambda vocab: GPT2Config(
        vocab_size=vocab, n_embd=32, n_layer=3, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=None
    ),
}


def tiny_model(
    architecture: str = "llama", *, vocab_size: int = 64, seed: int = 0, scale: float = 1.0, layers: int | None = None
) -> PreTrainedModel:
    """A random model in float32."""
    torch.manual_seed(seed)
    config = ARCHITECTURES[architecture](vocab_size)
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
