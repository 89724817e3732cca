"""How close is the engine to what its device can do? ``python -m benchmarks.engine``."""

from benchmarks.engine.settings import Options

__all__ = ["Options"]
