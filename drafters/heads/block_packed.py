"""Blocks at many anchors of packed text, in one forward of a block drafter's head: what its training runs."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from drafters.heads.block import BlockHead
from drafters.heads.block_config import BlockConfig
from drafters.heads.training import Anchors, TextBatch, additive


def packed_blocks(
    head: BlockHead,
    embed: nn.Module,
    states: list[Float[Tensor, "row position hidden"]],
    batch: TextBatch,
    anchors: Anchors,
) -> Float[Tensor, "anchor place hidden"]:
    """Returns the normed outputs of all slots, for a block at every anchor, as many in every row.

    Args:
        embed: The input embeddings, or those that the head borrows.
        states: The target's hidden states that the head reads.
    """
    rows, length = batch.tokens.shape
    size, count = head.config.block_size, len(anchors.index) // rows
    cache = DynamicCache()
    head(features=torch.cat(states, -1), position_ids=batch.positions, past_key_values=cache)
    roots = anchors.index.view(rows, count)
    slots = torch.full((rows, count, size), head.config.mask_token_id, device=roots.device)
    slots[:, :, 0] = batch.tokens.flatten()[roots]
    ahead = torch.arange(size, device=roots.device)
    place = roots - torch.arange(rows, device=roots.device)[:, None] * length
    masks = {
        kind: additive(block_mask(place, batch.documents, head.config, windowed=kind != "full_attention"), head.dtype)
        for kind in dict.fromkeys(head.config.layer_types or ())
    }
    found = head.run(
        embed(slots.flatten(1)),
        places=size,
        position_ids=(batch.positions.flatten()[roots][:, :, None] + ahead).flatten(1),
        attention_mask=masks,
        cache=cache,
    )
    return found[-1].unflatten(1, (count, size)).flatten(0, 1)


def block_mask(
    places: Int[Tensor, "row block"], documents: Int[Tensor, "row position"], config: BlockConfig, *, windowed: bool
) -> Bool[Tensor, "row slot key"]:
    """Return the visibility of the slots of packed blocks: their document before the anchor, and their own block.

    With three positions, an anchor at 2 and two slots, the keys are the positions 0, 1, 2 and then the slots: both
    slots see 0, 1 and both slots (a causal block's first slot does not see the second).

    Args:
        places: Where the anchors are in their rows.
        config: Says what slots see.
        windowed: Whether the mask is that of sliding layers.
    """
    (rows, blocks), size = places.shape, config.block_size
    length = documents.shape[1]
    own = documents.gather(1, places)
    before = torch.arange(length, device=places.device) < places[:, :, None]
    context = before & (documents[:, None] == own[:, :, None])
    context = context[:, :, None].expand(rows, blocks, size, length)
    seen = config.block(size, places.device).in_layers(windowed=windowed)
    within, depth = seen.ancestors[0], seen.depth[0]  # of the root's for all slots where windows count from the root
    if windowed and config.sliding_window is not None:
        stand = places[:, :, None] + depth
        context = context & (stand[..., None] - torch.arange(length, device=places.device) < config.sliding_window)
        within = within & (depth[:, None] - depth < config.sliding_window)
    context = context.flatten(1, 2)
    slot = torch.arange(blocks * size, device=places.device)
    together = slot[:, None] // size == slot // size
    together = together & within.repeat(blocks, blocks)
    return torch.cat([context, together.expand(rows, -1, -1)], -1)
