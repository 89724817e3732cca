"""SpecTr's k-seq: independent siblings, all tried against the same p."""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from specdec.types import DraftSampling
from verifiers.families import Family
from verifiers.levels import LevelVerifier
from verifiers.residuals import acceptance, normalized, residual

_HALVINGS = 30  # of the interval [1, k]: rho is then right to 1e-9 k; it is exact after any number of halvings


class KSeqVerifier(LevelVerifier):
    """K-sequential selection (Sun et al. 2023, arXiv 2310.15141, algorithm 2), level by level.

    k siblings drawn independently from q are tried in order; each is accepted with probability
    min(1, p(x) / (rho q(x))), and p is not updated between them. With b(rho) = sum min(p / rho, q), any rho in [1, k]
    with 1 - (1 - b)^k <= rho b is exact. The smallest such rho accepts most; it is found by bisection, whose upper end
    is used.
    If all are rejected, the next token is drawn from N([p - min(p / rho, q) (1 - (1 - b)^k) / b]+), which does not
    depend on what was drafted. The rule reaches at least (1 - 1/e) of the best possible acceptance; for one child it is
    rejection sampling.

    ``DETERMINISTIC`` siblings are accepted as by ``RejectionVerifier``. Every run of independent siblings between them
    is verified by k-seq, with what is then left of p in the place of p. The number of siblings must not depend on their
    tokens.
    """

    laws = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID})

    def _try_children(
        self, family: Family
    ) -> tuple[Float[Tensor, "batch some rank"], Float[Tensor, "batch some vocab"]]:
        """Try one child after the other; an independent child with the rho of its run."""
        p, q, tokens, laws = family.p, family.q, family.tokens, family.laws
        chances = torch.zeros_like(tokens, dtype=p.dtype)
        rho, after, before = torch.ones_like(p[..., 0]), p, None
        for rank in range(tokens.shape[-1]):
            token, law = tokens[..., rank], laws[..., rank]
            starts = (law == DraftSampling.IID) & (before != law if before is not None else True)
            # On the host a look is free, and later runs are rare; elsewhere it would synchronize.
            if starts.device.type != "cpu" or starts.any():
                new_rho, new_after = _run(p, q, laws[..., rank:], family.p)
                rho, after = rho.where(~starts, new_rho), after.where(~starts[..., None], new_after)
            entry = token[..., None]
            divisor = torch.where(law == DraftSampling.IID, rho, 1.0) * q.gather(-1, entry)[..., 0]
            chances[..., rank] = acceptance(p.gather(-1, entry)[..., 0], divisor, law).where(law >= 0, 0.0)
            following = laws[..., rank + 1] if rank + 1 < laws.shape[-1] else torch.full_like(law, -1)
            ends = (law == DraftSampling.IID) & (following != law)
            certain = law == DraftSampling.DETERMINISTIC
            p = after.where(ends[..., None], p)
            p = normalized(residual(p, q, token, law.where(certain, -1)), family.p).where(certain[..., None], p)
            before = law
        return chances, p


def _run(
    p: Float[Tensor, "*rows vocab"],
    q: Float[Tensor, "*rows vocab"],
    laws: Int8[Tensor, "*rows rank"],
    fallback: Float[Tensor, "*rows vocab"],
) -> tuple[Float[Tensor, "*rows"], Float[Tensor, "*rows vocab"]]:
    """Returns rho of the first run of independent siblings, and the next token's law if all of them are rejected."""
    k = (laws == DraftSampling.IID).cumprod(-1).sum(-1).clamp(min=1).to(p.dtype)
    low, high = torch.ones_like(k), k
    if laws.shape[-1] > 1:
        for _ in range(_HALVINGS):
            rho = (low + high) / 2
            b = torch.minimum(p / rho[..., None], q).sum(-1)
            valid = _any_of(b, k) <= rho * b
            low, high = low.where(valid, rho), rho.where(valid, high)
    thinned = torch.minimum(p / high[..., None], q)
    b = thinned.sum(-1)
    factor = (_any_of(b, k) / b).where(b > 0, 0.0)
    return high, normalized((p - thinned * factor[..., None]).clamp(min=0), fallback)


def _any_of(b: Float[Tensor, "*rows"], k: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """Returns 1 - (1 - b)^k, precise where b is small."""
    return -torch.expm1(k * torch.log1p(-b.clamp(max=1)))
