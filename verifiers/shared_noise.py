"""Drafter-invariant decoding: drafter and target use the same noise."""

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness, Noise
from verifiers.target_walk import laws_of_walk


class SharedNoiseVerifier(Verifier):
    """Coupled sampling with the Gumbel-max trick (Daliri, Musco & Suresh 2024, arXiv 2408.07978, algorithm 2).

    The target's token at a position is argmax log p(x) + g(x), where the Gumbel noise g is a hash of the request's
    key, the position and x. The path goes down while that token is a child; the first token that is not a child is
    emitted. A drafter that takes the k largest of log q + g (``ModelDrafter(..., sampling="coupled")``) often proposes
    that token: with one child, with probability Σ_x 1 / Σ_y max(p(y) / p(x), q(y) / q(x)), which is at least
    (1 - TV) / (1 + TV) for the total variation TV of p and q.

    The output depends on target and seed alone. It is the same for every drafter, tree and pruning, and equals plain
    decoding on the same engine token for token (where the logits are equal). So every draft is exact, also one that was
    selected after it was drawn, and another drafter does not change the output. Over seeds the output follows the
    target. Gumbel-max list sampling (Rowan, Phan & Khisti 2025, arXiv 2506.05632) couples a list of independent drafts;
    here the siblings are k draws without replacement.

    Given the tree nothing is random: ``expected_accepted`` equals the number of accepted tokens.
    """

    exactness = Exactness.EXACT
    samplings = frozenset(DraftSampling)
    noise = Noise.SHARED

    def along(self, p: Tensor, q: Tensor, tokens: Tensor, law: DraftSampling) -> Tensor:
        own_p, own_q = p.gather(2, tokens[..., None]), q.gather(2, tokens[..., None])
        if law is not DraftSampling.COUPLED:  # the draft knows nothing of the noise
            return own_q[..., 0].cumprod(1)
        return (own_q[..., 0] / torch.maximum(p * own_q, q * own_p).sum(-1)).cumprod(1)

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        """Walk along the target's tokens; ``target_probs`` are one-hot."""
        return laws_of_walk(tree, target_probs)
