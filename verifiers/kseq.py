"""SpecTr's k-seq: independent siblings, all tried against the same p."""

import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.acceptance import parts_of
from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.trees import chance_of, normalized
from verifiers.walk import Family, Tried, top_down, without

# rho is searched in [1, k]: right to 1e-7 k; the rule is exact after any number of steps.
_FEW_STEPS, _HALVINGS = (10, 7), (2, 24)  # parts of the interval, and steps
_SMALL = 2**17  # entries of p that ten places of fit into a CPU's cache


class KSeqVerifier(Verifier):
    """K-sequential selection (Sun et al. 2023, arXiv 2310.15141, algorithm 2), level by level.

    k siblings drawn independently from q are tried in order; each is accepted with probability
    min(1, p(x) / (rho q(x))), and p is not updated between them. With b(rho) = sum min(p / rho, q), any rho in [1, k]
    with 1 - (1 - b)^k <= rho b is exact. The smallest such rho accepts most; a search's upper end is used.
    If all are rejected, the next token is drawn from N([p - min(p / rho, q) (1 - (1 - b)^k) / b]+), which does not
    depend on what was drafted. The rule reaches at least (1 - 1/e) of the best possible acceptance; for one child it is
    rejection sampling.

    ``DETERMINISTIC`` siblings are accepted as by ``RejectionVerifier``. Every run of independent siblings between them
    is verified by k-seq, with what is then left of p in the place of p. The number of siblings must not depend on their
    tokens.
    """

    exactness = Exactness.EXACT
    samplings = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID})
    walks_greedily = True

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        return top_down(tree, target_probs, _try_runs, together=True)


def _try_runs(family: Family, weight: Float[Tensor, "batch some"]) -> Tried:
    """Try one child after the other; an independent child with the rho of its run."""
    p, q, tokens = family.p, family.q, family.tokens
    if family.tree.only_law is DraftSampling.IID:
        rho, after = _run(p, q, family.exists.sum(-1), family.most, p)
        chances = chance_of(p.gather(-1, tokens), q.gather(-1, tokens) * rho[..., None] * family.exists)
        return chances, weight, after
    chances, q, laws = [], q.nan_to_num(), family.laws
    rho, after, before = torch.ones_like(p[..., 0]), p, torch.full_like(laws[..., 0], -1)
    following = torch.nn.functional.pad(laws[..., 1:], (0, 1), value=-1)
    for rank in range(family.most):
        token, law = tokens[..., rank], laws[..., rank]
        independent, certain = law == DraftSampling.IID, law == DraftSampling.DETERMINISTIC
        starts, ends = independent & (before != law), independent & (following[..., rank] != law)
        # Whether a run starts anywhere the host does not know, and to look would make it wait.
        new_rho, new_after = _run(
            p, q, (laws[..., rank:] == DraftSampling.IID).cumprod(-1).sum(-1), family.most - rank, family.p
        )
        rho, after = rho.where(~starts, new_rho), after.where(~starts[..., None], new_after)
        drawn = torch.where(independent, rho * q.gather(-1, token[..., None])[..., 0], certain)
        chances.append(chance_of(p.gather(-1, token[..., None])[..., 0], drawn))
        p = after.where(ends[..., None], p)
        p = normalized(without(p, token, certain), family.p).where(certain[..., None], p)
        before = law
    return torch.stack(chances, -1), weight, p


def _run(
    p: Float[Tensor, "*rows vocab"],
    q: Float[Tensor, "*rows vocab"],
    k: Int[Tensor, "*rows"],
    most: int,
    fallback: Float[Tensor, "*rows vocab"],
) -> tuple[Float[Tensor, "*rows"], Float[Tensor, "*rows vocab"]]:
    """Return rho of a run of k <= most independent siblings, and the next token's law if all are rejected."""
    each = k.clamp(min=1).to(p.dtype)
    high = _smallest_rho(p, q, each) if most > 1 else each
    thinned = torch.minimum(p / high[..., None], q)
    b = thinned.sum(-1)
    # 1 - (1 - b)^k, precise where b is small.
    factor = (-torch.expm1(each * torch.log1p(-b.clamp(max=1))) / b).where(b > 0, 0.0)
    return high, normalized((p - thinned * factor[..., None]).clamp(min=0), fallback)


def _smallest_rho(
    p: Float[Tensor, "*rows vocab"], q: Float[Tensor, "*rows vocab"], k: Float[Tensor, "*rows"]
) -> Float[Tensor, "*rows"]:
    """Return an exact rho that is hardly larger than the smallest one.

    Few steps of several places take fewer operations than halving the interval, which is quicker for large tables on a
    CPU.
    """
    ways, steps = _HALVINGS if p.device.type == "cpu" and p.numel() > _SMALL else _FEW_STEPS
    parts = parts_of(k.numel(), (ways - 1) * p.shape[-1])
    if len(parts) == 1:
        return _search(p, q, k, ways, steps)
    p, q, each = p.flatten(0, -2), q.flatten(0, -2), k.flatten()
    found = [_search(p[part], q[part], each[part], ways, steps) for part in parts]
    return torch.cat(found).view(k.shape)


def _search(
    p: Float[Tensor, "*rows vocab"], q: Float[Tensor, "*rows vocab"], k: Float[Tensor, "*rows"], ways: int, steps: int
) -> Float[Tensor, "*rows"]:
    """See ``_smallest_rho``.

    Every step looks at one place or several in the interval that is left, and keeps the part whose upper end is exact
    and whose lower end is not.
    """
    part, place = _parts(ways, steps, k.dtype, k.device)
    span = (k - 1)[..., None, None]
    width, places = span * part, span * place
    low, exponent = torch.ones_like(k)[..., None], k[..., None]
    one = low
    for step in range(steps):
        rho = low + places[..., step, :]
        spent = torch.minimum(q[..., None, :] * rho[..., None], p[..., None, :]).sum(-1)  # rho b
        # 1 - b may fall below 0 by rounding. That does no harm: k is an integer, so the power stays as small.
        fails = torch.addcdiv(one, spent, rho, value=-1).pow_(exponent).add_(spent) < 1
        low = torch.addcmul(low, width[..., step, :], fails.sum(-1, keepdim=True))
    return (low + width[..., -1, :])[..., 0]


@functools.lru_cache(maxsize=16)
def _parts(
    ways: int, steps: int, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "step 1"], Float[Tensor, "step place"]]:
    """Return how long the parts of the interval are at every step, and where they begin, but for the first."""
    with torch.inference_mode(False):
        part = float(ways) ** -torch.arange(1.0, steps + 1, dtype=torch.float64)[:, None]
        place = part * torch.arange(1, ways)
        return part.to(device, dtype), place.to(device, dtype)
