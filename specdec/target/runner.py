"""Runs any Hugging Face causal LM over a KV cache, with an attention backend and an executor."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from specdec.arguments import flag, whole
from specdec.cache.formats import check_format
from specdec.cache.pages import Paging
from specdec.cache.storage import Cache
from specdec.execution import frozen
from specdec.execution.executor import Executor, model_lock
from specdec.execution.forwards import executor_for
from specdec.execution.invariant import InvariantExecutor
from specdec.forward import LOGITS, ForwardBatch, ForwardOutput, Wants
from specdec.memory import one_sentence_if_short
from specdec.placement import is_shared, is_spread, main_device
from specdec.quantization.base import WeightsRead, weights_read
from specdec.target.adapters import Adapters
from specdec.target.configuration import check_length, check_model
from specdec.target.facts import find, make_cache
from specdec.target.invariance import settle
from specdec.target.parallel import Agreement, group_of
from specdec.tree import DraftTree


class ModelRunner:
    """A model, its KV cache, and the one forward that decoding needs.

    The model's own code is used unchanged: it is given a cache object that stores keys and values in our layout,
    complete masks, and explicit position ids.

    Args:
        model: A loaded causal LM.
        max_batch_size: The number of slots of the cache.
        max_length: Committed positions per slot, at most as many as the model has.
        max_nodes: The largest number of drafted nodes in a tree.
        attention: Name of a backend (``specdec.attention``), or ``"auto"`` for the first one that the model takes.
        optimize: Use the device's fastest executor (``specdec.execution``); False runs the model's own code throughout.
        kv_cache: ``"int8"`` or ``"fp8"`` stores keys and values in one byte per number (``specdec.cache.formats``).
        paging: The size and the number of the cache's pages; None for a row per slot.
        invariant: Give every token the same logits, bit for bit, whatever else is in the forward; slower.
        adapters: The adapters beside the model's weights; None if there are none.
        cache: The cache of a model of which this one is the first layers; None makes one.

    Attributes:
        attention_name, attention_reason: The backend's name; with ``"auto"`` also why others were passed over.
        agreement: Keeps the processes that share the model in step.

    Raises:
        ValueError: An argument is out of its range, the model cannot be supported (with its type and the reason), or
            the cache does not fit into memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch_size: int,
        max_length: int,
        max_nodes: int = 0,
        attention: str = "auto",
        optimize: bool = True,
        kv_cache: str | None = None,
        paging: Paging | None = None,
        invariant: bool = False,
        adapters: Adapters | None = None,
        cache: Cache | None = None,
    ):
        check_model("model", model, "AutoModelForCausalLM.from_pretrained")
        max_batch_size = whole("max_batch_size", max_batch_size, least=1)
        max_length = whole("max_length", max_length, least=1)
        max_nodes = whole("max_nodes", max_nodes, least=0)
        self._optimize = flag("optimize", optimize) and not (is_spread(model) or is_shared(model))  # by their own code
        self.invariant, self._lock = flag("invariant", invariant), model_lock(model)
        if self.invariant and attention != "auto":
            raise ValueError(f"attention={attention!r}: invariant=True computes attention in its own way; leave it out")
        check_format(kv_cache)
        self.model, self.kv_cache, self._adapters = model, kv_cache, adapters
        with torch.inference_mode(False):
            self._chosen = torch.zeros(max_batch_size, 1, dtype=torch.long, device=main_device(model))
        remedy = f"lower max_batch_size={max_batch_size} or max_length={max_length}, or load the model in fewer bits"
        with one_sentence_if_short(main_device(model), remedy):
            found = find(model, attention=attention, optimize=self._optimize)
            check_length(model.config.get_text_config(decoder=True), max_length)
            self.facts, self.backend = found.facts, found.backend
            self.attention_name, self.attention_reason = found.name, found.reason
            sizes = {"max_batch_size": max_batch_size, "max_length": max_length, "max_nodes": max_nodes}
            self.cache = make_cache(self.facts, kv_cache=kv_cache, paging=paging, **sizes) if cache is None else cache
            if self.invariant and self.cache.states is not None and self.cache.states.short is not None:
                raise self.cache.states.short  # tokens that run again do so in pieces, which round in another way
            self.executor, self.agreement, self._version = self._executor(), Agreement(group_of(model)), 0
            self.joins = self.executor.joins and adapters is None  # whose numbers are chosen row by row

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size  # the width of the logits

    @property
    def device(self) -> torch.device:
        return self.facts.device

    @property
    def version(self) -> int:
        """A number that is larger than before if the weights were read again: looks, as a forward does."""
        with self._lock:
            self._look(thoroughly=False)
        return self._version

    def weights_read(self) -> WeightsRead:
        """Return the bytes of weights that a forward reads, from copies where the executor has them."""
        with self._lock:
            self._look()
            return weights_read(self.model, self.executor.copies())

    def run(self, batch: ForwardBatch, cache: Cache | None = None) -> ForwardOutput:
        """Run one forward, which leaves the keys and values of its nodes in the runner's cache, or in another one.

        Raises:
            ValueError: The model was changed (``Engine.weights_changed``), or so that the cache does not fit it.
        """
        cache = self.cache if cache is None else cache
        with torch.inference_mode(), self._lock:
            self._look(thoroughly=batch.wants.logits == 0)  # for every prompt
            if self._adapters is None:
                return self.executor.run(batch, cache)
            self._adapters.choice.set(self._chosen[batch.slots] if batch.adapters is None else batch.adapters)
            try:
                return self.executor.run(batch, cache)
            finally:
                self._adapters.choice.clear()

    def run_together(self, batches: Sequence[ForwardBatch]) -> list[ForwardOutput]:
        """Run forwards in one pass over the weights (``Executor.run_together``), where the runner ``joins`` them."""
        with torch.inference_mode(), self._lock:
            self._look()
            return self.executor.run_together(batches, self.cache)

    def refuse_states(self, instead: str) -> None:
        """Refuse recurrent layers where tokens are run again; ``instead`` says what goes with models without."""
        if self.cache.states is not None:
            kind = f"{self.facts.model_type} has recurrent layers, whose states cannot be written over"
            raise ValueError(f"{kind}: {instead} with models of attention alone")

    def adapt(self, slot: int, number: int) -> None:
        """Have the tokens of a slot go through an adapter, by its number (``Adapters.number``)."""
        if self._adapters is not None:
            self._chosen[slot] = number

    def warm_up(self, nodes: Iterable[int], *, batch: int, wants: Wants = LOGITS) -> None:
        """Capture forwards of ``batch`` rows over some numbers of nodes, where the executor captures any.

        They write into the first slots, none of which may hold a request.
        """
        if not self.executor.captures:  # as with recurrent layers, whose forwards begin where states end
            return
        slots, root = np.arange(batch), torch.zeros(batch, dtype=torch.long, device=self.device)
        with self.executor.at_first_sight():
            for count in nodes:
                # All nodes are the root's children: no position is needed that a short model does not have.
                tree = DraftTree.root_only(root).padded(count, max_depth=1, max_children=count - 1)
                self.run(ForwardBatch.of_tree(tree, host_slots=slots, host_lengths=np.zeros_like(slots), wants=wants))

    def weights_changed(self) -> None:
        """Have all weights read again before the next forward, because the model has changed."""
        frozen.weights_changed()

    def _look(self, *, thoroughly: bool = True) -> None:
        """Refuse a model that has changed; read it again if somebody has said so."""
        if self.executor.frozen.told:
            self._read_again()
        else:
            self.executor.frozen.check(thoroughly=thoroughly)

    def _read_again(self) -> None:
        """Go on with a changed model and the same cache."""
        before, device = self.facts, main_device(self.model)
        changed = f"the {before.model_type} model was changed after this engine was built"
        if (self.model.dtype, device) != (before.dtype, before.device):
            raise ValueError(f"{changed}, and moved to {self.model.dtype} on {device}: build a new engine")
        found = find(self.model, attention=self.attention_name, optimize=self._optimize)
        other = any(before.layers.get(layer) != shape for layer, shape in found.facts.layers.items())
        if other or (found.facts.indexers, found.facts.vocab_size) != (before.indexers, before.vocab_size):
            raise ValueError(f"{changed}, and its cache no longer fits: build a new engine")
        self.facts, self._version = found.facts, self._version + 1
        self.executor = self._executor()  # on the copies of weights that ``found`` has

    def _executor(self) -> Executor:
        made = executor_for(self.model, self.facts, self.backend, optimize=self._optimize, invariant=self.invariant)
        if isinstance(made, InvariantExecutor):
            settle(made)
        return made
