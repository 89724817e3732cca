"""The chapter "Why decoding is slow and what speculation buys": ``python -m experiments.bench chapter``."""

from experiments.bench.chapter.page import Options, main

__all__ = ["Options", "main"]
