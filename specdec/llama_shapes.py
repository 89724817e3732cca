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


_SIZES = {  # in the order of the fields
    "110m": (768, 12, 12, 12, 64, 2048),
    "1b": (2048, 16, 32, 8, 64, 8192),
    "8b": (4096, 32, 32, 8, 128, 14336),
}
SHAPES = {name: LlamaShape(**dict(zip(LlamaShape.__annotations__, each, strict=True))) for name, each in _SIZES.items()}
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
