"""Is a verifier exact? Its output distribution by enumeration, in float64, for a tiny vocabulary and tree.

Tables of p and q stand for the models (``tables``). Every draft that a drafter could draw from q is one row of a batch,
with its probability (``drafts``). The verifier's two laws then give the exact joint distribution of the output, with no
sampling noise. A rule is exact if that distribution equals the target's to rounding (total variation below 1e-12). Its
expected number of accepted tokens can be compared with other rules' on the same drafts::

    tables = Tables.random(4, 2, seed=0)
    result = enumerate_outcome(MyVerifier(), tables, TreeShape.branching(2, 2), DraftSampling.WITHOUT_REPLACEMENT)
    result.tv, result.expected_accepted

A rule that is ``EXACT_WRT`` another distribution is compared with that one, and ``target_tv`` says how far it is from
the target. With ``noise = SHARED`` nothing is left to enumerate: see ``specdec.checks.shared``.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.checks.drafts import Samplings, WeightedDrafts, check_drafts, enumerate_drafts
from specdec.checks.tables import Tables
from specdec.interfaces import Verifier
from specdec.tree import DraftTree, TreeShape


@dataclass(frozen=True)
class Outcome:
    """The output that verifying drafts leads to.

    Attributes:
        joint: Joint distribution of the next depth + 1 tokens, flat. Where a round emits fewer, the rest is drawn from
            the distribution that the rule states (``Verifier.stated_law``).
        tv: Total variation between ``joint`` and the distribution that the rule states: the target's, unless the rule
            is ``EXACT_WRT`` another.
        target_tv: Total variation between ``joint`` and the target's distribution.
        expected_accepted: Expected number of accepted draft tokens in a round.
    """

    joint: Float[Tensor, " output"]
    tv: float
    target_tv: float
    expected_accepted: float


def outcome(verifier: Verifier, tables: Tables, drafts: WeightedDrafts) -> Outcome:
    """Return the exact joint distribution of the output when a rule verifies these drafts (see ``check_drafts``)."""
    tree, vocab = drafts.tree, tables.vocab
    check_drafts(verifier, tree, drafts.target_probs)
    laws = verifier.laws(tree, drafts.target_probs)
    emitted = [torch.zeros(vocab ** (depth + 1), dtype=torch.float64) for depth in range(tree.max_depth + 1)]
    for node in range(tree.width):
        weight = drafts.probability * laws.stop[:, node]
        some = weight != 0
        if not some.any():
            continue
        next_law = laws.after(torch.full_like(tree.tokens[:, 0], node))
        index = drafts.prefixes[some, node, None] * vocab + torch.arange(vocab)
        depth = int(tree.depth[0, node])
        emitted[depth].index_add_(0, index.flatten(), (weight[some, None] * next_law[some]).flatten())
    stated = tables.stated(verifier)
    joint = emitted[0]
    for depth in range(1, tree.max_depth + 1):
        joint = (joint[:, None] * stated.p[depth]).flatten() + emitted[depth]
    return Outcome(
        joint=joint,
        tv=0.5 * float((joint - stated.joint(tree.max_depth + 1)).abs().sum()),
        target_tv=0.5 * float((joint - tables.joint(tree.max_depth + 1)).abs().sum()),
        expected_accepted=float((drafts.probability[:, None] * laws.stop * tree.depth).sum()),
    )


def emitted_law(
    verifier: Verifier, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]
) -> Float[Tensor, "batch vocab"]:
    """Return the distribution of the first token that a round emits, given the tree.

    For an exact rule, its average over all trees that could have been drawn is p at the root.
    """
    laws = verifier.laws(tree, target_probs)
    at_root = laws.after(torch.zeros_like(tree.tokens[:, 0]))
    # Where no path ends at the root, its residual may be anything.
    first_law = torch.where(laws.stop[:, :1] > 0, laws.stop[:, :1] * at_root, 0.0)
    through = torch.where(tree.ancestors, laws.stop[..., None], 0.0).sum(1)
    return first_law.scatter_add(1, tree.tokens, through.where((tree.depth == 1) & tree.valid, 0.0))


def enumerate_outcome(verifier: Verifier, tables: Tables, shape: TreeShape, laws: Samplings, **options: Any) -> Outcome:
    """Return ``outcome`` of all drafts; the arguments are those of ``enumerate_drafts``."""
    drafts = enumerate_drafts(tables, shape, laws, leaf_probs=verifier.needs_leaf_probs, **options)
    return outcome(verifier, tables, drafts)
