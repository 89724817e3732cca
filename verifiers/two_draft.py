"""Two independent drafts verified together: the optimum of Khisti et al., in closed form and for any vocabulary."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.trees import chance_of
from verifiers.walk import Family, Tried, top_down


class TwoDraftVerifier(Verifier):
    """Optimal verification of two independent siblings, level by level (Khisti et al. 2024, arXiv 2410.18234).

    The canonical decomposition: of x1, x2 ~ q one is selected, with probabilities such that the selected token follows
    some law p_I, and it is then accepted with probability min(1, p / p_I); otherwise the next token is drawn from
    N([p - p_I]+). The best p_I accepts with probability 1 + min_S p(S) - q(S)^2, which no lossless rule exceeds.

    The paper leaves the selection to a linear program. Here it has a closed form (``share_out``) after a sort, in
    O(V log V) and without iteration.

    More than two ``IID`` siblings are taken in pairs; each pair gets what the earlier ones have left of p. All other
    siblings are tried one by one, as by ``RejectionVerifier``, so siblings may mix laws.
    """

    exactness = Exactness.EXACT
    samplings = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})
    walks_greedily = True

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        return top_down(tree, target_probs, try_in_pairs)


def try_in_pairs(family: Family, weight: Float[Tensor, "batch some"]) -> Tried:
    """Try the children of some nodes: independent ones in pairs, the others one by one (``walk.TryChildren``)."""
    tokens, laws, only = family.tokens, family.laws, family.tree.only_law
    left, chances = weight[..., None] * family.p, torch.zeros_like(tokens, dtype=weight.dtype)
    paired = torch.zeros_like(family.nodes, dtype=torch.bool)  # the child is the second of a pair
    for rank, drawn in enumerate(family.drawn_from()):
        token, some = tokens[..., rank, None], ~paired
        mass, slack = left, 1 - weight
        alone = chance_of(mass.gather(-1, token), drawn.gather(-1, token))[..., 0]
        chances[..., rank] = alone.where(some, chances[..., rank])
        # Where there is no child, or it is the second of a pair, nothing is taken away.
        left = (mass - drawn).clamp_(min=0).where(some[..., None], mass)
        paired = torch.zeros_like(some)
        # Whether a pair starts anywhere the host does not know, unless all siblings have one law.
        if rank + 1 < family.most and (rank % 2 == 0 if only is DraftSampling.IID else only is None):
            paired = some & (laws[..., rank] == DraftSampling.IID) & (laws[..., rank + 1] == DraftSampling.IID)
            first, second, left_by_pair = share_out(mass, family.q, token[..., 0], tokens[..., rank + 1])
            chances[..., rank] = first.where(paired, chances[..., rank])
            given_failure = (second / (1 - first)).where(first < 1, 0.0).clamp(max=1)
            chances[..., rank + 1] = given_failure.where(paired, 0.0)
            left = left_by_pair.where(paired[..., None], left)
        z = left.sum(-1)
        tiny = torch.finfo(z.dtype).tiny
        # Added in this order, because z may be far below the precision of 1.
        left = (left / (z + slack).clamp_(min=tiny)[..., None]).where(some[..., None], mass)
        weight = left.sum(-1)
    return chances, weight, left


def share_out(
    mass: Float[Tensor, "*rows vocab"],
    q: Float[Tensor, "*rows vocab"],
    first: Int[Tensor, "*rows"],
    second: Int[Tensor, "*rows"],
) -> tuple[Float[Tensor, "*rows"], Float[Tensor, "*rows"], Float[Tensor, "*rows vocab"]]:
    r"""Return the best acceptance of two independent draws from q, if token x may be emitted ``mass(x)`` in total.

    The derivation is ours; that alpha is the optimum is from Khisti et al. 2024 (arXiv 2410.18234).

    Tokens are sorted by mass / q. With T and M the cumulated q and mass, alpha = 1 + min(0, min M - T^2). A selection
    of one of the two drawn tokens can have the law s exactly if s(S) >= q(S)^2 for all sets S, and one with s / q
    increasing exactly if its cumulated values A are at least T^2. That holds for s = clamp(mass, low q, high q) with
    sum [low q - mass]+ = 1 - alpha and sum [mass - high q]+ = sum(mass) - alpha, which accepts alpha.

    The token that is later in the order is selected, unless it hands over to the earlier one. It does so step by step
    over the tokens between the two, step b with probability tau_b, and must succeed at all of them. The mass that
    crosses step b has to be D_b = A_b - T_b^2 in total, so tau_b L_b R_b = D_b / 2 with L_b = q_b + tau_{b-1} L_{b-1}
    and R_b = q_{b+1} + tau_{b+1} R_{b+1}. This is solved token by token: with e_b = (s_b / q_b - T_b - T_{b-1}) / 2 the
    unknowns decouple to

        L_b^2 - (q_b - e_b) L_b = D_b / 2 = R_b^2 - (q_{b+1} + e_{b+1}) R_b,

    and tau_b <= 1 because (q_b - e_b) + (q_{b+1} + e_{b+1}) >= 0 where s / q increases. It computes in float64,
    because sums over the vocabulary are compared with single tokens.

    Returns the probabilities of accepting the first and the second token (of equal ones the first alone), and what is
    left of the mass, which is w p.
    """
    ratio = (mass.double() / q.double()).where(q > 0, torch.inf)
    # Stable: equal rows must be ordered alike.
    order = ratio.argsort(dim=-1, stable=True)
    m, d = (table.double().gather(-1, order) for table in (mass, q))
    d = d / d.sum(-1, keepdim=True)
    drafted = d > 0
    below, spent = d.cumsum(-1).clamp(max=1), m.cumsum(-1)
    excess = (below.square() - spent).amax(-1, keepdim=True).clamp(min=0)  # 1 - alpha
    low = ((excess + spent) / below).where(drafted, torch.inf).amin(-1, keepdim=True)
    # Summed from the end, where the sums are small.
    above, unspent = (table.flip(-1).cumsum(-1).flip(-1) for table in (d, m))
    lacking = (spent[..., -1:] - (1 - excess)).clamp(min=0)
    high = ((unspent - lacking) / above).where(drafted, 0.0).amax(-1, keepdim=True)
    high = torch.maximum(high, low)  # matters only where no drafted token has mass left over
    selected = torch.minimum(torch.maximum(m, low * d), high * d)

    earlier = torch.nn.functional.pad(below[..., :-1], (1, 0))
    crossing = (selected.cumsum(-1) - below.square()).clamp(min=0)[..., :-1] / 2
    tilt = ((selected / d).where(drafted, 0.0) - below - earlier) / 2
    left_of = torch.maximum(_positive_root((d - tilt)[..., :-1], crossing), d[..., :-1])
    right_of = torch.maximum(_positive_root((d + tilt)[..., 1:], crossing), d[..., 1:])
    tau = (crossing / (left_of * right_of)).where(drafted[..., 1:], 0.0).clamp(max=1)

    place_first, place_second = (
        (order == token[..., None]).byte().argmax(-1, keepdim=True) for token in (first, second)
    )
    step = torch.arange(tau.shape[-1], device=tau.device)
    between = (step >= torch.minimum(place_first, place_second)) & (step < torch.maximum(place_first, place_second))
    handed = torch.where(between, tau, 1.0).prod(-1, keepdim=True)
    accepted = (m / selected).clamp(max=1).where(selected > 0, 0.0)
    share_first = torch.where(place_first < place_second, handed, 1 - handed).where(place_first != place_second, 1.0)
    first_chance = accepted.gather(-1, place_first) * share_first
    second_chance = accepted.gather(-1, place_second) * (1 - share_first)
    left = (mass - (high * (q / q.sum(-1, keepdim=True))).to(mass.dtype)).clamp(min=0)
    return first_chance[..., 0].to(mass.dtype), second_chance[..., 0].to(mass.dtype), left


def _positive_root(b: Float[Tensor, "..."], c: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the x >= 0 with x^2 - b x = c, for c >= 0; precise where b is negative."""
    root = (b.square() + 4 * c).sqrt()
    return torch.where(b >= 0, (b + root) / 2, 2 * c / (root - b))
