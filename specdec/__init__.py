"""Speculative decoding for research: any drafter, any acceptance rule, any draft tree, on unmodified models."""

from specdec.engine.engine import Engine
from specdec.engine.slots import Slots
from specdec.interfaces import Drafter, Verifier
from specdec.modeling.runner import ModelRunner
from specdec.modeling.target import Target
from specdec.requests import SamplingParams
from specdec.tree import DraftTree, TreeShape
from specdec.types import Committed, Completion, DraftSampling, Exactness, Noise, Step, TargetOutput, Verdict

__version__ = "0.1.0"

__all__ = [
    "Committed",
    "Completion",
    "DraftSampling",
    "DraftTree",
    "Drafter",
    "Engine",
    "Exactness",
    "ModelRunner",
    "Noise",
    "SamplingParams",
    "Slots",
    "Step",
    "Target",
    "TargetOutput",
    "TreeShape",
    "Verdict",
    "Verifier",
]
