"""Acceptance rules, one file per idea."""

from verifiers.block import BlockVerifier, TraversalVerifier
from verifiers.rejection import RejectionVerifier
from verifiers.typical import TypicalVerifier

__all__ = ["BlockVerifier", "RejectionVerifier", "TraversalVerifier", "TypicalVerifier"]
