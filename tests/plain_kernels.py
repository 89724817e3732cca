"""The definitions in plain torch of the Triton kernels between a forward's products."""

import torch
from torch import Tensor
from torch.nn import functional

from specdec.kernels import Destination

HeadNorm = tuple[Tensor | None, float, bool, float]


def plain_norm(x: Tensor, weight: Tensor | None, eps: float, rounds: bool, offset: float) -> Tensor:
    """The definition of ``specdec.kernels.layers.norm``."""
    numbers = x.float()
    numbers = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + eps)
    if rounds:
        numbers = numbers.to(x.dtype).float()
    return (numbers if weight is None else numbers * (weight.float() + offset)).to(x.dtype)


def plain_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, rounds: bool, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum, and the sum, in plain torch. The sum is rounded to its dtype before its norm."""
    total = x + residual
    return plain_norm(total, weight, eps, rounds, offset), total


def plain_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The definition of ``gated``, which rounds the activation to its dtype."""
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def plain_rotate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosines: Tensor,
    sines: Tensor,
    query_norm: HeadNorm | None,
    key_norm: HeadNorm | None,
    destination: Destination | None,
) -> tuple[Tensor, Tensor]:
    """Return queries and keys: (a, b) becomes (a cos - b sin, b cos + a sin), each product rounded before the sum."""

    def turned(x: Tensor, norm: HeadNorm | None) -> Tensor:
        if norm is not None:
            x = plain_norm(x, *norm)
        low, high = x.chunk(2, dim=-1)
        return x * cosines + torch.cat([-high, low], dim=-1) * sines

    new_query, new_key = turned(query, query_norm), turned(key, key_norm)
    if destination is not None:
        destination.keys[destination.rows, destination.cells] = new_key.transpose(1, 2)
        destination.values[destination.rows, destination.cells] = value.transpose(1, 2)
    return new_query, new_key
