"""The models that are measured, and prompts: real shapes with random weights, and the bundled ones."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from drafters import ModelDrafter
from experiments.datasets.prompt import choose
from experiments.datasets.stdlib import Stdlib
from specdec.machine import choose_dtype
from specdec.quantization import check_quantization, quantize
from specdec.quantization.checkpoint import mark
from specdec.target.target import Target

BUNDLED = "bundled"

_LARGE = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    },
    "110m": {
        "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-1b": {
        **_LARGE, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_LARGE, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-70b": {
        **_LARGE, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
}  # fmt: skip
"""Llama shapes by name: a toy, the 110M shape of the other benchmarks, Llama-3.2-1B, Llama-3.1-8B and -70B."""
ENDLESS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def dtype_for(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; ``"auto"`` is bfloat16 where the device computes in it."""
    return choose_dtype(torch.bfloat16, device).dtype if name == "auto" else getattr(torch, name)


def make_target(
    name: str, device: torch.device, dtype: torch.dtype, *, quantization: str | None = None, seed: int = 0, **sizes: Any
) -> Target:
    """Return a model that ends nowhere: every request makes as many tokens as it asks for.

    Args:
        name: A key of ``SHAPES``, or ``BUNDLED``.
        quantization: Weights in fewer bits. They are quantized layer by layer, so that a model fits whose unquantized
            weights would not.
        **sizes: Fields of a named shape's configuration that are to be others.
    """
    if name == BUNDLED:
        return bundled_target(device=device, dtype=dtype, quantization=quantization)
    config = LlamaConfig(**{**SHAPES[name], **ENDLESS, **sizes})
    shown = name if quantization is None else f"{name} in {quantization}"
    return Target(_random_llama(config, device, dtype, quantization, seed), name=f"random {shown}")


def bundled_target(**options: Any) -> Target:
    """Return the bundled target, which ends nowhere: every run makes the same number of tokens."""
    target = Target.from_pretrained("bundled/target", **options)
    target.eos_token_ids = frozenset()
    target.model.generation_config.eos_token_id = None
    return target


def small_model(target: Target, shape: int | Sequence[int] = 4, **options: Any) -> ModelDrafter:
    """Return the bundled drafter, on the device of a target."""
    return ModelDrafter.from_pretrained("bundled/drafter", shape=shape, device=target.device, **options)


def stdlib_prompts(target: Target, count: int, tokens: int = 128) -> list[list[int]]:
    """Return held-out source code of about so many tokens."""
    assert target.tokenizer is not None
    chosen, _ = choose(Stdlib(count=count, prompt_tokens=tokens, seed=0))
    return [target.tokenizer(prompt.turns[0])["input_ids"][: 2 * tokens] for prompt in chosen]


def repetitive(count: int, vocab: int, row: int = 0) -> list[int]:
    """Return a prompt that repeats itself, so that prompt lookup has something to find."""
    return [(7 * (place % 23) + 3 * row + 1) % vocab for place in range(count)]


def make_draft_model(target: Target, seed: int = 1) -> LlamaForCausalLM:
    """Return a small random Llama with a target's vocabulary, to draft at a small model's cost.

    Its drafts are hardly ever accepted: with it, costs can be measured and nothing else.
    """
    of = target.model.config
    heads = max(1, of.num_attention_heads // 4)
    config = LlamaConfig(
        vocab_size=target.vocab_size, hidden_size=64 * heads, intermediate_size=160 * heads,
        num_hidden_layers=max(1, of.num_hidden_layers // 8), num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=of.max_position_embeddings, tie_word_embeddings=True,
        **ENDLESS,
    )  # fmt: skip
    return _random_llama(config, target.device, target.dtype, None, seed)


@torch.inference_mode(False)
def _random_llama(
    config: LlamaConfig, device: torch.device, dtype: torch.dtype, quantization: str | None, seed: int
) -> LlamaForCausalLM:
    if quantization is not None:
        check_quantization(quantization)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)  # pyright: ignore[reportArgumentType] (its decorator hides self)
    generator = torch.Generator(device).manual_seed(seed)
    for layer in model.model.layers:
        _materialize(layer, device, generator)
        if quantization is not None:
            _shell(config, layers=[layer], quantization=quantization)
    for part in (model.model.embed_tokens, model.model.norm, model.lm_head):
        _materialize(part, device, generator)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its frequencies are no weights
    if quantization is not None:
        model.lm_head = _shell(config, output=model.lm_head, quantization=quantization).lm_head
        mark(model, quantization)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def _shell(
    config: LlamaConfig, *, quantization: str, layers: Sequence[nn.Module] = (), output: nn.Module | None = None
) -> LlamaForCausalLM:
    """Quantize a part of a model, as a model that has nothing else; returns that model."""
    with torch.device("meta"):
        shell = LlamaForCausalLM(copy.copy(config))
    shell.model.layers = nn.ModuleList(layers)
    shell.model.embed_tokens = shell.model.norm = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    shell.lm_head = nn.Identity() if output is None else output  # pyright: ignore[reportAttributeAccessIssue]
    quantize(shell, quantization)
    return shell


def _materialize(module: nn.Module, device: torch.device, generator: torch.Generator) -> None:
    """Give a module's parameters memory and values: ones where there is one per channel, small noise in matrices."""
    module.to_empty(device=device)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
        else:
            parameter.data.normal_(std=0.02, generator=generator)
