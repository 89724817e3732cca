"""Drafters: what proposes tokens, one file per method."""

from typing import TYPE_CHECKING

from specdec.exports import on_first_use

if TYPE_CHECKING:
    from drafters.assistant import AssistantDrafter
    from drafters.block import BlockDrafter
    from drafters.combined import ChoiceDrafter, MergedDrafter
    from drafters.eagle import EagleDrafter
    from drafters.heads.block import BlockHead
    from drafters.hydra import HydraDrafter, HydraHeads
    from drafters.itself import SelfDrafter
    from drafters.lookahead import LookaheadDrafter
    from drafters.marginals import MarginalDrafter
    from drafters.medusa import MedusaDrafter, MedusaHeads
    from drafters.model import ModelDrafter
    from drafters.mtp import MTPDrafter
    from drafters.ngram import NGramDrafter
    from drafters.other_vocabulary import SLEMDrafter, TLIDrafter
    from drafters.pard import PARDDrafter
    from drafters.peagle import PEagleDrafter
    from drafters.recycling import TokenRecyclingDrafter
    from drafters.redrafter import RecurrentHead, ReDrafter
    from drafters.rest import RestDrafter
    from drafters.sam import SamDrafter
    from drafters.staged import StagedDrafter
    from drafters.suffix import SuffixDrafter
    from drafters.uno import UnoDrafter
else:  # a type checker would take any name for defined
    __getattr__, __dir__, __all__ = on_first_use(__name__)
