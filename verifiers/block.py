"""Verification of whole blocks, from the leaves to the root: a token may be saved by those drafted after it."""

from jaxtyping import Float
from torch import Tensor

from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.thresholds import has_thresholds, laws_by_thresholds
from verifiers.trees import ratios
from verifiers.walk import leaf_to_root


class TraversalVerifier(Verifier):
    """Traversal verification of trees (Weng et al. 2025, arXiv 2505.12398, algorithm 2).

    Nodes are tried depth first: children in the order in which they were drawn, a node after everything below it. A
    node v comes with a weight w and its p; its child x gets the weight min(1, w p(x) / q(x)). If nothing in the child's
    subtree is accepted, p becomes N([w p - q]+), w becomes Z / (Z + 1 - w) with Z = sum [w p - q]+, and the next child
    is tried. After the last child, v itself is accepted with probability w (the root always), and the next token is
    drawn from p. So the path ends in a node's subtree with probability w, over the drafts, whatever the subtree's
    shape. On a chain the rule is block verification; on trees it accepts more than ``RejectionVerifier``, though it is
    not optimal there.

    The law of every child says what its q is, so siblings may mix laws.
    """

    exactness = Exactness.EXACT
    samplings = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})
    walks_greedily = True

    def along(self, p: Tensor, q: Tensor, tokens: Tensor, law: DraftSampling) -> Tensor:
        return ratios(p, q, tokens).cumprod(1).cummin(1).values.clamp(max=1)

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        if has_thresholds(tree):
            return laws_by_thresholds(tree, target_probs, leaf_to_root=True)
        return leaf_to_root(tree, target_probs)


class BlockVerifier(TraversalVerifier):
    """Block verification of chains (Sun et al. 2024, arXiv 2403.10444, algorithm 2).

    Let w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)). Position i < n is acceptable with probability
    h_i = Z_i / (Z_i + 1 - w_i), where Z_i = sum [w_i p - q]+ runs over the token after it, and the last position with
    h_n = w_n, all independently. The path ends at the last acceptable position, even if earlier ones are not. The next
    token is drawn from N([w_i p - q]+), or from p after the last position. A path then reaches position i with
    probability w_i. No lossless rule that looks at one chain can reach more, and the token-level rule never does.
    At temperature 0, and for ``DETERMINISTIC`` drafts (one-hot q), the rule equals ``RejectionVerifier``.
    """

    chain_only = True
