"""The CPU's back end of programs: steps of a captured forward that C runs one after the other, in a single call.

A step of torch costs one to three microseconds before it computes anything, which in decoding is more than it computes.
The C (``native/program.c``) walks through a list of operations instead: products, norms, residuals, gates, rotary
embeddings with the write to the cache, and attention. Steps that it does not know stay as they are, and divide the
forward into several lists. What only they see lies in one piece of memory, in which places are used again.
"""

import ctypes
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from specdec.attention.native import NativeView
from specdec.counting import count_operation
from specdec.execution.norms import FUNCTIONS, activate, normalize
from specdec.execution.patterns import Layers, join_gates, join_turns
from specdec.execution.products import NO_MEMORY, PanelWeight
from specdec.execution.program import Step, memory_of, needed
from specdec.native import DTYPES, native_library

_MULTIPLY, _NORMALIZE, _JOIN, _TURN, _ATTEND = range(5)
_NAMES = ("panels", "norm", "joined", "turned", "attention")
_ADDED = 2
_WORDS = 32  # of an operation
_PLACE = 48  # the bit at which an address has the number of its place
_ALIGNED = 64
_ABSOLUTE, _INNER, _FIRST_GIVEN = range(3)  # places

MOST_POSITIONS = 1 << 17
"""The longest table of angles of rotary embeddings; with more positions, they are computed in every forward."""


class Looked(NamedTuple):
    """Rows ``positions`` (``[batch, node]``) of a table (``[position, dim]``) in place of ``[batch, 1, node, dim]``."""

    table: Tensor
    positions: Tensor


class Workspace:
    """Memory for what the operations of a list pass on, shared by lists of which one runs at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def hold(self, size: int) -> None:
        """Have at least some bytes."""
        if self._memory.numel() < size + _ALIGNED:
            self._memory = torch.empty(size + _ALIGNED, dtype=torch.uint8)

    @property
    def address(self) -> int:
        """Where it begins."""
        return -(-self._memory.data_ptr() // _ALIGNED) * _ALIGNED


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation of the C: its kind, its numbers (a tensor stands for its address), and the tensor it writes."""

    kind: int
    words: Sequence[Tensor | float | None]
    makes: Tensor | None

    @property
    def reads(self) -> list[Tensor]:
        return [word for word in self.words if isinstance(word, Tensor) and word is not self.makes]


def compile_runs(
    steps: list[Step],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    layers: Layers,
    workspace: Workspace,
    now: Callable[[], NativeView],
) -> list[Step]:
    """Return steps that make the same outputs, as many as possible of them in lists.

    Args:
        steps: What was noted; it writes to nothing that it reads.
        inputs, outputs: Those of the forward.
        layers: The functions by which it reaches its cache.
        now: Returns what the forward that runs attends to.
    """
    steps = join_turns(_with_views(steps, outputs), outputs, layers)
    steps = with_tables(steps, inputs[1], outputs, layers, now().cache.max_length)
    steps = join_gates(steps, outputs, activation_of, gated)
    units: list[Step | list[Operation]] = []
    views: dict[int, Step] = {}
    for step in steps:
        operation = None if step.views else _operation(step, layers, now())
        if step.views:
            views.update((id(tensor), step) for tensor in step.makes)
        elif operation is None:
            units.append(step)
        elif units and isinstance(units[-1], list):
            units[-1].append(operation)
        else:
            units.append([operation])
    moving = {memory_of(tensor) for step in steps for tensor in step.makes} | {memory_of(tensor) for tensor in inputs}
    reads = [unit.reads if isinstance(unit, Step) else [t for each in unit for t in each.reads] for unit in units]
    read_by: dict[int, set[int]] = {}
    for number, tensors in enumerate([*reads, outputs]):
        for tensor in tensors:
            read_by.setdefault(memory_of(tensor), set()).add(number)
    written: list[Step] = []

    def show(tensor: Tensor) -> None:
        """Write the views down that a tensor is made by, where it is read first."""
        step = views.get(id(tensor))
        if step is not None:
            for made in step.makes:
                views.pop(id(made), None)
            write(step)

    def write(step: Step) -> None:
        for tensor in step.reads:
            show(tensor)
        written.append(step)

    for number, unit in enumerate(units):
        if isinstance(unit, Step):
            write(unit)
            continue
        made = {memory_of(each.makes): each.makes for each in unit if each.makes is not None}
        leaving = [tensor for memory, tensor in made.items() if read_by.get(memory, set()) - {number}]
        given = {id(t): t for t in reads[number] if memory_of(t) not in made and memory_of(t) in moving}
        for tensor in given.values():
            show(tensor)
        run = _packed(unit, list(given.values()), leaving, workspace, now)
        written.append(Step(run, tuple(given.values()), {}, leaving))
    for tensor in outputs:
        show(tensor)
    return written


def _packed(
    operations: Sequence[Operation],
    given: Sequence[Tensor],
    leaving: Sequence[Tensor],
    workspace: Workspace,
    now: Callable[[], NativeView],
) -> Callable[..., list[Tensor]]:
    """Return a function of the tensors that are given, which runs operations and returns those that are leaving."""
    library = native_library()
    assert library is not None, "a view of the C's attention"
    run: Any = library.run
    places = {memory_of(tensor): _FIRST_GIVEN + len(given) + number for number, tensor in enumerate(leaving)}
    arguments = {id(tensor): _FIRST_GIVEN + number for number, tensor in enumerate(given)}
    inner, size = _laid_out(operations, places)
    workspace.hold(size)
    kept: list[Tensor] = []

    def word(value: Tensor | float | None) -> bytes:
        if isinstance(value, float):
            return struct.pack("@f4x", value)
        if not isinstance(value, Tensor):
            return struct.pack("@l", value or 0)
        behind = value.storage_offset() * value.element_size()
        if id(value) in arguments:
            return struct.pack("@l", arguments[id(value)] << _PLACE)
        if memory_of(value) in places:
            return struct.pack("@l", (places[memory_of(value)] << _PLACE) + behind)
        if memory_of(value) in inner:
            return struct.pack("@l", (_INNER << _PLACE) + inner[memory_of(value)] + behind)
        kept.append(value)
        return struct.pack("@l", value.data_ptr())

    written = [
        struct.pack("@l", each.kind) + b"".join(map(word, each.words)).ljust(8 * (_WORDS - 1), b"\0")
        for each in operations
    ]
    packed, count = ctypes.create_string_buffer(b"".join(written)), len(operations)
    counts = Counter(_NAMES[each.kind] for each in operations)
    shapes = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in leaving]
    addresses = ctypes.c_void_p * (_FIRST_GIVEN + len(given) + len(leaving))

    def run_list(*tensors: Tensor) -> list[Tensor]:
        made = [torch.empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in shapes]
        at = addresses(0, workspace.address, *(t.data_ptr() for t in tensors), *(t.data_ptr() for t in made))
        view = now()
        if run(packed, count, at, view.packed, view.layers) == 0:
            raise MemoryError(NO_MEMORY)
        for name, times in counts.items():
            count_operation(name, times)
        return made

    run_list.kept = kept  # what the operations have the addresses of
    return run_list


def _laid_out(operations: Sequence[Operation], elsewhere: dict[int, int]) -> tuple[dict[int, int], int]:
    """Return where what stays inside lies in a workspace, by its memory, and how large that is."""
    sizes, spans = {}, {}
    for number, operation in enumerate(operations):
        made = operation.makes
        if made is not None and memory_of(made) not in elsewhere:
            sizes[memory_of(made)] = -(-made.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED
            spans[memory_of(made)] = number, number
        for tensor in operation.reads:
            if memory_of(tensor) in spans:
                spans[memory_of(tensor)] = spans[memory_of(tensor)][0], number
    at: dict[int, int] = {}
    for memory, (begin, _) in spans.items():  # in the order in which they are made
        taken = sorted((at[each], at[each] + sizes[each]) for each in at if spans[each][1] >= begin)
        place = 0
        for start, stop in taken:
            if place + sizes[memory] <= start:
                break
            place = max(place, stop)
        at[memory] = place
    return at, max((at[each] + sizes[each] for each in at), default=0)


def _with_views(steps: Sequence[Step], outputs: Sequence[Tensor]) -> list[Step]:
    """Recompute views so that they alias a joint product's output: those of its parts were recorded apart."""
    returned = {id(tensor) for tensor in outputs}
    same: dict[int, Tensor] = {}
    written = []
    for step in steps:
        step = step.reading(same)
        if step.may_view and returned.isdisjoint(id(tensor) for tensor in step.makes):
            before, step = step, Step.ran(step.function, *step.arguments, **step.named)
            same.update((id(old), new) for old, new in zip(before.makes, step.makes, strict=True))
        written.append(step)
    return written


def _operation(step: Step, layers: Layers, view: NativeView) -> Operation | None:
    """Return a step as an operation of the C; None if the C does not know it."""
    weight = getattr(step.function, "__self__", None)
    if isinstance(weight, PanelWeight):
        return _product(weight, step)
    if step.function is normalize:
        return _norm(step)
    if step.function is torch.ops.aten.add.Tensor:
        return None if step.named else _joined(_ADDED, step.arguments[0], step.arguments[1], step.outputs)
    if step.function is gated:
        gate, up, activation = step.arguments
        return _joined(FUNCTIONS[activation], gate, up, step.outputs)
    if step.function == layers.turn:
        return _turn(step, view)
    if step.function == layers.write:
        layer, key, value = step.arguments
        return _write(layer, key, value, view)
    return _attention(step, view) if step.function == layers.attend else None


def _product(weight: PanelWeight, step: Step) -> Operation | None:
    inputs, bias = step.arguments
    if not inputs.is_contiguous() or (bias is not None and (weight.scales is not None or not bias.is_contiguous())):
        return None
    width = inputs.shape[-1]
    sizes = weight.out, width, weight.width, inputs.numel() // width, weight.format, weight.kind
    return Operation(_MULTIPLY, (weight.panels, weight.scales, bias, inputs, step.outputs, *sizes), step.outputs)


def _norm(step: Step) -> Operation | None:
    inputs, weight, eps, rounds, offset = step.arguments
    width, steps = inputs.shape[-1], _rows_of(inputs)
    if steps is None:
        return None
    numbers = inputs.numel() // width, width, *steps, float(eps), float(offset), int(rounds), DTYPES[inputs.dtype]
    return Operation(_NORMALIZE, (inputs, weight, step.outputs, *numbers), step.outputs)


def _rows_of(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return how many rows lie evenly, how far the next such group is, and how far rows are; None if it is not so."""
    if tensor.stride(-1) != 1:
        return None
    axes = [(size, stride) for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
    joined: list[tuple[int, int]] = []
    for size, stride in axes:
        if joined and joined[-1][1] == size * stride:
            joined[-1] = joined[-1][0] * size, stride
        else:
            joined.append((size, stride))
    if len(joined) > 2:
        return None
    if not joined:
        return 1, 0, 0
    inner, step = joined[-1]
    return inner, joined[0][1] if len(joined) == 2 else 0, step


def _joined(function: int, one: Any, other: Any, made: Tensor) -> Operation | None:
    tensors = one, other, made
    if not all(isinstance(each, Tensor) and each.dtype in DTYPES for each in tensors):
        return None
    if len({(each.shape, each.dtype) for each in tensors}) > 1 or made.numel() == 0:
        return None
    width, rows = made.shape[-1], made.numel() // made.shape[-1]
    words: list[Any] = []
    for tensor in tensors:
        evenly = _rows_of(tensor)
        if evenly is None or evenly[0] != rows:
            return None
        words += [tensor, evenly[2]]
    return Operation(_JOIN, (*words, rows, width, function, DTYPES[made.dtype]), made)


def _turn(step: Step, view: NativeView) -> Operation | None:
    layer, query, key, value, cosines, sines, *_ = step.arguments
    turned = step.outputs[0]
    if turned.stride(3) != 1:
        raise ValueError("queries are turned into another layout")
    heads = [(each, *_strides(each, 0, 1, 2)) for each in (query, key, value)]
    made = turned, *_strides(turned, 0, 1, 2)
    sizes = query.shape[1], *_sizes(key, value, query.shape[3], layer, view)
    return Operation(_TURN, (*heads[0], *heads[1], *heads[2], *_angles(cosines, sines), *made, layer, *sizes), turned)


def _angles(cosines: Tensor | Looked, sines: Tensor | Looked) -> tuple[Any, ...]:
    """Return tables of cosines and sines, positions, and what is between rows and nodes: of these, or of the tables."""
    if isinstance(cosines, Looked) and isinstance(sines, Looked):
        places = cosines.positions
        apart = (places.stride(axis) if places.shape[axis] > 1 else 0 for axis in (0, 1))
        return cosines.table, sines.table, places, *apart
    assert isinstance(cosines, Tensor) and isinstance(sines, Tensor)
    strides = tuple(_strides(cosines, 0, 2))
    if strides != tuple(_strides(sines, 0, 2)):
        raise ValueError("sines lie otherwise than cosines")
    return cosines, sines, None, *strides


def _write(layer: int, key: Tensor, value: Tensor, view: NativeView) -> Operation | None:
    heads = [(each, *_strides(each, 0, 1, 2)) for each in (key, value)]
    sizes = 0, *_sizes(key, value, key.shape[3], layer, view)
    return Operation(_TURN, (*[None] * 4, *heads[0], *heads[1], *[None] * 9, layer, *sizes), None)


def _sizes(key: Tensor, value: Tensor, dim: int, layer: int, view: NativeView) -> tuple[int, ...]:
    """Return key heads, nodes, dims and dtype of what is written to a layer's cache."""
    kept = view.cache.stored(layer)
    if not key.dtype == value.dtype == kept.keys.dtype == kept.values.dtype:
        raise ValueError("the cache has another dtype than the keys")
    return key.shape[1], key.shape[2], dim, value.shape[3], DTYPES[key.dtype]


def _attention(step: Step, view: NativeView) -> Operation:
    query, _, _, layer, reach, scaling, softcap, sinks = step.arguments
    kept, made = view.cache.stored(layer), step.outputs
    if query.dtype is not kept.keys.dtype or made.dtype is not query.dtype:
        raise ValueError("the cache has another dtype than the queries")
    heads, nodes, dim = query.shape[1:]
    sizes = layer, heads, kept.values.shape[1], nodes, dim, kept.values.shape[3], DTYPES[query.dtype]
    factors = float(dim**-0.5 if scaling is None else scaling), float(softcap or 0)
    logits = None if sinks is None else sinks.detach().float().contiguous()
    limits = view.reaches[reach].window or 0, view.reaches[reach].chunk or 0
    return Operation(_ATTEND, (query, *_strides(query, 0, 1, 2), made, *sizes, *factors, logits, *limits), made)


def _strides(tensor: Tensor, *axes: int) -> Iterator[int]:
    """Yield how far the entries of some axes are apart: 0 for one that stands for all."""
    if tensor.stride(-1) != 1:
        raise ValueError("the numbers of a head do not lie side by side")
    return (0 if tensor.shape[axis] == 1 else tensor.stride(axis) for axis in axes)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return a function of ``gate`` times ``up``."""
    return activate(gate, activation) * up


def activation_of(step: Step) -> str | None:
    """Return the activation that a step computes in C; None if it is something else."""
    return step.arguments[1] if step.function is activate else None


def with_tables(
    steps: list[Step], positions: Tensor, outputs: Sequence[Tensor], layers: Layers, count: int
) -> list[Step]:
    """Return steps whose turns (``Layers.turn``) look up cosines and sines that depend on positions alone.

    Args:
        steps: The steps of a forward; its tensors are alive.
        positions: The input that is looked up, ``[batch, node]``.
        outputs: Those of the forward.
        layers: The functions by which it reaches its cache.
        count: The number of positions that there are.
    """
    if count > MOST_POSITIONS:
        return steps
    makers = {id(tensor): step for step in steps for tensor in step.makes}
    tables: dict[int, Looked | None] = {}
    turned: list[Step] = []
    for step in steps:
        if step.function == layers.turn:
            layer, query, key, value, *angles, query_norm, key_norm = step.arguments
            for tensor in angles:
                if id(tensor) not in tables:
                    tables[id(tensor)] = _looked(tensor, makers, positions, count)
            found = [tables[id(tensor)] for tensor in angles]
            if None not in found:
                step = replace(step, arguments=(layer, query, key, value, *found, query_norm, key_norm))
        turned.append(step)
    return needed(turned, outputs)


def _looked(tensor: Tensor, makers: dict[int, Step], positions: Tensor, count: int) -> Looked | None:
    """Return a tensor's rows for all positions, if the steps that make it of some positions make them of all."""
    steps = _steps_to(tensor, makers, positions)
    if steps is None:
        return None
    rows, dim = positions.shape[0], tensor.shape[-1]
    every = torch.arange(-(-count // rows) * rows, device=positions.device, dtype=positions.dtype).view(rows, -1)
    same = {id(positions): every}
    try:
        for step in steps:
            again = step.reading(same)
            same[id(step.outputs)] = again.function(*again.arguments, **again.named)
    except RuntimeError:  # an operation has the number of nodes in it
        return None
    made = same[id(tensor)]
    if made.numel() != every.numel() * dim or made.shape[-1] != dim or tensor.numel() != positions.numel() * dim:
        return None
    table = made.reshape(-1, dim)[:count].contiguous()
    return Looked(table, positions) if torch.equal(table[positions].view(tensor.shape), tensor) else None


def _steps_to(tensor: Tensor, makers: dict[int, Step], positions: Tensor) -> list[Step] | None:
    """Return the steps that make a tensor of positions, in order; None if it needs anything else that moves."""
    steps: dict[int, Step] = {}

    def visit(part: Tensor) -> bool:
        step = makers.get(id(part))
        if part is positions or step is None or id(step) in steps:
            return part is not tensor or step is not None  # what was there before stays
        if not isinstance(step.function, OpOverload) or not isinstance(step.outputs, Tensor):
            return False
        if not all(visit(read) for read in step.reads):
            return False
        steps[id(step)] = step
        return True

    return list(steps.values()) if visit(tensor) and steps else None
