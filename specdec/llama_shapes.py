"""Sizes of Llama models by name, to which smaller ones are inflated. Needs no PyTorch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """What the cost of a Llama model depends on, besides its vocabulary; names as in ``LlamaConfig``."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int


SHAPES = {
    "110m": LlamaShape(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12, head_dim=64,
        intermediate_size=2048,
    ),
    "1b": LlamaShape(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        intermediate_size=8192,
    ),
    "8b": LlamaShape(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=14336,
    ),
}  # fmt: skip
"""Shapes by name: a Llama-2-like model of 110M parameters, Llama-3.2-1B and Llama-3-8B. The vocabulary stays the
model's, so with a small one there are fewer parameters than the name says (110m with 4,096 tokens, tied: 88M)."""


def shape_of(shape: str | Mapping[str, int] | LlamaShape) -> LlamaShape:
    """Returns a shape given by name or by its numbers. Raises ValueError: there is no such shape."""
    names = [field.name for field in fields(LlamaShape)]
    if isinstance(shape, LlamaShape):
        return shape
    if isinstance(shape, str) and shape in SHAPES:
        return SHAPES[shape]
    if isinstance(shape, Mapping) and set(shape) == set(names):
        return LlamaShape(**shape)
    raise ValueError(f"inflate={shape!r}: give one of {', '.join(SHAPES)}, or exactly the numbers {', '.join(names)}")
