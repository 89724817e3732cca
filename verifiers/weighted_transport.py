"""Traversal verification with siblings taken together: at every node the most that a level can accept."""

from jaxtyping import Float
from torch import Tensor

from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.transport import try_by_program
from verifiers.two_draft import try_in_pairs
from verifiers.walk import leaf_to_root

SOLVERS = {"pairs": try_in_pairs, "program": try_by_program}


class WeightedTransportVerifier(Verifier):
    """``TraversalVerifier``, but with one optimal plan for all children of a node instead of one child after the other.

    A node comes with a weight w: w p may be emitted below it. For drafted siblings T ~ Q, the plan f maximizes
    sum f(T, y) over y among T, where f(T, .) <= Q(T) and f(., y) <= w p(y) in total. The child y gets the weight
    f(T, y) / (Q(T) - sum of f(T, .) over earlier siblings). If everything below the children is rejected, the node is
    left with the weight (w - alpha) / (1 - alpha) and the next token's law N([w p - sum_T f(T, .)]+), where alpha is
    sum f. The derivation is ours; it matches what the abstract of UniVer says (Weng et al. 2026, arXiv 2605.04543).
    With one child it is block verification; with the weight 1 at all nodes it is ``TransportVerifier``. The plan is not
    unique, and the acceptance of deeper levels depends on the plan.

    Args:
        solver: ``"pairs"`` takes ``IID`` siblings two by two, in closed form and for any vocabulary, and all others one
            by one, as ``TraversalVerifier`` does. ``"program"`` solves a linear program for every group of siblings: a
            reference for tiny vocabularies.

    Raises:
        ValueError: The solver is unknown; or, when ``"program"`` computes laws, a group of siblings is too large
            for its vocabulary.
    """

    exactness = Exactness.EXACT
    samplings = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})
    walks_greedily = True

    def __init__(self, *, solver: str = "pairs"):
        if not isinstance(solver, str) or solver not in SOLVERS:
            raise ValueError(f"solver={solver!r}: choose {' or '.join(SOLVERS)}")
        self.solver = solver

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        return leaf_to_root(tree, target_probs, SOLVERS[self.solver])
