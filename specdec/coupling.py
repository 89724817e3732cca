"""Noise that target and drafter share: drafter-invariant decoding (Daliri, Musco & Suresh 2024, arXiv 2408.07978)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.random import shared_noise
from specdec.tree import DraftTree


def race(weights: Float[Tensor, "*rows vocab"], noise: Float[Tensor, "*#rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """Returns how early each token arrives in a race, the earlier, the larger: weight / noise, 0 for never.

    With exponential noise the first token to arrive is a draw from the weights, and the first k are k draws without
    replacement. The order is that of log weight + Gumbel noise (Maddison et al. 2014, arXiv 1411.0030).
    """
    return weights / noise


def winners(probs: Float[Tensor, "*rows vocab"], noise: Float[Tensor, "*#rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """Returns one-hot rows: the token that the noise draws from each row. Ties go to the lowest id; NaN stays NaN."""
    earliest, token = race(probs, noise).max(-1, keepdim=True)
    # The quotient is 1, except in rows that are not a distribution.
    return torch.zeros_like(probs).scatter_(-1, token, earliest / earliest)


def decided(
    target_probs: Float[Tensor, "batch node vocab"],
    tree: DraftTree,
    keys: Int[Tensor, " batch"],
    lengths: Int[Tensor, " batch"],
) -> Float[Tensor, "batch node vocab"]:
    """Returns what the target draws after every node with the noise of the next position, as one-hot rows.

    Nodes of one depth share their noise, whatever path they are on; ``lengths`` are the positions of the roots.
    """
    steps = torch.arange(1, tree.max_depth + 2, device=lengths.device)
    noise = shared_noise(keys, lengths[:, None] + steps, target_probs.shape[2])
    if tree.width > 1:
        noise = noise.gather(1, tree.depth[..., None].expand_as(target_probs))
    return winners(target_probs, noise)
