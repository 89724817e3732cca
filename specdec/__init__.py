"""Speculative decoding for research: any drafter, any acceptance rule, any draft tree, on unmodified models."""

from specdec.batch import ForwardBatch, ForwardOutput, Wants
from specdec.engine.engine import Engine
from specdec.engine.scheduler import Scheduler
from specdec.interfaces import Drafter, Verifier
from specdec.modeling.runner import ModelRunner
from specdec.modeling.target import Target
from specdec.requests import SamplingParams
from specdec.shape import TreeShape
from specdec.slots import Slots
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import Committed, Completion, DraftSampling, Exactness, Noise, Step, Verdict

__version__ = "0.1.0"

__all__ = [
    "Committed",
    "Completion",
    "DraftSampling",
    "DraftTree",
    "Drafter",
    "Engine",
    "Exactness",
    "ForwardBatch",
    "ForwardOutput",
    "ModelRunner",
    "Noise",
    "SamplingParams",
    "Scheduler",
    "Slots",
    "Step",
    "Target",
    "Topology",
    "TreeShape",
    "Verdict",
    "Verifier",
    "Wants",
]
