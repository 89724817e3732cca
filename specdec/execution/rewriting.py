"""Rewrites a forward that was noted by its shapes: groups of operations become one kernel each, whoever computes it.

Nothing needs to be known about models: a pattern is found by what its operations are and read, and where it is not
found, they stay as they are. There are no numbers to compare here, so whoever uses the steps compares their results.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.execution.fusion import Graph, Rotation, normalized_by, rotation_of, without_repetition
from specdec.execution.program import Step, needed

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_aten = torch.ops.aten
_CASTS = (_aten.to.dtype, _aten._to_copy.default, _aten.type_as.default)


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
