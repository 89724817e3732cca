"""A model's forward, captured once for a shape and turned into a flat sequence of tensor operations.

The Python between a model's operations (modules, wrappers, configurations) costs as much as the operations themselves
where these are small: a drafter's, or a small target's for a few tokens on a CPU. A captured forward leaves it out. It
is to the CPU what a captured graph is to a GPU, with one difference: attention stays one opaque step, which reads the
cache and the masks of the forward that runs. So it depends on the numbers of rows and nodes, and not on any length.

A model that cannot be captured (its operations depend on values, its attention is its own) raises here, and the
executor goes on without.

The program is a Python function whose source is written here and compiled: a line per operation, local variables for
tensors. A list of instructions and a loop over it were measured to take 10 to 13 % longer per forward (310 operations,
1.33 against 1.18 ms; 122 operations, 0.50 against 0.46 ms; one thread of an AMD EPYC, bfloat16, torch 2.13).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from specdec.cache.base import OwnLayout
from specdec.execution.counting import depends_on_values
from specdec.execution.packing import PackedWeight

NAME = "specdec_captured"
"""The name of the model's attention function while the model is captured."""

Attend = Callable[..., Tensor]
Joint = Callable[[Sequence[Tensor]], PackedWeight | None]
Program = Callable[..., tuple[Tensor, ...]]


class UncapturableError(RuntimeError):
    """A model does something that a captured forward could not repeat."""


def capture(
    call: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    *,
    cache: "CapturingCache",
    attend: Attend,
    joint: Joint = lambda packed: None,
) -> Program:
    """Capture a forward.

    Args:
        call: Runs the model on the inputs and returns tensors. It uses ``NAME`` as the attention function, ``cache``,
            and the masks that ``cache`` knows.
        inputs: Inputs of the shapes to be captured; their values do not matter.
        cache: Sees what goes from a layer's projections to its attention.
        attend: Computes a layer's attention when the program runs: ``attend(query, key, value, sinks, layer, mask,
            scaling, softcap)``, with the *new* keys and values, the layer's index, and the number of the mask. It
            returns ``[batch, query, head, value_dim]``.
        joint: Makes one packed weight from several that are multiplied with the same inputs, or returns None.

    Returns:
        A function of the inputs, which returns what ``call`` does.

    Raises:
        Exception: The model cannot be captured; any error that tracing has raised.
    """
    with torch.inference_mode(), _capturing(cache), _NoValues(), _Capturer() as capturer:
        outputs = call(*inputs)
    if cache.waiting is not None:
        raise UncapturableError("a layer's keys do not go to the attention function")
    return _program(capturer.steps, inputs, outputs, attend, joint)


@contextmanager
def recorded_steps() -> Iterator[list["_Step"]]:
    """Note the operations of the ``with`` block, which must not depend on values."""
    token = _recording.set(True)
    try:
        with _NoValues(), _Capturer() as capturer:
            yield capturer.steps
    finally:
        _recording.reset(token)


def recording_now() -> bool:
    """Returns whether operations are being noted in this thread: nothing that is not part of them may run."""
    return _recording.get()


_recording: ContextVar[bool] = ContextVar("recording", default=False)


def written(steps: list["_Step"], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Program:
    """Returns operations that were noted as a function of the inputs, which returns the outputs."""
    return _program(steps, inputs, outputs, attend=_no_attention, joint=lambda packed: None)


def _no_attention(*call: object) -> Tensor:
    raise AssertionError("only a captured model has attention left open")


@dataclass(frozen=True)
class _Step:
    """One tensor operation that ran."""

    function: OpOverload
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    outputs: Any


class _Capturer(TorchDispatchMode):
    """Notes every operation, and keeps its tensors so that each is known by its identity."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if depends_on_values(func, args):
            raise UncapturableError(f"{func} depends on values")
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, kwargs):
            if outputs is not args[0]:
                raise UncapturableError(f"{func} draws random numbers")
            return outputs  # dropout, which is off
        self.steps.append(_Step(func, args, kwargs, outputs))
        return outputs


def _without_dropout(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Returns whether this is an attention call that could draw random numbers and does not."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given == 0
    return False


class _NoValues(TorchFunctionMode):
    """Refuses calls that show a tensor's values without being operations, unlike ``item`` and branches."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SHOWS_VALUES:
            raise UncapturableError(f"{func.__name__} depends on values")
        return func(*args, **(kwargs or {}))


_SHOWS_VALUES = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


class CapturingCache(OwnLayout):
    """Passes keys and values on to the attention function, and notes which layer they belong to.

    Args:
        num_layers: The number of layers of the model.
        masks: The masks that the layers are given; attention must get one of these very tensors.

    Attributes:
        waiting: Keys and values on their way from a layer's projections to its attention.
    """

    def __init__(self, num_layers: int, masks: list[Tensor]):
        super().__init__(num_layers)
        self.masks = masks
        self.waiting: tuple[Tensor, Tensor, int] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object):
        if self.waiting is not None:
            raise UncapturableError("a layer's keys do not go to the attention function")
        self.waiting = key_states, value_states, layer_idx
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        raise UncapturableError("a layer selects keys by an indexer")

    def take(self, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[int, int]:
        """Returns the layer whose keys and values these are, and the number of the mask."""
        if self.waiting is None or self.waiting[0] is not key or self.waiting[1] is not value:
            raise UncapturableError("keys or values are changed between the cache and the attention function")
        number = next((i for i, known in enumerate(self.masks) if known is mask), None)
        if number is None:
            raise UncapturableError("the mask is changed on its way to the attention function")
        layer, self.waiting = self.waiting[2], None
        return layer, number

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


# Of this thread: another one may capture another model at the same time.
_current: ContextVar[CapturingCache] = ContextVar("capturing")


@contextmanager
def _capturing(cache: CapturingCache) -> Iterator[None]:
    token = _current.set(cache)
    try:
        yield
    finally:
        _current.reset(token)


def _captured_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Stands for the attention function while a model is captured: one opaque step."""
    layer, mask = _current.get().take(key, value, attention_mask)
    return torch.ops.specdec.attend(query, key, value, s_aux, layer, mask, scaling, softcap), None


def _shape_of_attention(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_zeros(batch, queries, heads, value.shape[3])


_library = torch.library.Library("specdec", "DEF")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, int mask, float? scaling, float? softcap)"
    " -> Tensor"
)
_library.impl("attend", _shape_of_attention, "CompositeExplicitAutograd")
AttentionInterface.register(NAME, _captured_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)


def _program(
    steps: list[_Step], inputs: Sequence[Tensor], outputs: Sequence[Tensor], attend: Attend, joint: Joint
) -> Program:
    """Returns a Python function with one line per captured operation; everything else is bound beforehand."""
    together = _products_of_the_same(steps, joint)
    names = {id(tensor): f"v{number}" for number, tensor in enumerate(inputs)}
    parameters = ", ".join(f"v{number}" for number in range(len(inputs)))
    bound: dict[str, Any] = {}
    constants: dict[int, str] = {}
    lines: list[str] = []
    last: dict[str, int] = {}  # the line that reads a name last

    def bind(value: object) -> str:
        if id(value) not in constants:
            constants[id(value)] = f"c{len(bound)}"
            bound[constants[id(value)]] = value
        return constants[id(value)]

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
            names[id(results)] = f"v{len(names)}_{len(lines)}"
            return names[id(results)]
        assert isinstance(results, (list, tuple)), results
        return "".join(f"{assigned(result)}, " for result in results)

    for step in steps:
        group = together.get(id(step))
        if group is not None:
            if step is group.steps[0]:
                product = f"{bind(group.weight)}({text(step.arguments[0])}, {text(group.bias)})"
                line = f"{product}.split_with_sizes({group.sizes}, -1)"
                lines.append(f"{assigned([each.outputs for each in group.steps])} = {line}")
            continue
        # The built-in behind an overload: a Python call less for each.
        function = attend if step.function is torch.ops.specdec.attend.default else step.function._op
        arguments = [text(argument) for argument in step.arguments]
        arguments += [f"{name}={text(argument)}" for name, argument in step.named.items()]
        called = f"{bind(function)}({', '.join(arguments)})"
        lines.append(called if step.outputs is None else f"{assigned(step.outputs)} = {called}")
    lines.append(f"return {text(tuple(outputs))}")
    free: dict[int, list[str]] = {}
    for name, line in last.items():
        free.setdefault(line, []).append(name)
    body = [f"{line}; del {', '.join(free[i])}" if i in free else line for i, line in enumerate(lines[:-1])]
    replay = "\n        ".join([*body, lines[-1]])
    # Constants are cells of an enclosing function: quicker to read than globals.
    source = f"def make({', '.join(bound)}):\n    def replay({parameters}):\n        {replay}\n    return replay\n"
    scope: dict[str, Any] = {}
    exec(compile(source, "<captured forward>", "exec"), scope)
    return scope["make"](**bound)


@dataclass(frozen=True)
class _Together:
    """Several products with the same inputs, which one product with a joint weight replaces.

    Attributes:
        steps: The products, in order; the first one's place is where the joint product runs.
        weight: The joint weight.
        bias: The joint bias, or None.
        sizes: The widths of the outputs.
    """

    steps: list[_Step]
    weight: PackedWeight
    bias: Tensor | None
    sizes: list[int]


def _products_of_the_same(steps: list[_Step], joint: Joint) -> dict[int, _Together]:
    """Returns products that can be joined, such as a layer's queries, keys and values, by their steps' identity."""
    by_inputs: dict[int, list[_Step]] = {}
    changed: set[int] = set()
    made: set[int] = set()
    for step in steps:
        made |= {id(tensor) for tensor in tree_leaves(step.outputs)}
        if step.function is torch.ops.mkldnn._linear_pointwise.default:
            by_inputs.setdefault(id(step.arguments[0]), []).append(step)
        elif step.function._schema.is_mutable:
            changed |= {id(leaf) for leaf in tree_leaves((step.arguments, step.named)) if isinstance(leaf, Tensor)}
    found: dict[int, _Together] = {}
    for inputs, group in by_inputs.items():
        weights = [step.arguments[1] for step in group]
        biases = [step.arguments[2] for step in group if step.arguments[2] is not None]
        constant = made.isdisjoint(id(tensor) for tensor in (*weights, *biases))
        if len(group) < 2 or inputs in changed or not constant or len(biases) not in (0, len(group)):
            continue
        weight = joint(weights)
        if weight is not None:
            bias = torch.cat([bias.detach() for bias in biases]) if biases else None
            together = _Together(group, weight, bias, [each.shape[0] for each in weights])
            found |= {id(step): together for step in group}
    return found
