"""Finds patterns in a forward's operations, and rewrites it in fewer: norms, gates, rotary embeddings, joint products.

Nothing needs to be known about models: a pattern is found by what its operations are and read, and where it is not
found, they stay as they are. ``fuse`` keeps the very numbers, on a CPU; ``rewrite`` works on shapes alone, for kernels
whose results its caller compares.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from specdec.counting import is_view
from specdec.execution.products import PanelWeight
from specdec.execution.program import Step, memory_of, needed

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Joint = Callable[[Sequence[PanelWeight]], PanelWeight | None]
Rewriting = Callable[[list[Step]], list[Step]]

_aten = torch.ops.aten
_SAME = (_aten.alias.default, _aten.detach.default)
_CASTS = (_aten.to.dtype, _aten._to_copy.default, _aten.type_as.default)


def fuse(
    steps: list[Step],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    joint: Joint,
    listed: Rewriting | None = None,
) -> list[Step]:
    """Return steps that compute the same outputs: they make these very tensors.

    Args:
        steps: As they were recorded. Tensors are alive, so that their memory tells which of them are views of others.
        inputs, outputs: Those of the forward.
        joint: Makes one weight from several that are multiplied with the same inputs, or returns None.
        listed: Puts steps into lists that C runs (``native_program``), where it is compiled.
    """
    if any(step.writes for step in steps):  # other rewritings could move a read behind a write
        return join_products(steps, joint)
    steps = without_repetition(steps, outputs, inputs)
    steps = join_products(steps, joint)
    return steps if listed is None else listed(steps)


def without_repetition(
    steps: list[Step], outputs: Sequence[Tensor], inputs: Sequence[Tensor] | None = None
) -> list[Step]:
    """Return steps without those that return what is there already.

    These are casts to the same dtype, what was computed before of tensors that no step writes to, and, where the inputs
    are given, views of memory that stays where it is.
    """
    kept: list[Step] = []
    known: dict[Any, Step] = {}
    same: dict[int, Tensor] = {}
    returned = {id(tensor) for tensor in outputs}
    moving = {id(tensor) for tensor in inputs or []}
    written = {memory_of(tensor) for step in steps for tensor in step.writes}
    for step in steps:
        step = replace(step, arguments=with_others(step.arguments, same), named=with_others(step.named, same))
        looks = (inputs is not None or bool(written)) and _is_view(step)
        if looks and inputs is not None and moving.isdisjoint(id(tensor) for tensor in step.reads):
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
        steady = looks or not written or written.isdisjoint(map(memory_of, (*step.reads, *step.makes)))
        first = known.setdefault(_key((step.function, step.arguments, step.named)), step) if steady else step
        if first is not step and returned.isdisjoint(id(tensor) for tensor in step.makes):
            same.update((id(new), old) for new, old in zip(step.makes, first.makes, strict=True))
            continue
        kept.append(step)
    return kept


def _is_view(step: Step) -> bool:
    """Return whether a step has only looked at its first argument's memory: a reshape, for one, may have copied it."""
    if not isinstance(step.function, OpOverload) or not is_view(step.function):
        return False
    return all(memory_of(tensor) == memory_of(step.reads[0]) for tensor in step.makes)


def join_products(steps: list[Step], joint: Joint) -> list[Step]:
    """Return steps with one product for several of the same inputs, such as a layer's queries, keys and values."""
    groups: dict[int, list[Step]] = {}
    made = {id(tensor) for step in steps for tensor in step.makes}
    written = {id(tensor) for step in steps if step.writes for tensor in step.reads}
    for step in steps:
        if _stored(step) is not None and id(step.arguments[0]) not in written:
            groups.setdefault(id(step.arguments[0]), []).append(step)
    replaced: dict[Step, list[Step]] = {}
    for group in groups.values():
        biases = [step.arguments[1] for step in group if step.arguments[1] is not None]
        constant = made.isdisjoint(id(bias) for bias in biases)
        if len(group) < 2 or not constant or len(biases) not in (0, len(group)):
            continue
        weight = joint([stored for stored in map(_stored, group) if stored is not None])
        if weight is None:
            continue
        bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        product = _ran(weight.multiply, group[0].arguments[0], bias)
        parts = [step.outputs for step in group]
        split = _ran(_aten.split_with_sizes.default, product.outputs, [part.shape[-1] for part in parts], -1)
        changed = not written.isdisjoint(id(part) for part in parts)  # what was recorded is not what was multiplied
        if changed or _all_equal(split.outputs, parts):
            replaced |= {step: [] for step in group[1:]}
            replaced[group[0]] = [product, replace(split, outputs=parts)]
    return [new for step in steps for new in replaced.get(step, [step])]


class Normalized(NamedTuple):
    """The steps of ``x * rsqrt(mean(x ** 2) + eps)`` in float32, the product first, and what they read."""

    found: list[Step]
    x: Tensor
    eps: float


def normalized_by(graph: "Graph", step: Step) -> Normalized | None:
    """Return the norm that a step ends; None if it is something else."""
    scaled = graph.match(step, _aten.mul.Tensor)
    root = scaled and graph.match(scaled.arguments[1], _aten.rsqrt.default)
    shifted = root and graph.match(root.arguments[0], _aten.add.Tensor)
    mean = shifted and graph.match(shifted.arguments[0], _aten.mean.dim)
    square = mean and graph.match(mean.arguments[0], _aten.pow.Tensor_Scalar)
    if not (scaled and root and shifted and mean and square):
        return None
    x, eps = scaled.arguments[0], shifted.arguments[1]
    last_dim = mean.arguments[1:] == ([-1], True) and square.arguments[0] is x and square.arguments[1] == 2
    if x.dtype is not torch.float32 or not last_dim or not isinstance(eps, float) or shifted.named:
        return None
    return Normalized([scaled, root, shifted, mean, square], x, eps)


class Rotation(NamedTuple):
    """The steps of ``x * cosines + cat(-x[half:], x[:half]) * sines``, the sum first, and what they read."""

    found: list[Step]
    x: Tensor
    cosines: Tensor
    sines: Tensor


def rotation_of(graph: "Graph", part: Any) -> Rotation | None:
    """Return the rotary embedding that a step, or the step that makes a tensor, ends; None if it is something else."""
    total = graph.match(part, _aten.add.Tensor)
    kept = total and graph.match(total.arguments[0], _aten.mul.Tensor)
    moved = total and graph.match(total.arguments[1], _aten.mul.Tensor)
    joined = moved and graph.match(moved.arguments[0], _aten.cat.default)
    if not (total and kept and moved and joined) or total.named:
        return None
    x, cosines, sines = kept.arguments[0], kept.arguments[1], moved.arguments[1]
    parts = _halves(graph, joined, x)
    if parts is None or not all(isinstance(each, Tensor) for each in (cosines, sines)):
        return None
    found = [total, kept, moved, joined, *parts]
    alike = cosines.shape[-1] == sines.shape[-1] == x.shape[-1]
    return Rotation(found, x, cosines, sines) if alike and graph.only_within(found) else None


def _halves(graph: "Graph", joined: Step, x: Tensor) -> list[Step] | None:
    """Return the steps that cut ``x`` for ``cat(-x[half:], x[:half])``; None if this is something else."""
    parts, half = joined.arguments[0], x.shape[-1] // 2
    if len(parts) != 2 or joined.arguments[1:] not in ((-1,), (x.dim() - 1,)):
        return None
    negated = graph.match(parts[0], _aten.neg.default)
    upper = negated and graph.match(negated.arguments[0], _aten.slice.Tensor)
    lower = graph.match(parts[1], _aten.slice.Tensor)
    if not (negated and upper and lower) or upper.arguments[0] is not x or lower.arguments[0] is not x:
        return None
    whole = x.shape[-1] == 2 * half and _cut_of(upper) == (half, 2 * half) and _cut_of(lower) == (0, half)
    return [negated, upper, lower] if whole else None


def _cut_of(step: Step) -> tuple[int, int] | None:
    """Return where a slice of the last axis begins and ends; None for a slice of another axis, or with gaps."""
    given = step.arguments[1:]
    axis, start, stop, by = *given, *(0, None, None, 1)[len(given) :]
    dim, size = step.arguments[0].dim(), step.arguments[0].shape[-1]
    return (start or 0, size if stop is None else min(stop, size)) if by == 1 and axis in (dim - 1, -1) else None


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
        step = part if isinstance(part, Step) else self.maker(part)
        return step if step is not None and step.function == function else None

    def only_reader(self, tensor: Tensor) -> Step | None:
        """Return the only step that reads a tensor; None if there are more, or none."""
        readers = self.readers(tensor)
        return next(iter(readers)) if len(readers) == 1 else None

    def only_within(self, found: Sequence[Step]) -> bool:
        """Return whether nothing else needs what these steps make, except for the first one's output."""
        inner = [tensor for step in found[1:] for tensor in step.makes]
        return all(id(t) not in self._returned and self.readers(t) <= set(found) for t in inner)

    def maker(self, tensor: Any) -> Step | None:
        """Return the step that makes a tensor; None if it was there before."""
        return self._maker.get(id(tensor))

    def readers(self, tensor: Tensor) -> set[Step]:
        """Return the steps that read a tensor, among them those that were replaced."""
        return self._readers.get(id(tensor), set())

    def replace(self, found: Sequence[Step], new: list[Step], *, at: Step | None = None) -> None:
        """Put new steps in the place of one of those found; by default of the first, which is the last to run."""
        place = self.steps.index(at or found[0])
        self.steps[place : place + 1] = new
        gone = set(found)
        self.steps = [step for step in self.steps if step not in gone]
        self._maker.update((id(tensor), step) for step in new for tensor in step.makes)


def _ran(function: Callable[..., Any], *arguments: Any) -> Step:
    """Return a step, run on its arguments."""
    return Step(function, arguments, {}, function(*arguments))


def _all_equal(new: Sequence[Tensor], old: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(new, old, strict=True))


def _stored(step: Step) -> PanelWeight | None:
    """Return the stored weight whose product a step is; None if it is something else."""
    owner = getattr(step.function, "__self__", None)
    return owner if isinstance(owner, PanelWeight) else None


def with_others(value: Any, same: dict[int, Tensor]) -> Any:
    """Return arguments with other tensors in the place of some."""
    if isinstance(value, Tensor):
        return same.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)(with_others(part, same) for part in value)
    return {name: with_others(part, same) for name, part in value.items()} if isinstance(value, dict) else value


def _key(value: Any) -> Any:
    """Return something hashable that is equal for the same call: tensors by identity, numbers by value and type."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_key(part) for part in value)
    if isinstance(value, dict):
        return tuple((name, _key(part)) for name, part in value.items())
    plain = isinstance(value, (bool, int, float, str)) or value is None
    return (type(value), value) if plain else (object, id(value))


class Kernels(NamedTuple):
    """The functions that compute patterns on one kind of device; ``kernels`` has each in plain torch.

    Attributes:
        norm: ``norm(x, weight, eps, rounds, offset)``.
        add_norm: ``add_norm(x, residual, weight, eps, rounds, offset)``, which returns the norm and the sum.
        gated: ``gated(gate, up, activation)``.
        rotate: ``rotate(query, key, value, cosines, sines, query_norm, key_norm, destination)``.
    """

    norm: Callable[..., Tensor]
    add_norm: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., Tensor]
    rotate: Callable[..., tuple[Tensor, Tensor]]


class Layers(NamedTuple):
    """The functions by which a noted forward reaches its cache, and the one that turns and writes at once.

    Attributes:
        attend: A layer's attention, of the fields of an ``AttentionCall``.
        write: Stores a layer's keys and values.
        turn: ``turn(layer, query, key, value, cosines, sines, query_norm, key_norm)`` returns queries and keys as
            ``Kernels.rotate`` does, and stores keys and values.
    """

    attend: Callable[..., Tensor]
    write: Callable[..., None]
    turn: Callable[..., tuple[Tensor, Tensor]]


def rewrite(steps: list[Step], outputs: Sequence[Tensor], kernels: Kernels, layers: Layers) -> list[Step]:
    """Return fewer steps that make the same outputs, up to rounding."""
    if any(step.writes for step in steps):
        return steps  # a rewriting could move a read behind a write
    steps = without_repetition(steps, outputs)
    steps = _norms(steps, outputs, kernels)
    steps = join_gates(steps, outputs, _activation, kernels.gated)
    steps = join_turns(steps, outputs, layers, kernels.norm)
    return needed(steps, outputs)


def _norms(steps: list[Step], outputs: Sequence[Tensor], kernels: Kernels) -> list[Step]:
    """Replace root mean square norms, each with the residual that is added before it."""
    graph = Graph(steps, outputs)
    for step in steps:
        normalized = normalized_by(graph, step)
        if normalized is None:
            continue
        found, x, eps = normalized
        cast = graph.maker(x)
        if cast is not None and cast.function in _CASTS:
            found, x = [*found, cast], cast.arguments[0]
        ending = _ending(graph, step.outputs, x)
        if ending is None or x.dtype not in DTYPES or x.dim() > 4:
            continue
        found = [*ending.found, *found]
        options = ending.weight, eps, ending.rounds, ending.offset
        if not graph.only_within(found) or graph.maker(ending.weight) is not None:
            continue
        added = graph.match(x, _aten.add.Tensor)
        if added is None or not _is_alike(added):
            graph.replace(found, [Step(kernels.norm, (x, *options), {}, found[0].outputs)])
        else:  # where the sum is made, because others read it too
            new = Step(kernels.add_norm, (*added.arguments, *options), {}, [found[0].outputs, x])
            graph.replace([*found, added], [new], at=added)
    return graph.steps


class _Ending(NamedTuple):
    """The steps behind a norm in float32, the last one first: casts and the product with a weight."""

    found: list[Step]
    weight: Tensor | None = None
    rounds: bool = False
    offset: float = 0.0


def _ending(graph: Graph, normalized: Tensor, x: Tensor) -> _Ending | None:
    """Return how a norm of ``x`` ends; None if its result is not in the dtype of ``x``."""
    after = graph.only_reader(normalized)
    if after is not None and after.function in _CASTS and after.outputs.dtype is x.dtype:
        weighted = graph.only_reader(after.outputs)
        weight = None if weighted is None else _factor(graph, weighted, after.outputs)
        if weighted is None or weight is None or weight.dtype is not x.dtype:
            return _Ending([after])
        return _Ending([weighted, after], weight, rounds=True)
    weight = None if after is None else _factor(graph, after, normalized)
    if after is None or weight is None:
        return _Ending([]) if x.dtype is torch.float32 else None
    weight, offset = _constant(graph, weight)
    if x.dtype is torch.float32:
        return _Ending([after], weight, offset=offset)
    cast = graph.only_reader(after.outputs)
    if cast is None or cast.function not in _CASTS or cast.outputs.dtype is not x.dtype:
        return None
    return _Ending([cast, after], weight, offset=offset)


def _factor(graph: Graph, step: Step, tensor: Tensor) -> Tensor | None:
    """Return the vector by which a step multiplies a tensor's last axis; None if it does something else."""
    if graph.match(step, _aten.mul.Tensor) is None:
        return None
    other = next((each for each in step.arguments if each is not tensor), None)
    return other if isinstance(other, Tensor) and other.shape == tensor.shape[-1:] else None


def _constant(graph: Graph, weight: Tensor) -> tuple[Tensor, float]:
    """Return ``w`` and ``offset`` for ``offset + w`` in float32."""
    offset, added = 0.0, graph.match(weight, _aten.add.Tensor)
    if added is not None and isinstance(added.arguments[1], (int, float)) and weight.dtype is torch.float32:
        weight, offset = added.arguments[0], float(added.arguments[1])
    cast = graph.maker(weight)
    if cast is not None and cast.function in _CASTS and weight.dtype is torch.float32:
        weight = cast.arguments[0]
    return weight, offset


def _is_alike(added: Step) -> bool:
    """Return whether a sum is one of two tensors of one shape and dtype."""
    if added.named or not all(isinstance(each, Tensor) for each in added.arguments):
        return False
    return len({(each.shape, each.dtype) for each in (*added.arguments, added.outputs)}) == 1


def join_gates(
    steps: list[Step], outputs: Sequence[Tensor], activation_of: Callable[[Step], Any], gated: Callable[..., Tensor]
) -> list[Step]:
    """Replace activations that are multiplied by a tensor of the same shape by ``gated(gate, up, activation)``.

    ``activation_of`` returns the activation that a step is; None for other steps.
    """
    graph = Graph(steps, outputs)
    for step in steps:
        activation = activation_of(step)
        after = None if activation is None else graph.only_reader(step.outputs)
        if after is None or graph.match(after, _aten.mul.Tensor) is None:
            continue
        up = next((each for each in after.arguments if each is not step.outputs), None)
        gate, found = step.arguments[0], [after, step]
        if isinstance(up, Tensor) and (up.shape, up.dtype) == (gate.shape, gate.dtype) and graph.only_within(found):
            graph.replace(found, [Step(gated, (gate, up, activation), {}, after.outputs)])
    return graph.steps


def _activation(step: Step) -> str | None:
    if isinstance(step.outputs, Tensor) and step.outputs.dtype not in DTYPES:
        return None
    if step.function is _aten.silu.default:
        return "silu"
    if step.function is _aten.gelu.default:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(step.named.get("approximate", "none"))
    return None


def join_turns(
    steps: list[Step], outputs: Sequence[Tensor], layers: Layers, norm: Callable[..., Tensor] | None = None
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
        heads = _heads(graph, of_query, of_key, norm)
        tables = of_query.cosines, of_query.sines
        arguments = layer, *(each.x for each in heads), value, *tables, *(each.norm for each in heads)
        views = [step for each in heads for step in each.views]
        found = [write, *of_query.found, *of_key.found, *(step for each in heads for step in each.found)]
        graph.replace(found, [*views, Step(layers.turn, arguments, {}, [query, key])])
    return graph.steps


def _is_pair(query: Rotation, key: Rotation, value: Any) -> bool:
    """Return whether one kernel turns both: ``[batch, head, node, head_dim]`` by one table for all heads."""
    if query.cosines is not key.cosines or query.sines is not key.sines:
        return False
    tensors = (query.x, key.x, value, query.cosines, query.sines)
    if any(each.dim() != 4 for each in tensors) or query.cosines.shape[1] != 1 or query.sines.shape[1] != 1:
        return False
    dtypes = {each.dtype for each in tensors}
    same_nodes = len({each.shape[2] for each in tensors}) == 1
    return len(dtypes) == 1 and dtypes <= set(DTYPES) and same_nodes and key.x.shape[1] == value.shape[1]


class _Heads(NamedTuple):
    """What is turned, or normalized and turned.

    Attributes:
        x: The heads, ``[batch, head, node, head_dim]``.
        norm: Weight, eps, rounds and offset of their norm; None for none.
        found: The steps of the norm.
        views: Steps that make ``x`` in their place.
    """

    x: Tensor
    norm: tuple[Any, ...] | None = None
    found: Sequence[Step] = ()
    views: Sequence[Step] = ()


def _heads(graph: Graph, query: Rotation, key: Rotation, norm: Callable[..., Tensor] | None) -> tuple[_Heads, _Heads]:
    """Return what two rotations turn, with their norms if these differ in nothing but their weights."""
    queries, keys = _normalized(graph, query, norm), _normalized(graph, key, norm)
    if queries.norm is None or keys.norm is None or queries.norm[1:] != keys.norm[1:]:
        return _Heads(query.x), _Heads(key.x)
    return queries, keys


def _normalized(graph: Graph, rotation: Rotation, function: Callable[..., Tensor] | None) -> _Heads:
    """Return the norm whose result is turned and nothing else; heads and nodes may change places in between."""
    moved = graph.match(rotation.x, _aten.transpose.int)
    norm = function and graph.match(rotation.x if moved is None else moved.arguments[0], function)
    found = [step for step in (moved, norm) if step is not None]
    if norm is None or not graph.only_within([rotation.found[0], *found, *rotation.found[1:]]):
        return _Heads(rotation.x)
    x, *options = norm.arguments
    if moved is None:
        return _Heads(x, tuple(options), found)
    if moved.arguments[1:] != (1, 2):
        return _Heads(rotation.x)
    view = Step(moved.function, (x, 1, 2), {}, x.transpose(1, 2))
    return _Heads(view.outputs, tuple(options), found, [view])
