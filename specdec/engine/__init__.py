"""The engine: requests in, rounds of drafting and verification, completions out."""

from specdec.engine.engine import Engine

__all__ = ["Engine"]
