"""Distances of a round's first token from the target's distribution: the cost of a lossy rule, step by step.

Even an exact rule does not emit from p once the draft is given: the *average* over all drafts in that context is p, and
is what is compared with it. Of siblings that were chosen without randomness there is one draft; one sampled sibling may
be any token; several are drawn again, many times, without the deeper levels, where p and q are not known below tokens
that were not drafted (rules that decide level by level do not see the difference).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from experiments.tracing.compressed import DROPPED, pack, unpack
from specdec.checks.outcomes import emitted_law
from specdec.interfaces import Verifier
from specdec.random import draw
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling

REDRAWS = 256
"""The number of times that several siblings are drawn again."""
_MOST_TOKENS = 512  # all others are treated as one token, which hides a little of the distance


class Distance(NamedTuple):
    """The distance of a round's first token's distribution from p.

    Attributes:
        tv: Total variation. Where siblings were drawn again, an estimate whose expectation is at most that, and 0 for
            an exact rule; it may be negative. None if it cannot be known.
        kl: Kullback-Leibler distance in nats; None where it is infinite, and where siblings were drawn again.
    """

    tv: float | None
    kl: float | None


def distances_of(
    verifier: Verifier, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]
) -> list[Distance]:
    """The distance in every row's context, of a draft as a trace keeps it."""
    return first_token_distances(verifier, *unpack(pack(tree, target_probs, dropped=DROPPED)))


def first_token_distances(
    verifier: Verifier, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], *, seed: int = 0
) -> list[Distance]:
    """The distance in every row's context; of p in float64, to see small ones."""
    p = target_probs[:, 0]
    given = emitted_law(verifier, tree, target_probs)
    generator = torch.Generator().manual_seed(seed)
    distances = []
    for row in range(len(p)):
        children = [child for child in tree.children[row, 0].tolist() if child >= 0]
        laws = [DraftSampling(int(tree.law[row, child])) for child in children]
        if all(law is DraftSampling.DETERMINISTIC for law in laws):
            distances.append(_distance(given[row], p[row]))
        elif DraftSampling.COUPLED in laws or tree.draft_probs is None:
            distances.append(Distance(None, None))
        else:
            tokens = [int(tree.tokens[row, child]) for child in children]
            distances.append(_of_sampled(verifier, p[row], tree.draft_probs[row, 0], laws, tokens, generator))
    return distances


def _distance(emitted: Float[Tensor, " vocab"], p: Float[Tensor, " vocab"]) -> Distance:
    kl = float((torch.xlogy(emitted, emitted) - torch.xlogy(emitted, p)).sum())
    return Distance(0.5 * float((emitted - p).abs().sum()), max(0.0, kl) if math.isfinite(kl) else None)


def _of_sampled(
    verifier: Verifier, p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], laws: list[DraftSampling],
    tokens: list[int], generator: torch.Generator,
) -> Distance:  # fmt: skip
    """Half of the draws of several siblings choose the tokens to look at, and the other half measures them."""
    p, q, tokens = _fewer(p, q, tokens)
    if len(laws) == 1:
        every = q.nonzero()
        return _distance((q[every] * _first_level(verifier, p, q, laws, every)).sum(0), p)
    whole, rows = q.expand(REDRAWS, -1), torch.arange(REDRAWS)
    drawn, left = torch.tensor(tokens).repeat(REDRAWS, 1), whole.clone()
    for rank, law in enumerate(laws):
        if law is not DraftSampling.DETERMINISTIC:
            uniform = torch.rand(REDRAWS, generator=generator, dtype=torch.float64)
            drawn[:, rank] = draw(whole if law is DraftSampling.IID else left, uniform)
        left[rows, drawn[:, rank]] = 0
    emitted = _first_level(verifier, p, q, laws, drawn)
    halves = [emitted[: REDRAWS // 2].mean(0) - p, emitted[REDRAWS // 2 :].mean(0) - p]
    return Distance(0.5 * float(sum(b[a > 0].sum() for a, b in (halves, halves[::-1]))), None)


def _fewer(
    p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], tokens: list[int]
) -> tuple[Float[Tensor, " some"], Float[Tensor, " some"], list[int]]:
    """P and q on the most probable tokens and the given ones, with all others as one; and the given tokens' new ids."""
    if len(p) <= _MOST_TOKENS:
        return p, q, tokens
    weight = torch.maximum(p, q)
    weight[tokens] = torch.inf
    ids = weight.topk(_MOST_TOKENS - 1).indices
    p, q = (torch.cat([row[ids], (row.sum() - row[ids].sum()).clamp(min=0)[None]]) for row in (p, q))
    return p, q, [int((ids == token).nonzero()) for token in tokens]


def _first_level(
    verifier: Verifier, p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], laws: list[DraftSampling],
    tokens: Int[Tensor, "batch rank"],
) -> Float[Tensor, "batch vocab"]:  # fmt: skip
    """The distribution of the first token, given each of some draws of the root's children."""
    shape = TreeShape.branching(len(laws))
    size = (len(tokens), shape.num_nodes + 1, len(p))
    tree = DraftTree.from_shape(
        shape,
        torch.nn.functional.pad(tokens, (1, 0)),
        sampling=torch.tensor([0, *laws], dtype=torch.int8).expand(size[:2]),
        draft_probs=q.expand(size),
    )
    return emitted_law(verifier, tree, p.expand(size))
