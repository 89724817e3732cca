"""Ways of running a model's forward: one file per executor, and what they use (captures, packed weights)."""

from transformers import PreTrainedModel

from specdec.execution.base import Executor
from specdec.execution.eager import EagerExecutor
from specdec.execution.replay import ReplayExecutor
from specdec.placement import is_shared, is_spread


def executor_for(model: PreTrainedModel, *, optimize: bool) -> Executor:
    """Returns the fastest executor for a model on its device; without ``optimize``, one that runs the model's code."""
    # Only the model's own code moves tensors between devices, or sums them over processes.
    whole = not is_spread(model) and not is_shared(model)
    if optimize and whole and model.device.type == "cpu":
        return ReplayExecutor(model)
    return EagerExecutor(model)


__all__ = ["EagerExecutor", "Executor", "ReplayExecutor", "executor_for"]
