"""Executors: ways of running a model's forward over a cache. The plain one runs the model's own code, unchanged."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.attention.call import NAME, Attend, AttentionBackend, View, Write, answered, configs_of, joint, switched
from specdec.attention.facts import Facts
from specdec.cache.storage import Cache
from specdec.cache.transformers_cache import of_class
from specdec.execution.frozen import Frozen
from specdec.execution.packing import PackedLinears, plain_weights
from specdec.execution.recorder import UnrecordableError, recording_now
from specdec.forward import ForwardBatch, ForwardOutput, Wants
from specdec.host import scoped
from specdec.recurrent.recurrence import Recurrence

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()

first_sight: ContextVar[bool] = ContextVar("first_sight", default=False)


def model_lock(model: nn.Module) -> threading.RLock:
    """Return the lock of every forward of a model, in any engine: they switch its configuration and lend it weights."""
    return _locks.setdefault(model, threading.RLock())  # of a dict, which nothing interrupts


class Executor:
    """Runs forwards of one model, read once: here by its own code. The caller of ``run`` holds ``model_lock``."""

    captures: bool = False  # forwards of a shape that comes often

    def __init__(
        self, model: PreTrainedModel, facts: Facts, backend: AttentionBackend, packed: PackedLinears | None = None
    ):
        self.model, self.facts, self.backend, self.packed = model, facts, backend, packed
        self.frozen, self.recurrence, self._configs = Frozen(model), Recurrence(model, facts.mixers), configs_of(model)
        # On a GPU a second pass replays a graph, and takes less time than the Python of a forward of new sizes.
        self.joins = facts.device.type == "cpu" and not (facts.mixers or backend.passes_cache)  # see `run_together`

    def copies(self) -> dict[int, int]:
        """Return the bytes of the copies that forwards read in the place of parameters, by the parameter's ``id``."""
        return {} if self.packed is None else self.packed.bytes_by_weight()

    # During a `with` block, forwards are captured when their shape comes for the first time.
    at_first_sight = staticmethod(partial(scoped, first_sight, True))

    def weights(self) -> AbstractContextManager[object]:
        """Have layers multiply by what ``packed`` holds, or by plain weights, during the ``with`` block."""
        return plain_weights() if self.packed is None else self.packed.in_use()

    def run(self, batch: ForwardBatch, cache: Cache) -> ForwardOutput:
        """Return the outputs that the batch wants, and leave the keys and values of its nodes in the cache."""
        if recording_now() and self.facts.mixers:
            raise UnrecordableError("the host finds out in which order nodes go through recurrent layers")
        if recording_now() and not self.frozen.known:  # whose Python would not run again
            raise UnrecordableError("the model has modules or hooks from elsewhere")
        cache.aim(batch)
        self.recurrence.aim(batch, cache.states)
        view = self.backend.prepare(batch, cache, self.facts)
        return ForwardOutput.of(batch.wants, self._outputs(batch.wants, inputs_of(batch, cache), view))

    def run_together(self, batches: Sequence[ForwardBatch], cache: Cache) -> list[ForwardOutput]:
        """Return the outputs of forwards, of which at most the last one wants logits, in one pass over the weights.

        The model is given all nodes as one row, and attention alone knows whose they are. A forward sees what those
        before it leave.
        """
        attend, view, apart = joint(batches, self.backend, cache, self.facts)
        given = zip(*(inputs_of(batch, cache) for batch in batches), strict=True)
        inputs = [torch.cat([part.flatten(0, 1) for part in parts])[None] for parts in given]
        layers = tuple({layer: 0 for batch in batches for layer in batch.wants.hidden_layers})
        wants, shape = batches[-1].wants, batches[-1].given.shape
        scored = shape.numel() if wants.logits != 0 else 0
        with self.weights():
            outputs = self.call_model(Wants(scored, layers), inputs, view, attend)
        parts = {layer: apart(states) for layer, states in zip(layers, outputs, strict=False)}
        found = [ForwardOutput(None, {layer: parts[layer][place] for layer in layers}) for place in range(len(batches))]
        if scored:
            output = ForwardOutput.of(Wants(top_k=wants.top_k), [outputs[-1][0].unflatten(0, shape[:2])])
            found[-1] = ForwardOutput(output.logits, found[-1].hidden_states, output.top_tokens)
        return found

    def _outputs(self, wants: Wants, inputs: Sequence[Tensor], view: View) -> Sequence[Tensor]:
        """Return the wanted hidden states, then logits if any: by default by the model's own code."""
        with self.weights():
            return self.call_model(wants, inputs, view)

    def call_model(
        self, wants: Wants, inputs: Sequence[Tensor], view: View, attend: Attend | None = None,
        write: Write | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Run the transformers model once, in evaluation mode; return the wanted hidden states, then logits if any.

        None in place of ``attend`` and ``write`` lets the backend answer, and the cache store.
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

                def watch(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
                    last.append(given[0])
                    return (given[0][:, -(wants.logits or 0) :],)  # all, or those that are to have logits

                stack.enter_context(output_layer.register_forward_pre_hook(watch))
            output = model(**arguments)
        if "logits" not in output and -1 in wants.hidden_layers:
            last = [output.last_hidden_state]
        hidden = [last[0] if layer == -1 else output.hidden_states[layer] for layer in wants.hidden_layers]
        # The layers of a model that is spread over devices leave them where they run.
        hidden = [states.to(inputs[0].device) for states in hidden]
        return hidden if wants.logits == 0 else [*hidden, output.logits[:, -(wants.logits or 0) :]]


class ModuleCaller:
    """Calls a module in evaluation mode; on a CPU its linear layers run on packed weights if ``optimize``."""

    def __init__(self, module: nn.Module, *, optimize: bool = True):
        self.module, self._optimize, self._version = module, optimize, -1
        self._read()

    def _read(self) -> None:
        self._frozen, self._version = Frozen(self.module), self._version + 1
        self._packed = PackedLinears(self.module if self._optimize else nn.Identity())

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
                self._read()
            else:
                self._frozen.check()
            return self._version


def autocast_of(device: str) -> torch.dtype | None:
    """Return the dtype of autocasting on a type of device; None if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def inputs_of(batch: ForwardBatch, cache: Cache) -> list[Tensor]:
    """Return the tensors that change from forward to forward: tokens or embeddings, positions, and features if any."""
    inputs = [batch.given, cache.model_positions(batch)]
    return inputs if batch.features is None else [*inputs, batch.features]


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
