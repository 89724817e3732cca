"""What a rule is shown of the target: p, except for two kinds of rules that declare it (see ``Verifier``)."""

from collections.abc import Callable

from torch import Tensor

from specdec.batch import Batch
from specdec.coupling import decided
from specdec.interfaces import Verifier
from specdec.sampling import distribution, warmed
from specdec.tree import DraftTree
from specdec.types import Noise

Evidence = Callable[[Tensor, Tensor, DraftTree, Batch], Tensor]
"""``evidence(scores, target_probs, tree, slots)`` returns what the rule sees instead of p; the first two and the result
are ``Float[batch node vocab]``."""


def evidence_for(verifier: Verifier, *, speculating: bool) -> Evidence:
    """Returns what a rule is shown, in rounds that speculate or in plain ones."""
    if verifier.noise is Noise.SHARED:
        return shared_noise  # in plain decoding, too: that is what the output is compared with
    if verifier.needs_leaf_probs and speculating:
        return at_temperature_one
    return as_it_is


def as_it_is(scores: Tensor, target_probs: Tensor, tree: DraftTree, slots: Batch) -> Tensor:
    """Returns p."""
    return target_probs


def shared_noise(scores: Tensor, target_probs: Tensor, tree: DraftTree, slots: Batch) -> Tensor:
    """Returns the token that the shared noise draws from p at every node, one-hot."""
    if not slots.sampling.any_sampled:
        return target_probs
    return decided(target_probs, tree, slots.keys, slots.lengths)


def at_temperature_one(scores: Tensor, target_probs: Tensor, tree: DraftTree, slots: Batch) -> Tensor:
    """Returns p, computed at temperature 1 for greedy rows, where a cascade decides by probabilities, too."""
    if not slots.sampling.any_greedy:
        return target_probs
    return distribution(scores, warmed(slots.sampling, slots.drafting))
