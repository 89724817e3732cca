"""Acceptance rules, one file per idea."""

from typing import TYPE_CHECKING

from specdec.exports import on_first_use

if TYPE_CHECKING:
    from verifiers.block import BlockVerifier, TraversalVerifier
    from verifiers.cascade import CascadeVerifier, MixtureVerifier
    from verifiers.fly import FLyVerifier
    from verifiers.greedy_multipath import GreedyMultiPathVerifier
    from verifiers.kseq import KSeqVerifier
    from verifiers.longest_path import RelaxedTopKVerifier, TypicalVerifier
    from verifiers.lossy import FuzzyVerifier, LenientVerifier, ThresholdVerifier
    from verifiers.nucleus import NucleusVerifier
    from verifiers.rejection import RejectionVerifier
    from verifiers.shared_noise import SharedNoiseVerifier
    from verifiers.target_walk import TargetWalkVerifier
    from verifiers.transport import TransportVerifier
    from verifiers.two_draft import TwoDraftVerifier
    from verifiers.weighted_transport import WeightedTransportVerifier
else:  # a type checker would take any name for defined
    __getattr__, __dir__, __all__ = on_first_use(__name__)
