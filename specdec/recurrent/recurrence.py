"""Runs the recurrent layers of a model's forward node by node, each from its parent's state.

The model's own code runs, unchanged: during a forward each mixer's ``forward`` is replaced by one that calls the
original once per level of the trees, with one token per row, as in plain decoding. So that weights are not read once
per level, the projections that see each token by itself run once for all nodes, before the levels, and the last one
once behind them.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from specdec.cache.states import States, StateView
from specdec.forward import ForwardBatch
from specdec.recurrent.mixer import Forward, Given, Mixer, forwards_replaced
from specdec.recurrent.order import Call, calls_again, calls_of, calls_one_by_one
from specdec.recurrent.paths import Path, part_at, replaced
from specdec.topology import Topology


class Recurrence:
    """The recurrent layers of a model.

    Args:
        model: The model.
        mixers: Its recurrent layers; none in a model of attention alone, where nothing happens.
    """

    def __init__(self, model: nn.Module, mixers: Sequence[Mixer]):
        self._model, self.mixers = model, mixers
        self._aimed: _Aim | None = None

    def aim(self, batch: ForwardBatch, states: States | None) -> None:
        """Prepare for a forward: in which order its nodes go through the layers."""
        if not self.mixers:
            return
        assert states is not None, "the cache was made for another model"
        states.check(batch.slots, batch.lengths)
        calls = dict[bool, _Calls]()
        for kind in {mixer.one_by_one for mixer in self.mixers}:
            again = [] if states.pending is None else calls_again(batch, states.pending, one_by_one=kind)
            calls[kind] = calls_of(batch, one_by_one=kind), again
        self._aimed = _Aim(batch, states, calls, batch, in_block=False)

    def aim_block(
        self, batch: ForwardBatch, states: States | None, chosen: Int[np.ndarray, " node"], *, rows: int
    ) -> None:
        """Prepare for a forward of some nodes of a batch, numbered row by row, each as a row of a block.

        A token goes through the layers alone, and so in one way, however it comes.
        """
        if not self.mixers:
            return
        assert states is not None, "the cache was made for another model"
        if chosen[0] == 0:
            states.check(batch.slots, batch.lengths)
        block = ForwardBatch(
            tokens=batch.slots.new_zeros(rows, 1),
            slots=batch.slots.new_zeros(rows),
            lengths=batch.slots.new_zeros(rows),
            topology=Topology.chain(1, batch.slots.device),
        )
        calls = calls_one_by_one(batch, chosen)
        last = chosen[-1] == batch.batch * batch.nodes - 1
        self._aimed = _Aim(block, states, {kind: (calls, []) for kind in (True, False)}, batch if last else block, True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """During the ``with`` block, run the layers so in the forward that ``aim`` prepared for.

        The states of a piece of a prompt become final at its end, so that a forward that fails leaves them alone.
        """
        if not self.mixers:
            yield
            return
        assert self._aimed is not None, "aim was called"
        batch, states, calls, final, in_block = self._aimed
        with ExitStack() as stack:
            for mixer in self.mixers:
                module = self._model.get_submodule(mixer.name)
                stack.enter_context(mixer.attributes_kept(self._model))
                steps = _Steps(self._model, mixer, module.forward, batch, states, *calls[mixer.one_by_one], in_block)
                stack.enter_context(forwards_replaced({module: steps.run}))
            yield
        if states.pending is not None:
            states.pending.counts[batch.slots] = 0
        if final.counts is not None:
            counts = torch.from_numpy(final.counts).to(final.slots.device)
            states.commit(final.slots, final.slots.new_empty(final.batch, 0), counts)


class _Steps:
    """One recurrent layer in one forward.

    Args:
        model: The model.
        mixer: The layer.
        forward: Its own forward.
        batch: The forward of the model.
        states: Where states are.
        calls: The calls to make, in order.
        again: Those before them, over accepted paths that are not in the final states.
        in_block: Whether rows are single tokens, which a block of one size holds however many calls there are.
    """

    def __init__(
        self,
        model: nn.Module,
        mixer: Mixer,
        forward: Forward,
        batch: ForwardBatch,
        states: States,
        calls: Sequence[Call],
        again: Sequence[Call],
        in_block: bool,
    ):
        self._again, self._in_block = again, in_block
        self._model, self._mixer, self._forward = model, mixer, forward
        self._batch, self._states, self._calls = batch, states, calls
        self._module = model.get_submodule(mixer.name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's result for all nodes."""
        given, batch, mixer = (args, kwargs), self._batch, self._mixer
        inputs = {path: _by_row(part_at(given, path), batch.batch) for path in mixer.takes}
        self._settle(given, inputs)
        if not self._calls:  # padding alone, whose outputs nobody reads
            return mixer.call(self._model, self._forward, given, StateView(None))[0]
        # A single call reads nothing twice.
        several = len(self._calls) > 1 or self._in_block
        projected = self._projected(given) if several else {}
        outputs: dict[Path, Tensor] = {}
        with ExitStack() as stack:
            last = None
            if several and mixer.last is not None:
                name, path = mixer.last
                module = self._module.get_submodule(name)
                last = path, module.forward
                stack.enter_context(forwards_replaced({module: lambda rows: rows}))
            result = None
            for call in self._calls:
                cut = {path: _cut(each, call) for path, each in inputs.items()}
                known = {linear: partial(_known, _cut(each, call)) for linear, each in projected.items()}
                with forwards_replaced(known):
                    result = self._step(replaced(given, cut), call)
                for path in mixer.gives:
                    _put(outputs, path, part_at(result, path), call, batch)
        if last is not None:
            path, finish = last
            outputs[path] = finish(outputs[path])
        return replaced(result, outputs)

    def _step(self, given: Given, call: Call) -> Any:
        """Return the layer's result for the tokens of one call, and store the states that it leaves."""
        states, before = self._states, None
        if call.before is not None:
            drafted = call.depth > 1
            before = {key: states.before(key, call.slots, call.before, drafted=drafted) for key in self._mixer.states}
        result, after = self._mixer.call(self._model, self._forward, given, StateView(before))
        for key, state in after.items():
            states.put(key, call.slots, call.after, state, drafted=call.depth > 0)
        return result

    def _settle(self, given: Given, inputs: dict[Path, Tensor]) -> None:
        """Run over accepted paths that are not in the final states, and keep what the layer is given now."""
        pending = self._states.pending
        if pending is None:
            return
        for call in self._again:
            cut = {path: _cut(pending.inputs[self._mixer.name, path], call) for path in inputs}
            self._step(replaced(given, cut), call)
        if self._batch.counts is None:
            for path, each in inputs.items():
                pending.keep((self._mixer.name, path), self._batch.slots, each)

    def _projected(self, given: Given) -> dict[nn.Module, Tensor]:
        """Return the outputs of the layer's projections for all nodes, by their modules; nothing behind them runs."""
        if not self._mixer.projections:
            return {}
        linears = [self._module.get_submodule(name) for name in self._mixer.projections]
        noted: dict[nn.Module, Tensor] = {}

        def note(linear: nn.Module, own: Forward, inputs: Tensor) -> Tensor:
            noted[linear] = own(inputs)
            if linear is linears[-1]:
                raise _EnoughError
            return noted[linear]

        with forwards_replaced({linear: partial(note, linear, linear.forward) for linear in linears}):
            try:
                self._mixer.call(self._model, self._forward, given, StateView(None))
            except _EnoughError:
                return noted
        raise AssertionError(f"{self._mixer.name} has projections that did not run")


_Calls = tuple[list[Call], list[Call]]
"""Those of a forward, and those before it, over accepted paths."""


class _Aim(NamedTuple):
    """The forward that comes next.

    Attributes:
        batch: What goes through the layers.
        states: The states.
        calls: The calls, by whether a layer takes tokens one by one.
        final: What becomes final with it, if it has pieces of prompts.
        in_block: See ``_Steps``.
    """

    batch: ForwardBatch
    states: States
    calls: dict[bool, _Calls]
    final: ForwardBatch
    in_block: bool


class _EnoughError(Exception):
    """Ends a layer's forward behind its last projection."""


def _by_row(tensor: Tensor, rows: int) -> Tensor:
    return tensor.expand(rows, *tensor.shape[1:]) if tensor.shape[0] != rows else tensor


def _cut(tensor: Tensor, call: Call) -> Tensor:
    """Return the tokens of a call, ``[pair, node, ...]``."""
    return tensor[call.rows.to(tensor.device), call.columns.to(tensor.device)]


def _put(outputs: dict[Path, Tensor], path: Path, part: Tensor, call: Call, batch: ForwardBatch) -> None:
    """Write a call's part of the outputs to its nodes."""
    if path not in outputs:
        outputs[path] = part.new_zeros(batch.batch, batch.nodes, *part.shape[2:])
    outputs[path][call.rows.to(part.device), call.columns.to(part.device)] = part


def _known(output: Tensor, inputs: Tensor) -> Tensor:
    """Return a projection's output that was computed before."""
    return output
