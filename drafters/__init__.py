"""Drafters: what proposes tokens, one file per method."""

from typing import TYPE_CHECKING

from specdec.exports import on_first_use

if TYPE_CHECKING:
    from drafters.block import BlockDrafter
    from drafters.heads.block import BlockHead
    from drafters.medusa import MedusaDrafter
    from drafters.medusa_heads import MedusaHeads
    from drafters.model import ModelDrafter
    from drafters.ngram import NGramDrafter
    from drafters.synthetic import SyntheticDrafter
else:  # a type checker would take any name for defined
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "BlockDrafter": "drafters.block",
            "BlockHead": "drafters.heads.block",
            "MedusaDrafter": "drafters.medusa",
            "MedusaHeads": "drafters.medusa_heads",
            "ModelDrafter": "drafters.model",
            "NGramDrafter": "drafters.ngram",
            "SyntheticDrafter": "drafters.synthetic",
        },
    )

__all__ = [
    "BlockDrafter",
    "BlockHead",
    "MedusaDrafter",
    "MedusaHeads",
    "ModelDrafter",
    "NGramDrafter",
    "SyntheticDrafter",
]
