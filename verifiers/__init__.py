"""Acceptance rules, one file per idea."""

from verifiers.block import BlockVerifier, TraversalVerifier
from verifiers.cascade import CascadeVerifier
from verifiers.greedy_multipath import GreedyMultiPathVerifier
from verifiers.kseq import KSeqVerifier
from verifiers.longest_path import RelaxedTopKVerifier, TypicalVerifier
from verifiers.lossy import FuzzyVerifier, LenientVerifier, ThresholdVerifier
from verifiers.rejection import RejectionVerifier
from verifiers.shared_noise import SharedNoiseVerifier
from verifiers.target_walk import TargetWalkVerifier
from verifiers.transport import TransportVerifier
from verifiers.two_draft import TwoDraftVerifier
from verifiers.weighted_transport import WeightedTransportVerifier

__all__ = [
    "BlockVerifier",
    "CascadeVerifier",
    "FuzzyVerifier",
    "GreedyMultiPathVerifier",
    "KSeqVerifier",
    "LenientVerifier",
    "RejectionVerifier",
    "RelaxedTopKVerifier",
    "SharedNoiseVerifier",
    "TargetWalkVerifier",
    "ThresholdVerifier",
    "TransportVerifier",
    "TraversalVerifier",
    "TwoDraftVerifier",
    "TypicalVerifier",
    "WeightedTransportVerifier",
]
