"""Rejection sampling, from the root down and sibling by sibling: it fits every way of drafting but shared noise."""

from jaxtyping import Float, Int
from torch import Tensor

from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.certain import laws_of_certain
from verifiers.families import Family, drafted_laws, entries, with_siblings
from verifiers.levels import law_in_turn
from verifiers.residuals import normalized
from verifiers.siblings import Siblings, chance, rejected, share, try_in_turn
from verifiers.thresholds import has_thresholds, law_of_next, thresholds


class RejectionVerifier(Verifier):
    """Token-level rejection sampling on chains and trees.

    At a node v, the valid children are tried in sibling order. Let p_0 = p_v. The child x of rank r is accepted with
    probability a = min(1, p_r(x) / q_r(x)); if it is rejected, p_{r+1} = N([p_r - q_r]+) replaces p_r, where N
    normalizes and N(0) is p_v. If no child is accepted, the next token is drawn from the last p_r. The law of the child
    says what q_r is, so siblings may mix laws, and each of these rules is a case of this one:

    * ``IID``: q_r = q. On a chain, speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1;
      Chen et al. 2023, arXiv 2302.01318); on a tree, multi-step speculative sampling of SpecInfer (Miao et al.
      2023, arXiv 2305.09781).
    * ``WITHOUT_REPLACEMENT``: q_r is q without the tokens of earlier siblings, normalized: recursive rejection
      sampling (Jeon et al. 2024, arXiv 2402.14160; Yang et al. 2024, arXiv 2401.06706).
    * ``DETERMINISTIC``: q_r is one-hot. A child is then accepted with its probability under p. This amounts to drawing
      from p and going down while the draw is a child: the acceptance of EAGLE-2 (Li et al. 2024, arXiv 2406.16858), and
      greedy matching at temperature 0.
    """

    exactness = Exactness.EXACT
    samplings = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT})

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        """Return what follows from trying all children of every node in turn."""
        if tree.max_children == 0 or tree.draft_probs is None:
            return laws_of_certain(tree, target_probs)
        if has_thresholds(tree):
            tried = thresholds(tree, target_probs)
            return Laws(
                law_in_turn(tree, tried.chance), lambda stop: law_of_next(tree, target_probs, stop, tried.after)
            )
        entry = entries(tree, target_probs.shape[2])
        p = target_probs.flatten(1).gather(1, entry)
        q = tree.draft_probs.flatten(1).gather(1, entry).to(p.dtype)
        # The probability of accepting each node as if it were a first child.
        chances = chance(p, share(q, drafted_laws(tree), tree.only_law))
        several = with_siblings(tree, target_probs)
        if several is not None:
            chances = _in_turn(tree, several, chances)
        return Laws(law_in_turn(tree, chances), lambda stop: _after(tree, target_probs, stop))


def _after(
    tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], stop: Int[Tensor, " batch"]
) -> Float[Tensor, "batch vocab"]:
    """Return what is left of p after all children of ``stop`` were rejected."""
    family = Family(tree, target_probs, stop[:, None])
    most = family.laws.shape[-1]
    if most == 1:
        left = rejected(family.p, family.q, family.tokens[..., 0], family.laws[..., 0], tree.only_law)
    else:
        siblings = Siblings((1,) * most, family.tokens[:, 0], family.laws[:, 0], tree.only_law)
        left = try_in_turn(family.p, family.q, siblings).left
    # After a leaf it is p itself, to the last bit: a row without drafts must not depend on its batch mates.
    return normalized(left, family.p, family.laws[..., :1] >= 0)[:, 0]


def _in_turn(
    tree: DraftTree,
    several: tuple[Family, tuple[int, ...], Int[Tensor, "batch child"]],
    chances: Float[Tensor, "batch node"],
) -> Float[Tensor, "batch node"]:
    """Returns the probability of accepting each node, given that its earlier siblings were rejected.

    Args:
        tree: The tree.
        several: The nodes that have several children, and those (``families.with_siblings``).
        chances: The probability of accepting every node as if it were a first child; 0 at invalid nodes.
    """
    family, having, index = several
    siblings = Siblings(having, tree.tokens.gather(1, index), drafted_laws(tree).gather(1, index), tree.only_law)
    tried = try_in_turn(family.p, family.q, siblings)
    # Children that do not exist are written to the root, which is not read.
    chances = chances.scatter(1, index, tried.chances)
    # p of an invalid node may be anything.
    return chances if tree.is_whole else chances.masked_fill_(~tree.valid, 0.0)
