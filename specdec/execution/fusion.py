"""Rewrites a captured forward in fewer operations that give the very same numbers.

Transformers' models spell out norms and rotary embeddings. For the few rows of decoding on a CPU, an operation costs
one to three microseconds however little it computes. Every rewriting here is one function; what it puts in the place of
recorded operations is run on the recorded tensors at once, and must return their bits. So nothing needs to be
known about models: where a pattern is not found, or a kernel rounds in another way, the operations stay as they are.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from specdec.execution.program import Step
from specdec.execution.stored_weight import StoredWeight

Joint = Callable[[Sequence[StoredWeight]], StoredWeight | None]

_aten = torch.ops.aten


def fuse(steps: list[Step], inputs: Sequence[Tensor], outputs: Sequence[Tensor], joint: Joint) -> list[Step]:
    """Return steps that compute the same outputs: they make these very tensors.

    Args:
        steps: As they were recorded. Tensors are alive, so that their memory tells which of them are views of others.
        inputs, outputs: Those of the forward.
        joint: Makes one weight from several that are multiplied with the same inputs, or returns None.
    """
    if any(_is_mutable(step) for step in steps):  # other rewritings could move a read behind a write
        return join_products(steps, joint)
    steps = without_repetition(steps, outputs)
    steps = join_products(steps, joint)
    steps = fuse_norms(steps, outputs)
    steps = fuse_rotations(steps, outputs)
    steps = without_repetition(steps, outputs)
    return reuse_memory(steps, [*inputs, *outputs])


def without_repetition(steps: list[Step], outputs: Sequence[Tensor]) -> list[Step]:
    """Return steps without those that return what is there already: casts to the same dtype, a view for each layer."""
    kept: list[Step] = []
    known: dict[Any, Step] = {}
    same: dict[int, Tensor] = {}
    returned = {id(tensor) for tensor in outputs}
    for step in steps:
        step = replace(step, arguments=_with(step.arguments, same), named=_with(step.named, same))
        if not isinstance(step.function, OpOverload):
            kept.append(step)
            continue
        if any(step.outputs is read for read in step.reads):
            continue
        if step.function is _aten.alias.default and id(step.outputs) not in returned:
            same[id(step.outputs)] = step.arguments[0]
            continue
        first = known.setdefault(_key((step.function, step.arguments, step.named)), step)
        if first is not step and returned.isdisjoint(id(tensor) for tensor in step.makes):
            same.update((id(new), old) for new, old in zip(step.makes, first.makes, strict=True))
            continue
        kept.append(step)
    return kept


def join_products(steps: list[Step], joint: Joint) -> list[Step]:
    """Return steps with one product for several of the same inputs, such as a layer's queries, keys and values."""
    groups: dict[int, list[Step]] = {}
    made = {id(tensor) for step in steps for tensor in step.makes}
    written = {id(tensor) for step in steps if _is_mutable(step) for tensor in step.reads}
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


def fuse_norms(steps: list[Step], outputs: Sequence[Tensor]) -> list[Step]:
    """Return steps with one operation for a root mean square norm, where it is in float32.

    That is ``x * rsqrt(mean(x ** 2) + eps)``, and a product with a weight if one follows.
    """
    graph = Graph(steps, outputs)
    for step in steps:
        normalized = normalized_by(graph, step)
        if normalized is None:
            continue
        (found, x, eps), weight = normalized, None
        after = graph.only_reader(step.outputs)
        if after is not None and graph.match(after, _aten.mul.Tensor):
            other = next((each for each in after.arguments if each is not step.outputs), None)
            if isinstance(other, Tensor) and other.shape == x.shape[-1:] and other.dtype is x.dtype:
                found, weight = [after, *found], other
        norm = _ran(_aten._fused_rms_norm.default, x, [x.shape[-1]], weight, eps)
        if graph.only_within(found) and torch.equal(norm.outputs[0], found[0].outputs):
            graph.replace(found, [replace(norm, outputs=[found[0].outputs, norm.outputs[1]])])
    return graph.steps


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


def fuse_rotations(steps: list[Step], outputs: Sequence[Tensor]) -> list[Step]:
    """Return steps with four operations for a rotary embedding, ``x * cos + cat(-x[half:], x[:half]) * sin``.

    The halves are exchanged by one flip, and the sign goes to the sines, once for all layers. Four tokens of one head
    with the halves (a, b) become ``(a, b) * (cos, cos) + (b, a) * (-sin, sin)``.
    """
    graph = Graph(steps, outputs)
    signed: dict[int, Tensor] = {}
    for step in steps:
        rotation = rotation_of(graph, step)
        if rotation is None:
            continue
        found, x, cosines, sines = rotation
        new: list[Step] = []

        def run(function: OpOverload, *arguments: Any, into: list[Step] = new) -> Tensor:
            into.append(_ran(function, *arguments))
            return into[-1].outputs

        def in_halves(tensor: Tensor, run: Callable[..., Tensor] = run) -> Tensor:
            return run(_aten.view.default, tensor, [*tensor.shape[:-1], 2, tensor.shape[-1] // 2])

        if id(sines) not in signed:
            signed_sines = run(_aten.mul.Tensor, in_halves(sines), sines.new_tensor([[-1.0], [1.0]]))
        else:
            signed_sines = signed[id(sines)]
        halves = in_halves(x)
        exchanged = run(_aten.flip.default, halves, [-2])
        exchanged = run(_aten.mul.Tensor, exchanged, signed_sines)
        turned = run(_aten.mul.Tensor, halves, in_halves(cosines))
        turned = run(_aten.add.Tensor, turned, exchanged)
        run(_aten.view.default, turned, list(x.shape))
        if torch.equal(new[-1].outputs, step.outputs):
            graph.replace(found, [*new[:-1], replace(new[-1], outputs=step.outputs)])
            signed[id(sines)] = signed_sines
    return graph.steps


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


IN_PLACE: dict[Any, OpOverload] = {
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.rsqrt.default: _aten.rsqrt_.default,
    _aten.neg.default: _aten.neg_.default,
    _aten.silu.default: _aten.silu_.default,
    _aten.gelu.default: _aten.gelu_.default,
}
"""Operations, and those that write the same numbers over their first argument."""

_COMMUTE = (_aten.add.Tensor, _aten.mul.Tensor)


def reuse_memory(steps: list[Step], kept: Sequence[Tensor]) -> list[Step]:
    """Return steps that write over a tensor which nobody reads afterwards, but for those that are ``kept``."""
    last = {id(tensor): number for number, step in enumerate(steps) for tensor in step.reads}
    # Who computes attention decides where its output lies, from forward to forward.
    sure = [step for step in steps if isinstance(step.function, OpOverload) or _stored(step) is not None]
    made = {id(tensor) for step in sure for tensor in step.makes} - {id(tensor) for tensor in kept}
    tensors = {id(t): t for step in steps for t in (*step.reads, *step.makes)} | {id(t): t for t in kept}
    owners = Counter(_memory(tensor) for tensor in tensors.values())  # more than one where there are views

    def free(tensor: Any, number: int, like: Tensor) -> bool:
        if not isinstance(tensor, Tensor) or id(tensor) not in made or last[id(tensor)] != number:
            return False
        alike = (tensor.shape, tensor.dtype, tensor.stride()) == (like.shape, like.dtype, like.stride())
        return alike and owners[_memory(tensor)] == 1

    written = []
    for number, step in enumerate(steps):
        first, *others = step.arguments or (None,)
        function = IN_PLACE.get(step.function)
        if function is not None and free(first, number, step.outputs):
            step = replace(step, function=function)
        elif function is not None and step.function in _COMMUTE and not step.named:
            (second,) = others
            if free(second, number, step.outputs):
                step = replace(step, function=function, arguments=(second, first))
        written.append(step)
    return written


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


def _stored(step: Step) -> StoredWeight | None:
    """Return the stored weight whose product a step is; None if it is something else."""
    owner = getattr(step.function, "__self__", None)
    return owner if isinstance(owner, StoredWeight) else None


def _is_mutable(step: Step) -> bool:
    return isinstance(step.function, OpOverload) and step.function._schema.is_mutable


def _memory(tensor: Tensor) -> int:
    """Return a number that tells a tensor's memory from others'; a library's layout has no memory of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _with(value: Any, same: dict[int, Tensor]) -> Any:
    """Return arguments with other tensors in the place of some."""
    if isinstance(value, Tensor):
        return same.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)(_with(part, same) for part in value)
    return {name: _with(part, same) for name, part in value.items()} if isinstance(value, dict) else value


def _key(value: Any) -> Any:
    """Return something hashable that is equal for the same call: tensors by identity, numbers by value and type."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_key(part) for part in value)
    if isinstance(value, dict):
        return tuple((name, _key(part)) for name, part in value.items())
    plain = isinstance(value, (bool, int, float, str)) or value is None
    return (type(value), value) if plain else (object, id(value))
