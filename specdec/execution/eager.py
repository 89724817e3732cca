"""Runs the model's own code, unchanged."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import Cache as TransformersCache
from transformers import PreTrainedConfig

from specdec.attention.base import AttentionState
from specdec.cache.base import Cache
from specdec.execution.base import Executor
from specdec.execution.packing import plain_weights
from specdec.forward import ForwardBatch, ForwardOutput, Wants

if TYPE_CHECKING:
    from specdec.target.plan import ModelPlan


class EagerExecutor(Executor):
    """Calls the model's ``forward`` with our cache, masks and positions, in evaluation mode and on its own weights."""

    def run(self, plan: "ModelPlan", batch: ForwardBatch, cache: Cache) -> ForwardOutput:
        """See ``Executor.run``."""
        self.check_recordable()
        cache.aim(batch)
        state = plan.attention.prepare(batch, cache, plan)
        with evaluating(self.freshness.training), plain_weights():
            outputs = call_model(plan, state, cache, batch.wants, inputs_of(batch, cache))
        return output_of(batch.wants, outputs)


def inputs_of(batch: ForwardBatch, cache: Cache) -> list[Tensor]:
    """Returns the tensors that change from forward to forward: tokens or embeddings, positions, and features if any."""
    given = batch.embeds if batch.tokens is None else batch.tokens
    assert given is not None, "checked when the batch was made"
    depth = batch.topology.depth
    depth = depth if batch.nodes == batch.topology.width else depth[:, -batch.nodes :]
    # Padding and invalid nodes may stand past the last position, where learned embeddings have no row.
    positions = (batch.lengths[:, None] + depth).clamp_(max=cache.max_length - 1)
    return [given, positions] if batch.features is None else [given, positions, batch.features]


def call_model(
    plan: "ModelPlan",
    state: AttentionState,
    cache: TransformersCache,
    wants: Wants,
    inputs: Sequence[Tensor],
    *,
    attention: str | None = None,
) -> list[Tensor]:
    """Run a transformers model once.

    Args:
        plan: How to run it.
        state: What the attention backend has prepared.
        cache: What the layers write to.
        wants: What to return.
        inputs: As from ``inputs_of``.
        attention: Name of the attention function; None for the plan's.

    Returns:
        The hidden states that are wanted, then the logits if any are.
    """
    # Without logits the output layer is left out. A model that is its own base model returns logits anyway.
    model: nn.Module = plan.model if wants.logits != 0 else plan.model.base_model
    arguments: dict[str, Any] = {
        "inputs_embeds" if inputs[0].is_floating_point() else "input_ids": inputs[0],
        "attention_mask": state.argument(plan),
        "position_ids": inputs[1],
        "past_key_values": cache,
        "use_cache": True,
    }
    if len(inputs) > 2:
        arguments["features"] = inputs[2]
    watches = -1 in wants.hidden_layers and wants.logits != 0
    if wants.logits and plan.keeps_logits and not watches:  # the output layer's input is wanted at every node
        arguments["logits_to_keep"] = wants.logits
    if any(layer != -1 for layer in wants.hidden_layers):
        arguments["output_hidden_states"] = True
    with ExitStack() as stack:
        stack.enter_context(switched(plan.configs, attention or plan.attention.name, plan.experts))
        if isinstance(cache, Cache):  # not while a forward is captured, which reads no cache
            arguments["past_key_values"] = stack.enter_context(plan.attention.forward(state, cache))
        last = stack.enter_context(_output_layer_inputs(plan.model)) if watches else []
        output = model(**arguments)
    if "logits" not in output and -1 in wants.hidden_layers:
        last = [output.last_hidden_state]
    hidden = [last[0] if layer == -1 else output.hidden_states[layer] for layer in wants.hidden_layers]
    # The layers of a model that is spread over devices leave them where they run.
    hidden = [states.to(inputs[0].device) for states in hidden]
    if wants.logits == 0:
        return hidden
    logits = output.logits
    if wants.logits is not None and logits.shape[1] > wants.logits:
        logits = logits[:, -wants.logits :]
    return [*hidden, logits]


def output_of(wants: Wants, outputs: Sequence[Tensor]) -> ForwardOutput:
    """Returns the results of ``call_model`` by name."""
    hidden = dict(zip(wants.hidden_layers, outputs, strict=False))
    if wants.logits == 0:
        return ForwardOutput(None, hidden)
    logits = outputs[-1]
    top = logits.topk(min(wants.top_k, logits.shape[-1]), dim=-1).indices if wants.top_k else None
    return ForwardOutput(logits, hidden, top)


@contextmanager
def _output_layer_inputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Catches the input of the output layer during the ``with`` block: the normalized last hidden state."""
    caught: list[Tensor] = []
    output = model.get_output_embeddings()  # type: ignore[operator]
    assert output is not None, "models without an output layer are refused"
    handle = output.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    try:
        yield caught
    finally:
        handle.remove()


@contextmanager
def evaluating(training: Sequence[nn.Module]) -> Iterator[None]:
    """Keep modules in evaluation mode during the ``with`` block, because dropout would change every forward."""
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def switched(configs: Sequence[PreTrainedConfig], attention: str, experts: str) -> Iterator[None]:
    """Switch a model's attention during the ``with`` block, and experts that would wait for the device."""
    # The fields behind the properties: setting those also sets the configurations below.
    before = [(c, c._attn_implementation_internal, c._experts_implementation_internal) for c in configs]
    for config, _, own_experts in before:
        config._attn_implementation_internal = attention
        if "eager" in (experts, own_experts):
            config._experts_implementation_internal = experts
    try:
        yield
    finally:
        for config, own_attention, own_experts in before:
            config._attn_implementation_internal = own_attention
            config._experts_implementation_internal = own_experts
