"""The exact rules of this package, but for ``TransportVerifier``, which is too slow for a model's vocabulary."""

import verifiers
from specdec.interfaces import Verifier

_WALKS = "Rejection", "TargetWalk", "TwoDraft", "SharedNoise"
_OTHERS = "Block", "Traversal", "GreedyMultiPath", "KSeq", "WeightedTransport"


def exact_rules() -> list[Verifier]:
    """Returns an instance of each."""
    return [getattr(verifiers, f"{name}Verifier")() for name in (*_WALKS, *_OTHERS)]
