"""Ways of running a model's forward: one file per executor, and what they use (captures, packed weights)."""

from transformers import PreTrainedModel

from specdec.execution.base import Executor
from specdec.execution.eager import EagerExecutor
from specdec.execution.invariant import InvariantExecutor
from specdec.execution.replay import ReplayExecutor
from specdec.placement import is_shared, is_spread


def executor_for(model: PreTrainedModel, *, optimize: bool, invariant: bool = False) -> Executor:
    """Returns the fastest executor for a model on its device.

    Args:
        model: The model.
        optimize: False for an executor that runs the model's code.
        invariant: Whether a token's logits may depend on nothing but the tokens that it sees.
    """
    # Only the model's own code moves tensors between devices, or sums them over processes.
    optimize = optimize and not is_spread(model) and not is_shared(model)
    if invariant:
        return InvariantExecutor(model, optimize=optimize)
    if optimize and model.device.type == "cpu":
        return ReplayExecutor(model)
    return EagerExecutor(model)


__all__ = ["EagerExecutor", "Executor", "InvariantExecutor", "ReplayExecutor", "executor_for"]
