"""Real shapes with random weights: what they cost is real, and nothing has to be loaded."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.target.target import Target

_LARGE = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    },
    "llama-8b": {
        **_LARGE, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-70b": {
        **_LARGE, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
}  # fmt: skip
"""Llama shapes by name: a toy, Llama-3.1-8B and -70B."""


def llama_config(shape: str, **sizes: Any) -> LlamaConfig:
    """Return a configuration that ends nowhere; ``sizes`` replace fields of the shape."""
    return LlamaConfig(**{**SHAPES[shape], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **sizes})


@torch.inference_mode(False)
def random_target(shape: str, device: torch.device, dtype: torch.dtype, **sizes: Any) -> Target:
    """Return a model of a shape, made on the device: ones where there is a weight per channel, else small noise."""
    config = llama_config(shape, **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)  # pyright: ignore[reportArgumentType] (its decorator hides self)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        parameter.data.fill_(1.0) if parameter.ndim == 1 else parameter.data.normal_(std=0.02, generator=generator)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its frequencies are no weights
    return Target(model.eval().requires_grad_(False), name=f"random {shape}")
