"""Speculative decoding for research: any drafter, any acceptance rule, any draft tree, on unmodified models."""

from typing import TYPE_CHECKING

from specdec.exports import on_first_use

if TYPE_CHECKING:
    from specdec.batch import Batch
    from specdec.cache.pages import Paging
    from specdec.engine.engine import Engine
    from specdec.engine.scheduler import Scheduler
    from specdec.forward import ForwardBatch, ForwardOutput, Wants
    from specdec.interfaces import Drafter, Laws, Session, Sizes, StatelessDrafter, Verifier
    from specdec.requests import SamplingParams
    from specdec.shape import TreeShape
    from specdec.target.runner import ModelRunner
    from specdec.target.target import Target
    from specdec.topology import Topology
    from specdec.tree import DraftTree
    from specdec.types import Completion, DraftSampling, Exactness, Noise, Outcome, Step, Verdict
else:  # a type checker would take any name for defined
    __getattr__, __dir__, __all__ = on_first_use(__name__)

__version__ = "0.1.0"
