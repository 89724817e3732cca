"""The same head for an inflated target (``specdec.inflate``): it computes the same, at the cost of a wider head."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from drafters.heads.bound import move
from drafters.heads.eagle import EagleHead
from drafters.heads.eagle3 import Eagle3Head


def widened(head: EagleHead | Eagle3Head, width: int) -> EagleHead | Eagle3Head:
    """Returns a head for hidden states of a larger width, of which only the first channels carry signal.

    New channels and new attention heads are zero. What an RMSNorm divides by shrinks with the share of channels that
    carry signal, so its weights shrink likewise.

    Args:
        head: The head; it is not changed.
        width: The width of the inflated target's hidden states.

    Raises:
        ValueError: The head's sizes do not grow to whole numbers.
    """
    factor = width / head.captured_width
    config: Any = copy.deepcopy(head.config)
    groups = config.num_attention_heads // config.num_key_value_heads
    config.hidden_size = round(config.hidden_size * factor)
    config.intermediate_size = round(config.intermediate_size * factor)
    config.num_key_value_heads = max(config.hidden_size // (config.head_dim * groups), config.num_key_value_heads)
    config.num_attention_heads = config.num_key_value_heads * groups
    config.rms_norm_eps = config.rms_norm_eps / factor
    if config.hidden_size != head.config.hidden_size * factor:
        raise ValueError(
            f"the head's width {head.config.hidden_size} does not grow by {factor:g}, as the inflated target's did, to "
            f"a whole number: inflate the target to another width"
        )
    larger = head.like(config, captured_width=width)
    with torch.no_grad():
        for name, new in larger.named_parameters():
            old = head.get_parameter(name)
            scale = factor**-0.5 if isinstance(larger.get_submodule(name.rpartition(".")[0]), _norms(larger)) else 1.0
            new.copy_(_placed(old.detach() * scale, new.shape, _blocks(name, head)))
    move(larger, head.device, head.dtype)
    return larger.eval()


def _placed(old: Tensor, shape: torch.Size, blocks: int) -> Tensor:
    """Returns a tensor of a larger shape with an old one at the beginning of every one of ``blocks`` parts of it."""
    new = old.new_zeros(shape)
    parts, rooms = old.chunk(blocks, dim=-1), new.chunk(blocks, dim=-1)
    for part, room in zip(parts, rooms, strict=True):
        room[tuple(slice(size) for size in part.shape)] = part
    return new


def _blocks(name: str, head: EagleHead | Eagle3Head) -> int:
    """Returns how many states lie side by side in what a weight reads."""
    if name.startswith(("model.fusion.linear.weight", "model.fusion.norm.weight")):
        return head.captured
    if name == "model.fc.weight":
        return 2
    first = "model.layers.0.self_attn."
    pair = isinstance(head, Eagle3Head) and name in {f"{first}{part}_proj.weight" for part in "qkv"}
    return 2 if pair else 1


def _norms(head: nn.Module) -> tuple[type[nn.Module], ...]:
    return tuple({type(module) for module in head.modules() if type(module).__name__.endswith("RMSNorm")})
