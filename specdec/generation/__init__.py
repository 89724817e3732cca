"""For users of transformers: its ``GenerationConfig`` as our parameters, and our engine inside its ``generate``."""

from specdec.generation.config import from_generation_config, from_model
from specdec.generation.generate import SpeculativeGenerate

__all__ = ["SpeculativeGenerate", "from_generation_config", "from_model"]
