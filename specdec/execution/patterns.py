"""Finds patterns in a forward's operations, and rewrites it in fewer: gates, rotary embeddings, joint products.

A pattern is found by what its operations are and read; where it is not found, they stay as they are. Norms are single
steps already (``norms``).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from specdec.attention.call import AttentionBackend, AttentionCall, View
from specdec.attention.native import NativeView, Seen
from specdec.execution.products import PanelWeight
from specdec.execution.program import Program, Step, memory_of, needed
from specdec.opaque import opaque

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Joint = Callable[[Sequence[PanelWeight]], PanelWeight | None]

_aten = torch.ops.aten
_SAME = (_aten.alias.default, _aten.detach.default)


class CurrentForward:
    """The forward that runs: what the layers of a captured forward call, which patterns know it by, and what they read.

    Apart from the executor, which keeps programs that refer to this: in a ring they would keep the cache alive.
    """

    def __init__(self, backend: AttentionBackend, kernels: Any = None):
        self.backend, self._kernels = backend, kernels
        self.view: View | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)  # of what operations of the C pass on: one list at a time runs

    def answer(self, call: AttentionCall) -> Tensor:
        """Return a layer's attention, as a single operation."""
        batch, heads, nodes = call.query.shape[:3]
        like = partial(call.query.new_empty, batch, nodes, heads, call.value.shape[3])
        return opaque(self.attend, *call, like=like)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's keys and values, as a single operation."""
        opaque(self.write, layer, keys, values, like=lambda: None)

    def attend(self, *call: Any) -> Tensor:
        return self.backend.attend(AttentionCall(*call), self.view)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        assert self.view is not None
        self.view.cache.write(layer, keys, values)

    def turn(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        """Turn queries and keys (by cosines, sines and norms), and store keys and values; on a CPU the C does this."""
        assert self.view is not None and self._kernels is not None
        return self.view.cache.write_turned(layer, self._kernels.rotate, query, key, value, *options)

    def replay(self, program: Program, view: NativeView, seen: Seen, *inputs: Tensor) -> Sequence[Tensor]:
        """Return the outputs of a captured forward that sees what stands in ``seen``, and otherwise as in ``view``."""
        self.view = NativeView(view.cache, view.masks, view.reaches, seen, view.cells)  # quicker than to replace it
        return program(*inputs)

    def native_view(self) -> NativeView:
        assert isinstance(self.view, NativeView), "as a program's key says"
        return self.view

    def hold(self, size: int) -> None:
        """Let ``memory`` have at least so many bytes."""
        if self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8)


def rewrite(steps: list[Step], outputs: Sequence[Tensor], kernels: Any, layers: CurrentForward) -> list[Step]:
    """Return fewer steps that make the same outputs, up to rounding, by the functions of ``specdec.kernels.layers``."""
    if any(step.writes for step in steps):
        return steps  # a rewriting could move a read behind a write
    steps = _join_residuals(without_repetition(steps, outputs), outputs, kernels)
    steps = join_gates(steps, outputs, _activation, kernels.gated)
    steps = join_turns(steps, outputs, layers, kernels.norm)
    return needed(steps, outputs)


def without_repetition(
    steps: list[Step], outputs: Sequence[Tensor], inputs: Sequence[Tensor] | None = None
) -> list[Step]:
    """Return steps without those that return what is there already.

    These are casts to the same dtype, what was computed before of tensors that no step writes to, and, where the inputs
    are given, views of memory that stays where it is.
    """
    kept: list[Step] = []
    known: dict[str, Step] = {}  # by the call, with tensors by their identity
    same: dict[int, Tensor] = {}
    returned = {id(tensor) for tensor in outputs}
    moving = {id(tensor) for tensor in inputs or []}
    written = {memory_of(tensor) for step in steps for tensor in step.writes}
    for step in steps:
        step = step.reading(same)
        views = (inputs is not None or bool(written)) and step.views  # tensors without numbers have no memory
        if views and inputs is not None and moving.isdisjoint(id(tensor) for tensor in step.reads):
            continue
        moving.update(id(tensor) for tensor in step.makes)
        if not isinstance(step.function, OpOverload) or step.writes:
            kept.append(step)
            continue
        if any(step.outputs is read for read in step.reads):
            continue
        if step.function in _SAME and id(step.outputs) not in returned:
            same[id(step.outputs)] = step.arguments[0]
            continue
        steady = views or not written or written.isdisjoint(map(memory_of, (*step.reads, *step.makes)))
        called = step.reading({id(tensor): (Tensor, id(tensor)) for tensor in step.reads})
        first = known.setdefault(repr((called.function, called.arguments, called.named)), step) if steady else step
        if first is not step and returned.isdisjoint(id(tensor) for tensor in step.makes):
            same.update((id(new), old) for new, old in zip(step.makes, first.makes, strict=True))
            continue
        kept.append(step)
    return kept


def join_products(steps: list[Step], joint: Joint) -> list[Step]:
    """Return steps with one product for several of the same inputs, such as a layer's queries, keys and values.

    ``joint`` makes one weight of several that are multiplied with the same inputs, or returns None.
    """
    groups: dict[int, list[tuple[Step, PanelWeight]]] = {}
    made = {id(tensor) for step in steps for tensor in step.makes}
    written = {id(tensor) for step in steps if step.writes for tensor in step.reads}
    for step in steps:
        weight = getattr(step.function, "__self__", None)
        if isinstance(weight, PanelWeight) and id(step.arguments[0]) not in written:
            groups.setdefault(id(step.arguments[0]), []).append((step, weight))
    replaced: dict[Step, list[Step]] = {}
    for group in groups.values():
        products, weights = [step for step, _ in group], [weight for _, weight in group]
        biases = [step.arguments[1] for step in products if step.arguments[1] is not None]
        constant = made.isdisjoint(id(bias) for bias in biases)
        if len(group) < 2 or not constant or len(biases) not in (0, len(group)):
            continue
        weight = joint(weights)
        if weight is None:
            continue
        bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        product = Step.ran(weight.multiply, products[0].arguments[0], bias)
        parts = [step.outputs for step in products]
        split = Step.ran(_aten.split_with_sizes.default, product.outputs, [part.shape[-1] for part in parts], -1)
        changed = not written.isdisjoint(id(part) for part in parts)  # what was recorded is not what was multiplied
        if changed or all(map(torch.equal, split.outputs, parts)):
            replaced |= {step: [] for step in products[1:]}
            replaced[products[0]] = [product, replace(split, outputs=parts)]
    return [new for step in steps for new in replaced.get(step, [step])]


class Graph:
    """Who makes and who reads the tensors of some steps; ``steps`` has what was replaced."""

    def __init__(self, steps: list[Step], outputs: Sequence[Tensor]):
        self.steps = list(steps)
        self._maker = {id(tensor): step for step in steps for tensor in step.makes}
        self._readers: dict[int, set[Step]] = {}
        self._returned = {id(tensor) for tensor in outputs}
        for step in steps:
            for tensor in step.reads:
                self._readers.setdefault(id(tensor), set()).add(step)

    def match(self, part: Any, function: Callable[..., Any]) -> Step | None:
        """Return a step, or the step that makes a tensor, if it calls this function."""
        step = part if isinstance(part, Step) else self._maker.get(id(part))
        return step if step is not None and step.function == function else None

    def readers(self, tensor: Tensor) -> set[Step]:
        """Return the steps that read a tensor, among them those that were replaced."""
        return self._readers.get(id(tensor), set())

    def only_within(self, steps: Sequence[Step]) -> bool:
        """Return whether nothing else needs what these steps make, except for the first one's output."""
        inner = [tensor for step in steps[1:] for tensor in step.makes]
        return all(id(t) not in self._returned and self.readers(t) <= set(steps) for t in inner)

    def replace(self, steps: Sequence[Step], new: list[Step], *, at: Step | None = None) -> None:
        """Put new steps in the place of one of some; by default of the first, which is the last to run."""
        place, gone = self.steps.index(at or steps[0]), set(steps)
        self.steps[place : place + 1] = new
        self.steps = [step for step in self.steps if step not in gone]
        self._maker.update((id(tensor), step) for step in new for tensor in step.makes)


def _join_residuals(steps: list[Step], outputs: Sequence[Tensor], kernels: Any) -> list[Step]:
    """Replace norms of the sum of two tensors of one shape, where the sum is made: others read it too."""
    graph = Graph(steps, outputs)
    for norm in steps:
        added = norm.function is kernels.norm and graph.match(norm.arguments[0], _aten.add.Tensor)
        if not added or added.named or not all(isinstance(each, Tensor) for each in added.arguments):
            continue
        x, *options = norm.arguments
        if len({(each.shape, each.dtype) for each in (*added.arguments, x)}) == 1:
            joint = Step(kernels.add_norm, (*added.arguments, *options), {}, [norm.outputs, x])
            graph.replace([norm, added], [joint], at=added)
    return graph.steps


def join_gates(
    steps: list[Step], outputs: Sequence[Tensor], activation_of: Callable[[Step], Any], gated: Callable[..., Tensor]
) -> list[Step]:
    """Replace activations that are multiplied by a tensor of the same shape by ``gated(gate, up, activation)``.

    ``activation_of`` returns the activation that a step is; None for other steps.
    """
    graph = Graph(steps, outputs)
    for step in steps:
        activation = activation_of(step)
        readers = () if activation is None else graph.readers(step.outputs)
        after = graph.match(next(iter(readers)), _aten.mul.Tensor) if len(readers) == 1 else None
        if after is None or not graph.only_within([after, step]):
            continue
        gate, up = step.arguments[0], next((each for each in after.arguments if each is not step.outputs), None)
        if isinstance(up, Tensor) and (up.shape, up.dtype) == (gate.shape, gate.dtype):
            graph.replace([after, step], [Step(gated, (gate, up, activation), {}, after.outputs)])
    return graph.steps


def _activation(step: Step) -> str | None:
    if isinstance(step.outputs, Tensor) and step.outputs.dtype not in DTYPES:
        return None
    if step.function is _aten.silu.default:
        return "silu"
    if step.function is _aten.gelu.default:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(step.named.get("approximate", "none"))
    return None


class Rotation(NamedTuple):
    """A rotary embedding, ``x * cosines + cat(-x[half:], x[:half]) * sines``: its steps, the sum first, and inputs."""

    steps: list[Step]
    x: Tensor
    cosines: Tensor
    sines: Tensor


def rotation_of(graph: Graph, part: Any) -> Rotation | None:
    """Return the rotary embedding that a step, or the step that makes a tensor, ends; None if it is something else."""
    total = graph.match(part, _aten.add.Tensor)
    kept = total and graph.match(total.arguments[0], _aten.mul.Tensor)
    moved = total and graph.match(total.arguments[1], _aten.mul.Tensor)
    joined = moved and graph.match(moved.arguments[0], _aten.cat.default)
    if not (total and kept and moved and joined) or total.named:
        return None
    x, cosines, sines = kept.arguments[0], kept.arguments[1], moved.arguments[1]
    parts, half = joined.arguments[0], x.shape[-1] // 2
    if len(parts) != 2 or joined.arguments[1:] not in ((-1,), (x.dim() - 1,)) or x.shape[-1] != 2 * half:
        return None
    negated = graph.match(parts[0], _aten.neg.default)
    upper = negated and graph.match(negated.arguments[0], _aten.slice.Tensor)
    lower = graph.match(parts[1], _aten.slice.Tensor)
    if not (negated and upper and lower) or upper.arguments[0] is not x or lower.arguments[0] is not x:
        return None
    if _cut_of(upper) != (half, 2 * half) or _cut_of(lower) != (0, half):
        return None
    steps = [total, kept, moved, joined, negated, upper, lower]
    alike = all(isinstance(table, Tensor) and table.shape[-1] == x.shape[-1] for table in (cosines, sines))
    return Rotation(steps, x, cosines, sines) if alike and graph.only_within(steps) else None


def _cut_of(step: Step) -> tuple[int, int] | None:
    """Return where a slice of the last axis begins and ends; None for a slice of another axis, or with gaps."""
    given = step.arguments[1:]
    axis, start, stop, by = *given, *(0, None, None, 1)[len(given) :]
    dim, size = step.arguments[0].dim(), step.arguments[0].shape[-1]
    return (start or 0, size if stop is None else min(stop, size)) if by == 1 and axis in (dim - 1, -1) else None


def join_turns(
    steps: list[Step], outputs: Sequence[Tensor], layers: CurrentForward, norm: Callable[..., Tensor] | None = None
) -> list[Step]:
    """Replace the rotary embedding of a layer's queries and keys, norms of their heads, and the write behind it."""
    graph = Graph(steps, outputs)
    order = {step: number for number, step in enumerate(steps)}
    for write in steps:
        if write.function != layers.write:
            continue
        layer, key, value = write.arguments
        attends = [step for step in graph.readers(key) if step.function == layers.attend and step.arguments[1] is key]
        if len(attends) != 1:
            continue
        query = attends[0].arguments[0]
        of_query, of_key = rotation_of(graph, query), rotation_of(graph, key)
        if of_query is None or of_key is None or not _is_pair(of_query, of_key, value):
            continue
        if any(order[step] < order[write] for step in (graph.readers(query) | graph.readers(key)) - {write}):
            continue
        heads = [_normalized(graph, each, norm) for each in (of_query, of_key)]
        if len({each.norm and each.norm[1:] for each in heads}) > 1:
            heads = [_Heads(of_query.x), _Heads(of_key.x)]
        arguments = layer, *(each.x for each in heads), value, *of_query[2:], *(each.norm for each in heads)
        turn = Step(layers.turn, arguments, {}, [query, key])
        gone = [write, *of_query.steps, *of_key.steps, *(step for each in heads for step in each.steps)]
        graph.replace(gone, [*(step for each in heads for step in each.views), turn])
    return graph.steps


def _is_pair(query: Rotation, key: Rotation, value: Any) -> bool:
    """Return whether one kernel turns both: ``[batch, head, node, head_dim]`` by one table for all heads."""
    tensors = query.x, key.x, value, query.cosines, query.sines
    same = query.cosines is key.cosines and query.sines is key.sines
    if not same or any(each.dim() != 4 for each in tensors):
        return False
    one = query.cosines.shape[1] == query.sines.shape[1] == 1 and key.x.shape[1] == value.shape[1]
    return one and len({(each.shape[2], each.dtype) for each in tensors}) == 1 and value.dtype in DTYPES


class _Heads(NamedTuple):
    """Heads that are turned, or normalized and turned: ``[batch, head, node, head_dim]``."""

    x: Tensor
    norm: tuple[Any, ...] | None = None  # weight, eps, rounds and offset
    steps: Sequence[Step] = ()  # of the norm
    views: Sequence[Step] = ()  # which make ``x`` in their place


def _normalized(graph: Graph, rotation: Rotation, function: Callable[..., Tensor] | None) -> _Heads:
    """Return the norm whose result is turned and nothing else; heads and nodes may change places in between."""
    moved = graph.match(rotation.x, _aten.transpose.int)
    norm = function and graph.match(rotation.x if moved is None else moved.arguments[0], function)
    steps = [step for step in (moved, norm) if step is not None]
    if norm is None or not graph.only_within([rotation.steps[0], *steps, *rotation.steps[1:]]):
        return _Heads(rotation.x)
    x, *options = norm.arguments
    if moved is None:
        return _Heads(x, tuple(options), steps)
    if moved.arguments[1:] != (1, 2):
        return _Heads(rotation.x)
    view = Step.ran(moved.function, x, 1, 2)
    return _Heads(view.outputs, tuple(options), steps, [view])
