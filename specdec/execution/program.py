"""Work on tensors as a flat program: its operations are noted while it runs, and written down as a Python function.

The Python between operations costs as much as the operations themselves where these are small. A list of instructions
and a loop over it were measured to take 10 to 13 % longer per forward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.counting import ShowsValues, depends_on_values, is_view
from specdec.host import scoped
from specdec.opaque import noting

Program = Callable[..., tuple[Tensor, ...]]
_DROPOUT = ("dropout_p", "train")  # arguments of what draws random numbers unless they are 0


@dataclass(frozen=True, eq=False)
class Step:
    """One operation of torch, or any function of tensors, with its arguments and its outputs: one, several, or None.

    Tensors in it, which may stand in lists, are known by their identity.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    outputs: Any

    @classmethod
    def ran(cls, function: Callable[..., Any], *arguments: Any, **named: Any) -> "Step":
        """Return a step that was run on its arguments."""
        return cls(function, arguments, named, function(*arguments, **named))

    def reading(self, others: Mapping[int, Any]) -> "Step":
        """Return the step with others in the place of some tensors, by their ``id``."""
        return replace(self, arguments=_with_others(self.arguments, others), named=_with_others(self.named, others))

    @cached_property
    def reads(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return _tensors_in((self.arguments, self.named), [])

    @cached_property
    def makes(self) -> list[Tensor]:
        """The tensors that it returns."""
        return _tensors_in(self.outputs, [])

    @cached_property
    def writes(self) -> list[Tensor]:
        """The tensors that an operation of torch writes to; other functions write to caches alone."""
        if not isinstance(self.function, OpOverload) or not self.function._schema.is_mutable:
            return []
        given = _by_name(self.function, self.arguments, self.named)
        written = [argument.name for argument in self.function._schema.arguments if argument.is_write]
        return _tensors_in([given.get(name) for name in written], [])

    @property
    def may_view(self) -> bool:
        """Whether it is a function that looks at its first argument's memory, if it can."""
        viewing = self.function is torch.ops.aten._unsafe_view.default
        return viewing or (isinstance(self.function, OpOverload) and is_view(self.function))

    @property
    def views(self) -> bool:
        """Whether it has only looked at its first argument's memory: a reshape, for one, may have copied it."""
        return self.may_view and all(memory_of(tensor) == memory_of(self.reads[0]) for tensor in self.makes)


def _tensors_in(value: object, found: list[Tensor]) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and mappings. Torch's own function takes a third of a capture."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            _tensors_in(part, found)
    return found


def _with_others(value: Any, others: Mapping[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)(_with_others(part, others) for part in value)
    return {name: _with_others(part, others) for name, part in value.items()} if isinstance(value, dict) else value


def _by_name(function: OpOverload, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an operation is given, without what is left out."""
    return dict(zip((part.name for part in function._schema.arguments), arguments, strict=False)) | dict(named)


class Noted(TorchDispatchMode):
    """Notes every operation of a piece of work, with ``shapes`` on tensors without numbers.

    ``refusal`` says why it cannot be repeated. Tensors are kept, so that each is known by its identity.
    """

    def __init__(self, *, shapes: bool = False) -> None:
        super().__init__()
        self.shapes = shapes
        self.steps: list[Step] = []
        self.refusal: str | None = None
        self._inside = False

    def refuse(self, reason: str) -> None:
        """Note that the work cannot be repeated. It goes on: half of it may have changed something already."""
        self.refusal = self.refusal or reason

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or func.namespace == "prim":  # an attribute of a tensor
            return func(*args, **kwargs)
        if depends_on_values(func, args):
            self.refuse(f"{func} depends on values")
        outputs = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = _by_name(func, args, kwargs)
            off = [given.get(part.name, 0) == 0 for part in func._schema.arguments if part.name in _DROPOUT]
            if not any(off):
                self.refuse(f"{func} draws random numbers")
            if outputs is args[0]:
                return outputs
        self.steps.append(Step(func, args, kwargs, outputs))
        return outputs

    def call(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], like: Callable[[], Any] | None = None
    ) -> Any:
        """See ``opaque``."""
        with self.apart():
            outputs = like() if self.shapes and like is not None else function(*arguments)
        self.add(function, arguments, outputs)
        return outputs

    def add(self, function: Callable[..., Any], arguments: tuple[Any, ...], outputs: Any) -> None:
        if not self._inside:
            self.steps.append(Step(function, arguments, {}, outputs))

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._inside, before = True, self._inside
        try:
            yield
        finally:
            self._inside = before


@contextmanager
def noted(*, shapes: bool = False) -> Iterator[Noted]:
    """Note the operations of the ``with`` block, which computes only ``shapes`` or also numbers."""
    work = Noted(shapes=shapes)
    with ShowsValues(lambda name: work.refuse(f"{name} depends on values")), work, scoped(noting, work):
        yield work


def needed(steps: Sequence[Step], outputs: Sequence[Tensor]) -> list[Step]:
    """Return the steps without operations that only make what nobody reads."""
    read = {id(tensor) for tensor in outputs}
    kept: list[Step] = []
    for step in reversed(steps):
        pure = isinstance(step.function, OpOverload) and not step.writes
        if not pure or any(id(tensor) in read for tensor in step.makes):
            kept.append(step)
            read.update(id(tensor) for tensor in step.reads)
    return kept[::-1]


def memory_of(tensor: Tensor) -> int:
    """Return a number that tells a tensor's memory from others'; a library's layout has no memory of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def write_program(steps: Sequence[Step], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Program:
    """Return a Python function with one line per step; everything that is not made by a step is bound beforehand.

    Its arguments stand for the tensors in ``inputs``, and it returns those in ``outputs``.
    """
    names = {id(tensor): f"v{number}" for number, tensor in enumerate(inputs)}
    parameters = ", ".join(f"v{number}" for number in range(len(inputs)))
    constants: dict[int, tuple[str, Any]] = {}
    lines: list[str] = []
    last: dict[str, int] = {}  # the line that reads a name last

    def bind(value: object) -> str:
        return constants.setdefault(id(value), (f"c{len(constants)}", value))[0]

    def text(value: object) -> str:
        if isinstance(value, Tensor) and id(value) in names:
            last[names[id(value)]] = len(lines)
            return names[id(value)]
        if isinstance(value, (list, tuple)):
            inner = "".join(f"{text(part)}, " for part in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return bind(value)

    def assigned(results: object) -> str:
        if isinstance(results, Tensor):
            name = names[id(results)] = f"v{len(names)}_{len(lines)}"
            last[name] = len(lines)  # if nobody reads it
            return name
        assert isinstance(results, (list, tuple)), results
        return "".join(f"{assigned(result)}, " for result in results)

    for step in steps:
        # The built-in behind an overload: a Python call less for each.
        function = step.function._op if isinstance(step.function, OpOverload) else step.function
        arguments = [text(argument) for argument in step.arguments]
        arguments += [f"{name}={text(argument)}" for name, argument in step.named.items()]
        called = f"{bind(function)}({', '.join(arguments)})"
        lines.append(f"{assigned(step.outputs)} = {called}" if step.makes else called)
    lines.append(f"return {text(tuple(outputs))}")
    free: dict[int, list[str]] = {}
    for name, line in last.items():
        free.setdefault(line, []).append(name)
    body = [f"{line}; del {', '.join(free[i])}" if i in free else line for i, line in enumerate(lines[:-1])]
    replay = "\n        ".join([*body, lines[-1]])
    # Constants are cells of an enclosing function: quicker to read than globals.
    bound = dict(constants.values())
    source = f"def make({', '.join(bound)}):\n    def replay({parameters}):\n        {replay}\n    return replay\n"
    scope: dict[str, Any] = {}
    exec(compile(source, "<captured forward>", "exec"), scope)
    return scope["make"](**bound)
