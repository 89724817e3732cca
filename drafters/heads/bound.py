"""A head beside its target: on its device, with what it borrows, for its positions and its tokens."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_Head = TypeVar("_Head", bound=PreTrainedModel)


def move(head: PreTrainedModel, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move a head to a device and cast it, but not the frequencies of its rotary embedding, which stay in float32."""
    nn.Module.to(head, device=device, dtype=dtype)
    body: Any = head.base_model
    body.rotary_emb = type(body.rotary_emb)(head.config).to(device)


def bound(head: _Head, target: PreTrainedModel) -> _Head:
    """Returns the same head on the target's device and in its dtype, with what it borrows from the target.

    The parameters are the head's own where device and dtype are right, so that training goes on in both.

    Args:
        head: A head. Its ``base_model`` has ``embed_tokens`` and it has ``lm_head``; None for what is borrowed.
        target: The target.
    """
    device, dtype = target.device, target.dtype
    fits = all(each.device == device and each.dtype is dtype for each in head.parameters())
    shared = [*head.parameters(), *head.buffers()] if fits else []
    twin: Any = copy.deepcopy(head, {id(each): each for each in shared})
    if not fits:
        twin.zero_grad()  # a head in training was copied with its gradients
        move(twin.requires_grad_(False), device, dtype)
    if twin.base_model.embed_tokens is None:
        twin.base_model.embed_tokens = target.get_input_embeddings()
    if twin.lm_head is None:
        twin.lm_head = target.get_output_embeddings()
    return twin.eval()


def lengthen(head: PreTrainedModel, max_length: int) -> None:
    """Let a head run at so many positions if its rotary embedding is the same whatever the longest position is.

    The number in its files is how long the training texts were.
    """
    config: Any = head.config
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type", "default") in ("default", "linear", "llama3", "yarn"):
        config.max_position_embeddings = max(config.max_position_embeddings, max_length)


def row_of(head: PreTrainedModel, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """Returns what turns a target's token ids into rows of a head's embeddings, which may lack ids of padding."""
    embeddings: Any = head.get_input_embeddings()
    rows: int = embeddings.weight.shape[0]
    return (lambda tokens: tokens.clamp(max=rows - 1)) if rows < vocab_size else (lambda tokens: tokens)
