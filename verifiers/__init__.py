"""Acceptance rules, one file per idea."""

from verifiers.rejection import RejectionVerifier
from verifiers.typical import TypicalVerifier

__all__ = ["RejectionVerifier", "TypicalVerifier"]
