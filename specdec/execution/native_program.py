"""The CPU's back end of programs: steps of a captured forward that C (``native/program.c``) runs in a single call.

A step of torch costs one to three microseconds before it computes anything, which in decoding is more than it computes.
Steps that the C does not know stay as they are, and divide the forward into several lists.
"""

import ctypes
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from specdec.attention.native import NativeView
from specdec.counting import count_operation, counting
from specdec.execution.norms import FUNCTIONS, activate, normalize
from specdec.execution.patterns import CurrentForward, join_gates, join_turns
from specdec.execution.products import NO_MEMORY, PanelWeight
from specdec.execution.program import Step, memory_of, needed, write_program
from specdec.native import DTYPES, native_library

_KINDS = ("panels", "norm", "joined", "turned", "attention")
_WORDS = 32  # of an operation
_PLACE = 48  # the bit at which an address has the number of its place
_ADDED = 2
_ALIGNED = 64  # torch's own memory is, too
_INNER, _FIRST_GIVEN = 1, 2  # places; 0 is for absolute addresses
MOST_POSITIONS = 1 << 17  # of a table of rotary embeddings' angles; with more, they are computed in every forward


class Looked(NamedTuple):
    """Rows ``positions`` (``[batch, node]``) of a table (``[position, dim]``) in place of ``[batch, 1, node, dim]``."""

    table: Tensor
    positions: Tensor


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation of the C: its kind, its numbers (a tensor stands for its address), and the tensor it writes."""

    kind: str
    words: Sequence[Tensor | float | None]
    makes: Tensor | None

    @property
    def reads(self) -> list[Tensor]:
        return [word for word in self.words if isinstance(word, Tensor) and word is not self.makes]


def compile_runs(
    steps: list[Step], inputs: Sequence[Tensor], outputs: Sequence[Tensor], current: CurrentForward
) -> list[Step]:
    """Return steps of a forward that make the same outputs, as many as possible of them in lists.

    The steps write to nothing that they read.
    """
    now = current.native_view()
    steps = join_turns(_with_views(steps, outputs), outputs, current)
    steps = with_tables(steps, inputs[1], outputs, current, now.cache.max_length)
    steps = join_gates(steps, outputs, lambda each: each.arguments[1] if each.function is activate else None, gated)
    views = {id(tensor): step for step in steps if step.views for tensor in step.makes}
    units: list[Step | list[Operation]] = []
    for step in steps:
        operation = None if step.views else _operation(step, current, now)
        if operation is None:
            units += [] if step.views else [step]
        elif units and isinstance(units[-1], list):
            units[-1].append(operation)
        else:
            units.append([operation])
    moving = {memory_of(tensor) for step in steps for tensor in step.makes} | {memory_of(tensor) for tensor in inputs}
    reads = [unit.reads if isinstance(unit, Step) else [t for each in unit for t in each.reads] for unit in units]
    read_by: dict[int, set[int]] = defaultdict(set)
    for number, tensors in enumerate([*reads, outputs]):
        for tensor in tensors:
            read_by[memory_of(tensor)].add(number)
    written: list[Step] = []

    def show(tensors: Iterable[Tensor]) -> None:
        """Write the views down that tensors are made by, where they are read first."""
        for tensor in tensors:
            step = views.get(id(tensor))
            if step is not None:
                for made in step.makes:
                    views.pop(id(made), None)
                write(step)

    def write(step: Step) -> None:
        show(step.reads)
        written.append(step)

    for number, unit in enumerate(units):
        if isinstance(unit, Step):
            write(unit)
            continue
        made = {memory_of(each.makes): each.makes for each in unit if each.makes is not None}
        leaving = [tensor for memory, tensor in made.items() if read_by[memory] - {number}]
        given = {id(t): t for t in reads[number] if memory_of(t) not in made and memory_of(t) in moving}
        run = _packed(unit, list(given.values()), leaving, current)
        write(Step(run, tuple(given.values()), {}, leaving))
    show(outputs)
    return written


def _packed(
    operations: Sequence[Operation], given: Sequence[Tensor], leaving: Sequence[Tensor], current: CurrentForward
) -> Callable[..., list[Tensor]]:
    """Return a function of the tensors that are given, which runs operations and returns those that are leaving."""
    library: Any = native_library()
    run = library.run
    arguments = {id(tensor): number << _PLACE for number, tensor in enumerate(given, _FIRST_GIVEN)}
    places = {memory_of(t): number << _PLACE for number, t in enumerate(leaving, _FIRST_GIVEN + len(given))}
    inner, size = _laid_out(operations, places)
    places |= {memory: (_INNER << _PLACE) + place for memory, place in inner.items()}
    current.hold(size)
    kept: list[Tensor] = []

    def word(value: Tensor | float | None) -> bytes:
        if isinstance(value, float):
            return struct.pack("@f4x", value)
        return struct.pack("@l", address(value) if isinstance(value, Tensor) else value or 0)

    def address(tensor: Tensor) -> int:
        if id(tensor) in arguments:
            return arguments[id(tensor)]
        if memory_of(tensor) in places:
            return places[memory_of(tensor)] + int(tensor.storage_offset()) * tensor.element_size()
        kept.append(tensor)
        return tensor.data_ptr()

    words = [(_KINDS.index(operation.kind), *operation.words) for operation in operations]
    written = [b"".join(map(word, each)).ljust(8 * _WORDS, b"\0") for each in words]
    packed, count = ctypes.create_string_buffer(b"".join(written)), len(operations)
    counts = Counter(operation.kind for operation in operations)
    shapes = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in leaving]
    addresses = ctypes.c_void_p * (_FIRST_GIVEN + len(given) + len(leaving))

    def run_list(*tensors: Tensor) -> list[Tensor]:
        made = [torch.empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in shapes]
        at = addresses(0, current.memory.data_ptr(), *(t.data_ptr() for t in tensors), *(t.data_ptr() for t in made))
        view = current.native_view()
        if run(packed, count, at, view.packed, view.layers) == 0:
            raise MemoryError(NO_MEMORY)
        if counting.get():
            for name, times in counts.items():
                count_operation(name, times)
        return made

    run_list.kept = kept  # what the operations have the addresses of
    return run_list


def _laid_out(operations: Sequence[Operation], elsewhere: dict[int, int]) -> tuple[dict[int, int], int]:
    """Return where what stays inside lies in a workspace, by its memory, and how large that is."""
    sizes: dict[int, int] = {}
    spans: dict[int, tuple[int, int]] = {}  # the operations that make it and that read it last
    for number, operation in enumerate(operations):
        made = operation.makes
        if made is not None and memory_of(made) not in elsewhere:
            sizes[memory_of(made)] = -(-made.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED
            spans[memory_of(made)] = number, number
        for memory in map(memory_of, operation.reads):
            if memory in spans:
                spans[memory] = spans[memory][0], number
    at: dict[int, int] = {}
    for memory, (begin, _) in spans.items():  # in the order in which they are made
        place = 0
        for start, stop in sorted((at[each], at[each] + sizes[each]) for each in at if spans[each][1] >= begin):
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


def _operation(step: Step, current: CurrentForward, view: NativeView) -> Operation | None:
    """Return a step as an operation of the C; None if the C does not know it."""
    weight, arguments, made = getattr(step.function, "__self__", None), step.arguments, step.outputs
    if isinstance(weight, PanelWeight):
        return _product(weight, made, *arguments)
    if step.function is normalize:
        return _norm(made, *arguments)
    if step.function is torch.ops.aten.add.Tensor:
        return None if step.named else _joined(_ADDED, made, *arguments)
    if step.function is gated:
        return _joined(FUNCTIONS[arguments[2]], made, *arguments[:2])
    if step.function == current.turn:
        return _turn(view, made[0], *arguments[:6])
    if step.function == current.write:
        return _turn(view, None, arguments[0], None, *arguments[1:])
    return _attention(view, made, *arguments) if step.function == current.attend else None


def _product(weight: PanelWeight, made: Tensor, inputs: Tensor, bias: Tensor | None) -> Operation | None:
    if not inputs.is_contiguous() or (bias is not None and not bias.is_contiguous()):
        return None
    width = inputs.shape[-1]
    sizes = weight.out, width, weight.width, inputs.numel() // width, weight.format, weight.kind
    return Operation("panels", (weight.panels, weight.scales, bias, inputs, made, *sizes), made)


def _norm(made: Tensor, inputs: Tensor, weight: Tensor, eps: float, rounds: bool, offset: float) -> Operation | None:
    width, steps = inputs.shape[-1], _rows_of(inputs)
    if steps is None:
        return None
    numbers = inputs.numel() // width, width, *steps, float(eps), float(offset), int(rounds), DTYPES[inputs.dtype]
    return Operation("norm", (inputs, weight, made, *numbers), made)


def _rows_of(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return how many rows lie evenly, how far the next such group is, and how far rows are; None if it is not so."""
    groups: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if groups and size > 1 and groups[-1][1] == size * stride:
            groups[-1] = groups[-1][0] * size, stride
        elif size > 1:
            groups.append((size, stride))
    if tensor.stride(-1) != 1 or len(groups) > 2:
        return None
    inner, step = groups[-1] if groups else (1, 0)
    return inner, groups[0][1] if len(groups) == 2 else 0, step


def _joined(function: int, made: Tensor, one: Any, other: Any) -> Operation | None:
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
    return Operation("joined", (*words, rows, width, function, DTYPES[made.dtype]), made)


def _turn(
    view: NativeView, made: Tensor | None, layer: int, query: Tensor | None, key: Tensor, value: Tensor,
    cosines: Any = None, sines: Any = None,
) -> Operation:  # fmt: skip
    """Return the operation that turns queries and keys and writes keys and values; without a query it only writes."""
    kept = view.cache.stored(layer)
    if not key.dtype == value.dtype == kept.keys.dtype == kept.values.dtype:
        raise ValueError("the cache has another dtype than the keys")
    heads = [_placed(tensor, 0, 1, 2) for tensor in (query, key, value)]
    angles = (None,) * 5 if query is None else _angles(cosines, sines)
    count, dim = (0, key.shape[3]) if query is None else (query.shape[1], query.shape[3])
    sizes = layer, count, key.shape[1], key.shape[2], dim, value.shape[3], DTYPES[key.dtype]
    return Operation("turned", (*heads[0], *heads[1], *heads[2], *angles, *_placed(made, 0, 1, 2), *sizes), made)


def _angles(cosines: Any, sines: Any) -> tuple[Any, ...]:
    """Return tables of cosines and sines, positions, and what is between rows and nodes: of these, or of the tables."""
    if isinstance(cosines, Looked):
        return cosines.table, sines.table, *_placed(cosines.positions, 0, 1)
    apart = [*_strides(cosines, 0, 2)]
    if apart != [*_strides(sines, 0, 2)]:
        raise ValueError("sines lie otherwise than cosines")
    return cosines, sines, None, *apart


def _attention(
    view: NativeView, made: Tensor, query: Tensor, key: Tensor, value: Tensor, layer: int, reach: int,
    scaling: float | None, softcap: float | None, sinks: Tensor | None,
) -> Operation:  # fmt: skip
    kept, limits = view.cache.stored(layer), view.reaches[reach]
    if query.dtype is not kept.keys.dtype or made.dtype is not query.dtype:
        raise ValueError("the cache has another dtype than the queries")
    heads, nodes, dim = query.shape[1:]
    sizes = layer, heads, kept.values.shape[1], nodes, dim, kept.values.shape[3], DTYPES[query.dtype]
    factors = float(dim**-0.5 if scaling is None else scaling), float(softcap or 0)
    logits = None if sinks is None else sinks.detach().float().contiguous()
    words = *_placed(query, 0, 1, 2), made, *sizes, *factors, logits, limits.window or 0, limits.chunk or 0
    return Operation("attention", words, made)


def _placed(tensor: Tensor | None, *axes: int) -> tuple[Tensor | int | None, ...]:
    """Return a tensor, and how far the entries of some axes are apart."""
    return (tensor, *([0] * len(axes) if tensor is None else _strides(tensor, *axes)))


def _strides(tensor: Tensor, *axes: int) -> Iterator[int]:
    """Yield how far the entries of some axes are apart: 0 for one that stands for all."""
    if tensor.stride(-1) != 1:
        raise ValueError("the numbers of a head do not lie side by side")
    return (0 if tensor.shape[axis] == 1 else tensor.stride(axis) for axis in axes)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return a function of ``gate`` times ``up``."""
    return activate(gate, activation) * up


def with_tables(
    steps: list[Step], positions: Tensor, outputs: Sequence[Tensor], current: CurrentForward, count: int
) -> list[Step]:
    """Return steps whose turns look up cosines and sines that depend on ``positions``, ``[batch, node]``, alone."""
    if count > MOST_POSITIONS:
        return steps
    turns = {step: step.arguments[4:6] for step in steps if step.function == current.turn}
    angles = {id(tensor): tensor for tensors in turns.values() for tensor in tensors}
    tables = {key: table for key, tensor in angles.items() if (table := _looked(tensor, steps, positions, count))}
    looking = {step for step, tensors in turns.items() if tables.keys() >= set(map(id, tensors))}
    return needed([step.reading(tables) if step in looking else step for step in steps], outputs)


def _looked(tensor: Tensor, steps: Sequence[Step], positions: Tensor, count: int) -> Looked | None:
    """Return a tensor's rows for all positions, if the steps that make it of some positions make them of all."""
    parts = needed([step for step in steps if isinstance(step.function, OpOverload)], [tensor])
    moving = {id(made) for step in steps for made in step.makes} | {id(positions)}
    inside = {id(made) for step in parts for made in step.makes}
    if not parts or {id(read) for step in parts for read in step.reads} & moving - inside != {id(positions)}:
        return None
    rows, dim = positions.shape[0], tensor.shape[-1]
    every = torch.arange(-(-count // rows) * rows, device=positions.device, dtype=positions.dtype).view(rows, -1)
    try:
        (made,) = write_program(parts, [positions], [tensor])(every)
        table = made.reshape(every.numel(), dim)[:count].contiguous()
        same = torch.equal(table[positions].view(tensor.shape), tensor)
    except RuntimeError:  # an operation has the number of nodes in it
        return None
    return Looked(table, positions) if same else None
