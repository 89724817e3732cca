"""Noise that target and drafter share: drafter-invariant decoding (Daliri, Musco & Suresh 2024, arXiv 2408.07978)."""

import itertools
import math

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


def coupled_acceptance(
    p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], children: int
) -> Float[Tensor, " vocab"]:
    """Returns the probability of each token to be drawn by the target and be among the drafter's first ``children``.

    Let token x arrive at time t in the target's race, a = p(y) / p(x) and c = max(a, q(y) / q(x)). Another token y
    comes after x in both races with probability exp(-t c), and after it in the target's race but before it in the
    drafter's with probability exp(-t a) - exp(-t c). The integral over t of the sums of products is a sum of fractions.
    One child gives 1 / Σ_y max(p(y) / p(x), q(y) / q(x)) (Daliri et al., proof of theorem 1). It computes in float64;
    over V tokens there are about (2 V)^(children - 1) terms.
    """
    result = torch.zeros(len(p), dtype=torch.float64)
    for x in range(len(p)):
        if p[x] == 0 or q[x] == 0:
            continue
        a = (p.double() / p[x].double()).tolist()
        c = torch.maximum(p.double() / p[x].double(), q.double() / q[x].double()).tolist()
        others = [y for y in range(len(p)) if y != x]
        behind = 1 + sum(c[y] for y in others)
        total = 0.0
        for before in range(min(children, len(p))):
            for chosen in itertools.combinations(others, before):
                gains = [c[y] - a[y] for y in chosen]
                if min(gains, default=1.0) <= 0:
                    continue  # the first product has a factor zero
                for signs in itertools.product((0, 1), repeat=before):
                    rate = behind - math.fsum(gain for gain, kept in zip(gains, signs, strict=True) if not kept)
                    total += (-1) ** sum(signs) / rate
        result[x] = total
    return result
