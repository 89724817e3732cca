"""Speculative decoding for research: any drafter, any acceptance rule, any draft tree, on unmodified models."""

from specdec.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.model_runner import ModelRunner
from specdec.requests import SamplingParams
from specdec.slots import Slots
from specdec.target import Target
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
