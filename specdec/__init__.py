"""Speculative decoding for research: any drafter, any acceptance rule, any draft tree, on unmodified models."""

__version__ = "0.1.0"
