"""Acceptance rules: which drafted tokens are kept, and what follows them."""

from verifiers.rejection import RejectionVerifier

__all__ = ["RejectionVerifier"]
