"""How close is the engine to what its device can do? ``python -m experiments.bench engine``."""

from experiments.bench.engine.run import __doc__ as __doc__
from experiments.bench.engine.run import main
from experiments.bench.engine.settings import Options

__all__ = ["Options", "main"]
