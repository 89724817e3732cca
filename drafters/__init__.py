"""Drafters: what proposes tokens, one file per method."""

from drafters.medusa import MedusaDrafter
from drafters.medusa_heads import MedusaHeads
from drafters.model import ModelDrafter
from drafters.ngram import NGramDrafter

__all__ = ["MedusaDrafter", "MedusaHeads", "ModelDrafter", "NGramDrafter"]
