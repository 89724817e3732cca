"""The same block drafter's head for an inflated target, at the cost of a head of that target's width."""

import copy

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from drafters.heads.block import BlockHead
from drafters.heads.bound import move


def widened(head: BlockHead, hidden_size: int) -> BlockHead:
    """Returns a head that computes the same from hidden states and embeddings of which only the first channels count.

    It is for a target inflated by ``specdec.inflate``, which also says how: new channels are zero, what reads them is
    random, and norms are scaled, because they divide by the mean over all channels. There are more attention heads and
    a wider MLP in proportion, whose results are multiplied by zero.

    Args:
        head: The head.
        hidden_size: Width of the inflated target.
    """
    old = head.config
    factor = -(-hidden_size // old.hidden_size)
    config = copy.deepcopy(old)
    config.hidden_size = config.target_hidden_size = hidden_size
    config.intermediate_size = old.intermediate_size * hidden_size // old.hidden_size
    config.num_attention_heads = old.num_attention_heads * factor  # as many query heads per key head as before
    config.num_key_value_heads = (old.num_key_value_heads or old.num_attention_heads) * factor
    config.rms_norm_eps = old.rms_norm_eps * old.hidden_size / hidden_size
    first = next(head.parameters())
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        wide = BlockHead(config)
    move(wide, first.device, first.dtype)
    wide.draft_ids = head.draft_ids
    for module in wide.modules():
        if isinstance(module, Qwen3RMSNorm) and module.weight.shape[0] == old.head_dim:
            module.variance_epsilon = old.rms_norm_eps  # it norms one head, not all channels
    states = len(head.hidden_layers)
    scale = (old.hidden_size / hidden_size) ** 0.5
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            _place(name, wide.get_parameter(name), parameter, states, old.hidden_size, hidden_size, scale)
    wide.requires_grad_(False)
    return wide.eval()


def _place(name: str, wide: Tensor, own: Tensor, states: int, width: int, new_width: int, scale: float) -> None:
    """Put a tensor of a head into its place in the wider one's."""
    if own.shape == wide.shape:
        wide.copy_(own)
    elif own.ndim == 1:
        norm = own.shape[0] == width and name.endswith("norm.weight")
        wide.fill_(1.0 if norm else 0.0)
        wide[: own.shape[0]] = own * scale if norm else own
    else:
        # What writes into the residual stream writes nothing into new channels, and reads nothing of new heads.
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight", "embed_tokens.weight")):
            wide.zero_()
        wide[: own.shape[0], _columns(name, own.shape[1], states, width, new_width)] = own


def _columns(name: str, count: int, states: int, width: int, new_width: int) -> Tensor:
    """Returns where the columns of a weight go: hidden states that stand side by side keep their order."""
    column = torch.arange(count)
    if name == "fc.weight":
        return column // width * new_width + column % width
    if name.endswith(("gate_proj.weight", "confidence_head.proj.weight")) and (
        "markov" in name or "confidence" in name
    ):
        return torch.where(column < width, column, column + new_width - width)  # the hidden state comes first
    return column
