"""Blocks at several places of a text at once, as a block drafter's head is trained."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from drafters.heads.block import BlockConfig


@dataclass(frozen=True, eq=False)
class BlockBatch:
    """The blocks of some anchors, side by side behind the context of their text.

    Attributes:
        tokens: What the slots hold, block after block: the anchor's token, then masks.
        positions: The slots' positions.
        mask: What they may see, additive: of the context what stands before their anchor in its document, and of the
            slots those of their block (the earlier ones and themselves, if the head is causal).
        columns: Which slots predict a token, block by block: for ``logits[:, columns]``.
        labels: The tokens that they predict; 0 beyond the text.
        previous: The tokens in front of those.
        known: Which labels exist: those in the text, and in the anchor's document.
    """

    tokens: Int[Tensor, "batch slot"]
    positions: Int[Tensor, "batch slot"]
    mask: Float[Tensor, "batch 1 slot key"]
    columns: Int[Tensor, "block place"]
    labels: Int[Tensor, "batch block place"]
    previous: Int[Tensor, "batch block place"]
    known: Bool[Tensor, "batch block place"]


def block_batch(
    tokens: Int[Tensor, "batch position"],
    anchors: Int[Tensor, "batch block"],
    config: BlockConfig,
    *,
    dtype: torch.dtype = torch.float32,
    documents: Int[Tensor, "batch position"] | None = None,
    positions: Int[Tensor, "batch position"] | None = None,
) -> BlockBatch:
    """Returns the blocks that begin at some positions of texts.

    Args:
        tokens: The texts.
        anchors: Where blocks begin: the position of each block's root. Its hidden state is not context yet.
        config: The head's.
        dtype: The dtype of the mask.
        documents: Where texts are packed: the number of every token's document. None for one document a row.
        positions: Where texts are packed: the position of every token in its document.
    """
    batch, length = tokens.shape
    blocks, size, device = anchors.shape[1], config.block_size, tokens.device
    slot = torch.arange(size, device=device)
    roots = tokens.gather(1, anchors)[:, :, None]
    filled = torch.where(slot == 0, roots, config.mask_token_id)
    start = anchors if positions is None else positions.gather(1, anchors)

    key = torch.arange(length, device=device)
    context = key < anchors[:, :, None]
    of_anchor = None if documents is None else documents.gather(1, anchors)[:, :, None]
    if documents is not None:
        context = context & (documents[:, None] == of_anchor)
    context = context[:, :, None].expand(-1, -1, size, -1).reshape(batch, blocks * size, length)
    number = torch.arange(blocks * size, device=device)
    own = number[:, None] // size == number // size
    if config.causal:
        own = own & (number[:, None] >= number)
    sees = torch.cat([context, own.expand(batch, -1, -1)], dim=2)
    mask = torch.zeros(sees.shape, dtype=dtype, device=device).masked_fill_(~sees, -torch.inf)

    first = 0 if config.shifted else 1  # the first slot that predicts
    place = torch.arange(config.tokens, device=device)
    at = anchors[:, :, None] + 1 + place
    inside = at.clamp(max=length - 1)
    known = at < length
    if documents is not None:
        known = known & (_taken(documents, inside) == of_anchor)
    return BlockBatch(
        tokens=filled.flatten(1),
        positions=(start[:, :, None] + slot).flatten(1),
        mask=mask[:, None],
        columns=torch.arange(blocks, device=device)[:, None] * size + first + place,
        labels=_taken(tokens, inside).where(known, 0),
        previous=_taken(tokens, (at - 1).clamp(max=length - 1)),
        known=known,
    )


def _taken(
    row: Int[Tensor, "batch position"], at: Int[Tensor, "batch block place"]
) -> Int[Tensor, "batch block place"]:
    return row.gather(1, at.flatten(1)).view_as(at)
