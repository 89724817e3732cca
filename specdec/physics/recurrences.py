"""The sizes of layers that keep a state of constant size per row: gated delta nets, Mamba, short convolutions."""

from collections.abc import Mapping
from typing import Any

from specdec.physics.shape import Recurrence


def read_recurrence(given: Mapping[str, Any], kind: str, layer: str, hidden: int) -> Recurrence | None:
    """Returns the recurrence of a layer; None if it has none.

    Args:
        given: The configuration.
        kind: Its ``model_type``.
        layer: The layer's entry in ``layer_types``.
        hidden: Width of the residual stream.

    Raises:
        ValueError: The layer is of a kind whose sizes are not known here.
    """
    if layer == "linear_attention" and given.get("linear_num_value_heads"):
        return _delta_net(given, kind, hidden)
    if layer == "conv" and given.get("conv_L_cache"):
        return _short_convolution(given, hidden)
    if layer in ("mamba", "linear_attention") and kind in ("bamba", "granitemoehybrid"):
        return _mamba2(given, hidden)
    if layer in ("linear_attention", "mamba", "conv", "recurrent", "hybrid", "mamba2", "rwkv"):
        raise ValueError(f"the sizes of a {layer!r} layer of model_type {kind!r} are not known here")
    return None


def _delta_net(given: Mapping[str, Any], kind: str, hidden: int) -> Recurrence:
    """Qwen3-Next's gated delta net: per head a matrix of keys by values."""
    heads = given["linear_num_value_heads"]
    keys = given["linear_num_key_heads"] * given["linear_key_head_dim"]
    values = heads * given["linear_value_head_dim"]
    mixed, kernel = 2 * keys + values, given["linear_conv_kernel_dim"]
    projections = hidden * (mixed + values + 2 * heads) + values * hidden
    matrix = heads * given["linear_key_head_dim"] * given["linear_value_head_dim"]
    # Decay, the product with the key, the rank-one update, and the product with the query: 7 operations per number.
    return Recurrence(weights=projections + mixed * kernel, state=matrix + mixed * kernel, flops=7 * matrix)


def _mamba2(given: Mapping[str, Any], hidden: int) -> Recurrence:
    """Mamba-2 as in Bamba and Granite: per head a matrix of its width by the state's."""
    heads, groups = given["mamba_n_heads"], given["mamba_n_groups"]
    depth, kernel = given["mamba_d_state"], given["mamba_d_conv"]
    inner = int(given["mamba_expand"] * hidden)
    mixed = inner + 2 * groups * depth
    weights = hidden * (inner + mixed + heads) + mixed * kernel + inner * hidden
    matrix = inner * depth
    return Recurrence(weights=weights, state=matrix + mixed * kernel, flops=5 * matrix)


def _short_convolution(given: Mapping[str, Any], hidden: int) -> Recurrence:
    """LFM2's gated convolution over a few positions."""
    kernel = given["conv_L_cache"]
    return Recurrence(weights=hidden * (3 * hidden + kernel + hidden), state=hidden * kernel, flops=2 * hidden * kernel)
