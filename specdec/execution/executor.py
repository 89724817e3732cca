"""Executors: ways of running a model's forward over a cache. The plain one runs the model's own code, unchanged."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.attention.call import NAME, Attend, AttentionBackend, View, Write, answered
from specdec.attention.facts import Facts
from specdec.cache.storage import Cache
from specdec.cache.transformers_cache import of_class
from specdec.execution.frozen import Frozen
from specdec.execution.packing import PackedLinears, plain_weights
from specdec.execution.recorder import UnrecordableError, recording_now
from specdec.forward import ForwardBatch, ForwardOutput, Wants
from specdec.recurrent.recurrence import Recurrence

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_guard = threading.Lock()


def model_lock(model: nn.Module) -> threading.RLock:
    """Return the lock that every forward of this model holds, whichever engine runs it.

    A forward switches the model's configuration and lends its layers packed weights.
    """
    with _guard:
        return _locks.setdefault(model, threading.RLock())


class Executor(ABC):
    """Runs forwards of one model. The caller of ``run`` holds the model's lock (``model_lock``)."""

    captures: bool = False  # forwards of a shape that comes often

    def __init__(self, model: PreTrainedModel, facts: Facts, backend: AttentionBackend):
        self.model, self.backend, self.frozen = model, backend, Frozen(model)
        Executor.read_again(self, facts)

    def read_again(self, facts: Facts) -> None:
        """Drop everything that was derived from the model, which has changed; ``facts`` are those of now."""
        self.frozen.renew()
        self.facts, self.recurrence, self._configs = facts, Recurrence(self.model, facts.mixers), configs_of(self.model)

    @property
    def replays_at_once(self) -> bool:
        """Whether a captured forward is a single step of what is recorded around it."""
        return False

    def copies(self) -> dict[int, int]:
        """Return the bytes of the copies that forwards read in the place of parameters, by the parameter's ``id``."""
        return {}

    def at_first_sight(self) -> AbstractContextManager[None]:
        """Capture forwards, during the ``with`` block, when their shape comes for the first time."""
        return nullcontext()

    @abstractmethod
    def run(self, batch: ForwardBatch, cache: Cache) -> ForwardOutput:
        """Return the outputs that the batch wants, and leaves the keys and values of its nodes in the cache."""

    def check_recordable(self) -> None:
        """Refuse to take part in a recording with modules or hooks from elsewhere, whose Python would not run again."""
        if recording_now() and self.facts.mixers:
            raise UnrecordableError("the host finds out in which order nodes go through recurrent layers")
        if recording_now() and not self.frozen.known:
            raise UnrecordableError("the model has modules or hooks from elsewhere")

    def prepare(self, batch: ForwardBatch, cache: Cache) -> View:
        """Aim the cache at a forward, and return what its layers attend to."""
        cache.aim(batch)
        self.recurrence.aim(batch, cache.states)
        return self.backend.prepare(batch, cache, self.facts)

    def call_model(
        self, wants: Wants, inputs: Sequence[Tensor], view: View, attend: Attend | None = None,
        write: Write | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Run the transformers model once, in evaluation mode; return the wanted hidden states, then logits if any.

        Args:
            inputs: As from ``inputs_of``.
            attend: Answers the layers' attention calls; None for the backend.
            write: Stores keys and values; None for the cache.
        """
        passes = attend is None and self.backend.passes_cache
        # Without logits the output layer is left out. A model that is its own base model returns logits anyway.
        model: nn.Module = self.model if wants.logits != 0 else self.model.base_model
        given = "inputs_embeds" if inputs[0].is_floating_point() else "input_ids"
        arguments: dict[str, Any] = {given: inputs[0], "use_cache": True}
        if self.facts.reaches:
            arguments["attention_mask"] = self.facts.mask_argument(view.masks)
        if self.facts.layers or "position_ids" in self.facts.arguments:  # some pass it on without naming it
            arguments["position_ids"] = inputs[1]
        if len(inputs) > 2:
            arguments["features"] = inputs[2]
        watches = -1 in wants.hidden_layers and wants.logits != 0
        if wants.logits and self.facts.keeps_logits and not watches:  # the output layer's input is wanted everywhere
            arguments["logits_to_keep"] = wants.logits
        if any(layer != -1 for layer in wants.hidden_layers):
            arguments["output_hidden_states"] = True
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.frozen.training))
            stack.enter_context(switched(self._configs, self.backend.function if passes else NAME, self.facts.experts))
            cache: Any = view.cache
            if passes:
                stack.enter_context(self.backend.answering())
            else:
                attend = attend or partial(self.backend.attend, view=view)
                cache = stack.enter_context(answered(view, attend, write))
            arguments[self.facts.cache_argument] = of_class(cache, self.facts.cache_class)
            stack.enter_context(self.recurrence.running())
            last: list[Tensor] = []  # the input of the output layer: the normalized last hidden state
            if watches:
                output_layer: Any = self.model.get_output_embeddings()
                stack.enter_context(output_layer.register_forward_pre_hook(lambda _, given: last.append(given[0])))
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


class EagerExecutor(Executor):
    """Calls the model's ``forward`` with our cache, masks and positions, on its own weights."""

    def run(self, batch: ForwardBatch, cache: Cache) -> ForwardOutput:
        self.check_recordable()
        view = self.prepare(batch, cache)
        with plain_weights():
            return output_of(batch.wants, self.call_model(batch.wants, inputs_of(batch, cache), view))


class ModuleCaller:
    """Calls a module in evaluation mode; on a CPU its linear layers run on packed weights if ``optimize``."""

    def __init__(self, module: nn.Module, *, optimize: bool = True):
        self.module = module
        self._frozen = Frozen(module)
        self._packed = PackedLinears(module if optimize else nn.Identity())
        self._version = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with model_lock(self.module):
            _ = self.version
            with self._packed.in_use(), evaluating(self._frozen.training):
                return self.module(*args, **kwargs)

    @property
    def version(self) -> int:
        """A number that is larger than before if the module's weights were read again."""
        with model_lock(self.module):
            if self._frozen.told:
                self._frozen.renew()
                self._packed.refresh()
                self._version += 1
            else:
                self._frozen.check()
            return self._version


def autocast_of(device: str) -> torch.dtype | None:
    """Return the dtype of autocasting on a type of device; None if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def inputs_of(batch: ForwardBatch, cache: Cache) -> list[Tensor]:
    """Return the tensors that change from forward to forward: tokens or embeddings, positions, and features if any."""
    given, depth = batch.given, batch.topology.depth
    depth = depth if batch.nodes == batch.topology.width else depth[:, -batch.nodes :]
    # Padding and invalid nodes may stand past the last position, where learned embeddings have no row.
    positions = (batch.lengths[:, None] + depth).clamp(max=cache.max_length - 1)
    return [given, positions] if batch.features is None else [given, positions, batch.features]


def output_of(wants: Wants, outputs: Sequence[Tensor]) -> ForwardOutput:
    """Return the results of ``Executor.call_model`` by name."""
    hidden = dict(zip(wants.hidden_layers, outputs, strict=False))
    if wants.logits == 0:
        return ForwardOutput(None, hidden)
    logits = outputs[-1]
    top = logits.topk(min(wants.top_k, logits.shape[-1]), dim=-1).indices if wants.top_k else None
    return ForwardOutput(logits, hidden, top)


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return every configuration that a part of the model reads; a part may have its own."""
    found = [getattr(part, "config", None) for part in model.modules()]
    return list({id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values())


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
