"""Runs the recurrent layers of a model's forward node by node, each from its parent's state.

The model's own code runs, unchanged: during a forward each mixer's ``forward`` is replaced by one that calls the
original once per level of the trees, with one token per row, as in plain decoding. So that weights are not read once
per level, the projections that see each token by itself run once for all nodes, before the levels, and the last one
once behind them.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from specdec.cache.states import Pending, States, StateView
from specdec.forward import ForwardBatch
from specdec.recurrent.mixer import Forward, Given, Mixer, Path, forwards_replaced, part_at, replaced
from specdec.topology import Topology


class Call(NamedTuple):
    """One call of a recurrent layer.

    Attributes:
        rows: Rows of the forward, one for each row of the call.
        columns: The nodes of each; one row of them where all are alike.
        before: The place of the state that each starts from (``specdec.cache.states``); None if nothing came before.
        after: The place of the state that each leaves.
        depth: How deep the nodes are, the root's being 0; 0 for pieces.
    """

    rows: Int[Tensor, "pair 1"]
    columns: Int[Tensor, "pair node"]
    slots: Int[Tensor, " pair"]
    before: Int[Tensor, " pair"] | None
    after: Int[Tensor, " pair"]
    depth: int = 0


def calls_of(batch: ForwardBatch, *, one_by_one: bool) -> list[Call]:
    """Return the calls for a forward of trees, or of pieces of prompts.

    Calls never mix rows with and without a state. A tree takes one call per level. Pieces of prompts take one for all
    rows with equally many tokens, so that no padding reaches a layer, or one per token (``one_by_one``).
    """
    fresh = (batch.lengths == 0).cpu().numpy()
    return [*(_of_levels(batch, fresh) if batch.counts is None else _of_pieces(batch, fresh, one_by_one=one_by_one))]


def calls_again(batch: ForwardBatch, pending: Pending, *, one_by_one: bool) -> list[Call]:
    """Return the calls over accepted paths that are not in the final states, whose rows are slots (``Pending``)."""
    counts = pending.counts[batch.slots].cpu().numpy()
    if not counts.any():
        return []
    paths, slots = pending.path[batch.slots].cpu().numpy(), batch.slots.cpu().numpy()
    found = []
    for count in sorted({*counts.tolist()} - {0}):
        row = np.flatnonzero(counts == count)
        final = np.zeros(len(row), dtype=np.int64)
        for columns in np.split(paths[row, :count], count if one_by_one else 1, axis=1):
            of_slots = torch.from_numpy(slots[row, None]).to(batch.slots.device)
            found.append(_call(batch.slots, row, columns, final, final)._replace(rows=of_slots))
    return found


def calls_one_by_one(batch: ForwardBatch, chosen: Int[np.ndarray, " node"]) -> list[Call]:
    """Return a call for each of some nodes of a forward, numbered row by row; rows of the calls count these nodes."""
    fresh, first = (batch.lengths == 0).cpu().numpy(), batch.topology.width - batch.nodes
    parents = batch.topology.parents.cpu().expand(batch.batch, -1).numpy()
    found = []
    for place, (row, node) in enumerate(zip(*divmod(chosen, batch.nodes), strict=True)):
        if batch.counts is not None and node >= batch.counts[row]:
            continue  # padding
        before, after = (parents[row, first + node] + 1, first + node + 1) if batch.counts is None else (node > 0, 1)
        nothing = fresh[row] and first + node == 0
        before, after = (np.array([number], dtype=np.int64) for number in (before, after))
        column = np.zeros((1, 1), dtype=np.int64)
        call = _call(batch.slots, row[None], column, None if nothing else before, after)
        found.append(call._replace(rows=torch.full_like(call.rows, place)))
    return found


def _of_levels(batch: ForwardBatch, fresh: np.ndarray) -> Iterator[Call]:
    topology, rows, first = batch.topology, batch.batch, batch.topology.width - batch.nodes
    depth = topology.depth.cpu().expand(rows, -1).numpy()
    parents = topology.parents.cpu().expand(rows, -1).numpy()
    for level in np.unique(depth[:, first:]):
        row, node = np.nonzero(depth == level)
        row, node = row[node >= first], node[node >= first]
        for nothing in (False, True) if level == 0 else (False,):
            some = fresh[row] == nothing if level == 0 else slice(None)
            if len(row[some]):
                before = None if nothing else parents[row[some], node[some]] + 1
                columns = node[some][:, None] - first
                yield _call(batch.slots, row[some], columns, before, node[some] + 1)._replace(depth=int(level))


def _of_pieces(batch: ForwardBatch, fresh: np.ndarray, *, one_by_one: bool) -> Iterator[Call]:
    counts = batch.counts
    assert counts is not None, "a piece of a prompt"
    for nothing in (True, False):
        for count in sorted({*counts[fresh == nothing].tolist()} - {0}):
            row = np.flatnonzero((fresh == nothing) & (counts == count))
            cuts = range(count) if one_by_one and not nothing else range(0, count, count)
            for start in cuts:
                stop = start + 1 if one_by_one and not nothing else count
                before = None if nothing else np.full(len(row), int(start > 0))
                yield _call(batch.slots, row, np.arange(start, stop)[None], before, np.ones(len(row), dtype=np.int64))


def _call(
    slots: Int[Tensor, " batch"], row: np.ndarray, columns: np.ndarray, before: np.ndarray | None, after: np.ndarray
) -> Call:
    device = slots.device
    rows = torch.from_numpy(row).to(device)
    return Call(
        rows=rows[:, None],
        columns=torch.from_numpy(columns).to(device),
        slots=slots[rows],
        before=None if before is None else torch.from_numpy(before).to(device),
        after=torch.from_numpy(after).to(device),
    )


class Recurrence:
    """The recurrent layers of a model: none in a model of attention alone, where nothing happens."""

    def __init__(self, model: nn.Module, mixers: Sequence[Mixer]):
        self._model, self.mixers = model, mixers
        self._aimed: _Aim | None = None

    def aim(self, batch: ForwardBatch, states: States | None) -> None:
        """Prepare for a forward: in which order its nodes go through the layers."""
        if not self.mixers:
            return
        assert states is not None, "the cache was made for another model"
        states.check(batch.slots, batch.lengths)
        calls = dict[bool, tuple[list[Call], list[Call]]]()
        for kind in {mixer.one_by_one for mixer in self.mixers}:
            again = [] if states.pending is None else calls_again(batch, states.pending, one_by_one=kind)
            calls[kind] = calls_of(batch, one_by_one=kind), again
        self._aimed = _Aim(batch, states, calls, batch, in_block=False)

    def aim_block(self, batch: ForwardBatch, states: States | None, chosen: np.ndarray, *, rows: int) -> None:
        """Prepare for a forward of some nodes of a batch, numbered row by row, each as a row of a block: alone."""
        if not self.mixers:
            return
        assert states is not None, "the cache was made for another model"
        if chosen[0] == 0:
            states.check(batch.slots, batch.lengths)
        zeros, root = batch.slots.new_zeros(rows), Topology.chain(1, batch.slots.device)
        block = ForwardBatch(tokens=zeros[:, None], slots=zeros, lengths=zeros, topology=root)
        calls = calls_one_by_one(batch, chosen)
        last = chosen[-1] == batch.batch * batch.nodes - 1
        self._aimed = _Aim(block, states, {kind: (calls, []) for kind in (True, False)}, batch if last else block, True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """During the ``with`` block, run the layers so in the forward that ``aim`` prepared for.

        The states of a prompt's piece become final at its end: a forward that fails leaves them alone.
        """
        if not self.mixers:
            yield
            return
        assert self._aimed is not None, "aim was called"
        batch, states, final = self._aimed.batch, self._aimed.states, self._aimed.final
        with ExitStack() as stack:
            for mixer in self.mixers:
                module = self._model.get_submodule(mixer.name)
                stack.enter_context(mixer.attributes_kept(self._model))
                steps = _Steps(self._model, mixer, module.forward, self._aimed)
                stack.enter_context(forwards_replaced({module: steps.run}))
            yield
        if states.pending is not None:
            states.pending.counts[batch.slots] = 0
        if final.counts is not None:
            counts = torch.from_numpy(final.counts).to(final.slots.device)
            states.commit(final.slots, final.slots.new_empty(final.batch, 0), counts)


@dataclass
class _Steps:
    """One recurrent layer, whose own forward is ``forward``, in the forward that was aimed at."""

    model: nn.Module
    mixer: Mixer
    forward: Forward
    aim: "_Aim"

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's result for all nodes."""
        given, batch, mixer = (args, kwargs), self.aim.batch, self.mixer
        calls, again = self.aim.calls[mixer.one_by_one]
        inputs = {path: part_at(given, path) for path in mixer.takes}
        inputs = {path: each.expand(batch.batch, *each.shape[1:]) for path, each in inputs.items()}
        self._settle(given, inputs, again)
        if not calls:  # padding alone, whose outputs nobody reads
            return mixer.call(self.model, self.forward, given, StateView(None))[0]
        # A single call reads nothing twice.
        several = len(calls) > 1 or self.aim.in_block
        projected = self._projected(given) if several else {}
        outputs: dict[Path, Tensor] = {}
        with ExitStack() as stack:
            finish: Forward | None = None
            if several and mixer.last is not None:
                module = self.model.get_submodule(mixer.name).get_submodule(mixer.last[0])
                finish = module.forward
                stack.enter_context(forwards_replaced({module: lambda rows: rows}))
            result = None
            for call in calls:
                cut = {path: _cut(each, call) for path, each in inputs.items()}
                known = {linear: _cut(each, call) for linear, each in projected.items()}
                with forwards_replaced({linear: partial(_known, each) for linear, each in known.items()}):
                    result = self._step(replaced(given, cut), call)
                for path in mixer.gives:
                    part = part_at(result, path)
                    if path not in outputs:
                        outputs[path] = part.new_zeros(batch.batch, batch.nodes, *part.shape[2:])
                    outputs[path][call.rows.to(part.device), call.columns.to(part.device)] = part
        if finish is not None and mixer.last is not None:
            outputs[mixer.last[1]] = finish(outputs[mixer.last[1]])
        return replaced(result, outputs)

    def _step(self, given: Given, call: Call) -> Any:
        """Return the layer's result for the tokens of one call, and store the states that it leaves."""
        states, before = self.aim.states, None
        if call.before is not None:
            drafted = call.depth > 1
            before = {key: states.before(key, call.slots, call.before, drafted=drafted) for key in self.mixer.states}
        result, after = self.mixer.call(self.model, self.forward, given, StateView(before))
        for key, state in after.items():
            states.put(key, call.slots, call.after, state, drafted=call.depth > 0)
        return result

    def _settle(self, given: Given, inputs: dict[Path, Tensor], again: Sequence[Call]) -> None:
        """Run over accepted paths that are not in the final states, and keep what the layer is given now."""
        pending = self.aim.states.pending
        if pending is None:
            return
        for call in again:
            cut = {path: _cut(pending.inputs[self.mixer.name, path], call) for path in inputs}
            self._step(replaced(given, cut), call)
        if self.aim.batch.counts is None:
            for path, each in inputs.items():
                pending.keep((self.mixer.name, path), self.aim.batch.slots, each)

    def _projected(self, given: Given) -> dict[nn.Module, Tensor]:
        """Return the outputs of the layer's projections for all nodes, by their modules; nothing behind them runs."""
        if not self.mixer.projections:
            return {}
        linears = [self.model.get_submodule(self.mixer.name).get_submodule(name) for name in self.mixer.projections]
        noted: dict[nn.Module, Tensor] = {}

        def note(linear: nn.Module, own: Forward, inputs: Tensor) -> Tensor:
            noted[linear] = own(inputs)
            if linear is linears[-1]:
                raise _EnoughError
            return noted[linear]

        with forwards_replaced({linear: partial(note, linear, linear.forward) for linear in linears}):
            try:
                self.mixer.call(self.model, self.forward, given, StateView(None))
            except _EnoughError:
                return noted
        raise AssertionError(f"{self.mixer.name} has projections that did not run")


class _Aim(NamedTuple):
    """The forward that comes next.

    Attributes:
        calls: The calls, and those before them, over accepted paths; by whether a layer takes tokens one by one.
        final: What becomes final with it, if it has pieces of prompts.
        in_block: Whether rows are single tokens, which a block of one size holds however many calls there are.
    """

    batch: ForwardBatch
    states: States
    calls: dict[bool, tuple[list[Call], list[Call]]]
    final: ForwardBatch
    in_block: bool


class _EnoughError(Exception):
    """Ends a layer's forward behind its last projection."""


def _cut(tensor: Tensor, call: Call) -> Tensor:
    """Return the tokens of a call, ``[pair, node, ...]``."""
    return tensor[call.rows.to(tensor.device), call.columns.to(tensor.device)]


def _known(output: Tensor, inputs: Tensor) -> Tensor:
    return output
