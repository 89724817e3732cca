"""Ways of running a model's forward: one file per executor, and what they use (recordings, packed weights)."""

from transformers import PreTrainedModel

from specdec.attention.call import AttentionBackend
from specdec.attention.facts import Facts
from specdec.execution.executor import EagerExecutor, Executor
from specdec.execution.forwards import FusedExecutor, ReplayExecutor
from specdec.execution.invariant import InvariantExecutor
from specdec.kernels import obstacle
from specdec.placement import is_shared, is_spread


def executor_for(
    model: PreTrainedModel, facts: Facts, backend: AttentionBackend, *, optimize: bool, invariant: bool = False
) -> Executor:
    """Return the fastest executor for a model on its device; without ``optimize`` one that runs the model's code.

    With ``invariant``, a token's logits depend on nothing but the tokens that it sees.
    """
    # Only the model's own code moves tensors between devices, or sums them over processes.
    optimize = optimize and not is_spread(model) and not is_shared(model)
    if invariant:
        return InvariantExecutor(model, facts, backend, optimize=optimize)
    if optimize and model.device.type == "cpu":
        return ReplayExecutor(model, facts, backend)
    if optimize and model.device.type == "cuda" and not facts.mixers and obstacle(model.device) is None:
        from specdec.kernels import layers

        return FusedExecutor(model, facts, backend, layers)
    return EagerExecutor(model, facts, backend)


__all__ = ["EagerExecutor", "Executor", "FusedExecutor", "InvariantExecutor", "ReplayExecutor", "executor_for"]
