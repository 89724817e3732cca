"""Acceptance rules, one file per idea."""

from verifiers.block import BlockVerifier, TraversalVerifier
from verifiers.kseq import KSeqVerifier
from verifiers.lossy import FuzzyVerifier, LenientVerifier, RelaxedTopKVerifier, ThresholdVerifier
from verifiers.rejection import RejectionVerifier
from verifiers.target_walk import TargetWalkVerifier
from verifiers.transport import TransportVerifier
from verifiers.typical import TypicalVerifier

__all__ = [
    "BlockVerifier",
    "FuzzyVerifier",
    "KSeqVerifier",
    "LenientVerifier",
    "RejectionVerifier",
    "RelaxedTopKVerifier",
    "TargetWalkVerifier",
    "ThresholdVerifier",
    "TransportVerifier",
    "TraversalVerifier",
    "TypicalVerifier",
]
