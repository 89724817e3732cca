"""The benchmark that needs a GPU, in four parts: ``python -m experiments.bench gpu part=1 out=FOLDER``."""

from experiments.bench.gpu.run import Options, main
from experiments.bench.gpu.run import __doc__ as __doc__

__all__ = ["Options", "main"]
