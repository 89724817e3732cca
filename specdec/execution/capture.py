"""A model's forward, captured once for a shape and turned into a flat sequence of tensor operations.

The Python between a model's operations (modules, wrappers, configurations) costs as much as the operations themselves
where these are small: a drafter's, or a small target's for a few tokens on a CPU. A captured forward leaves it out. It
is to the CPU what a captured graph is to a GPU, with one difference: attention stays one opaque step, which reads the
cache and the masks of the forward that runs. So it depends on the numbers of rows and nodes, and not on any length.

A model that cannot be captured (its operations depend on values, its attention is its own) raises here, and the
executor goes on without.

What was captured is rewritten in fewer operations (``fusion.py``) and becomes a Python function (``program.py``).
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
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from specdec.cache.base import OwnLayout
from specdec.execution.counting import depends_on_values
from specdec.execution.fusion import Joint, fuse
from specdec.execution.program import Program, Step, write_program
from specdec.execution.stored_weight import StoredWeight, noted_products
from specdec.scoped import scoped

NAME = "specdec_captured"
"""The name of the model's attention function while the model is captured."""

Attend = Callable[..., Tensor]


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
    with torch.inference_mode():
        with (
            scoped(_current, cache),
            _NoValues(_raise),
            _Capturer(_raise) as capturer,
            noted_products(capturer.product),
        ):
            outputs = call(*inputs)
        if cache.waiting is not None:
            raise UncapturableError("a layer's keys do not go to the attention function")
        steps = fuse(capturer.steps, inputs, outputs, joint)
    return write_program([_called(step, attend) for step in steps], inputs, outputs)


@dataclass(eq=False)
class Noted:
    """The operations of a piece of work that was noted while it ran.

    Attributes:
        steps: The operations.
        refusal: Why they cannot be repeated, if they cannot.
    """

    steps: list[Step]
    refusal: str | None = None

    def refuse(self, reason: str) -> None:
        """Note that the work cannot be repeated. It goes on: half of it may have changed something already."""
        self.refusal = self.refusal or reason


@contextmanager
def recorded_steps() -> Iterator[Noted]:
    """Note the operations of the ``with`` block."""
    noted = Noted([])
    with _NoValues(noted.refuse), _Capturer(noted.refuse) as capturer, noted_products(capturer.product):
        noted.steps = capturer.steps
        yield noted


def _raise(reason: str) -> None:
    raise UncapturableError(reason)


def _called(step: Step, attend: Attend) -> Step:
    """Returns a step with the function that a program calls for it."""
    if step.function is not torch.ops.specdec.attend.default:
        return step
    return Step(attend, step.arguments, step.named, step.outputs)


class _Capturer(TorchDispatchMode):
    """Notes every operation, and keeps its tensors so that each is known by its identity.

    Args:
        refuse: Is told why the operations cannot be repeated.
    """

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()
        self._refuse = refuse
        self.steps: list[Step] = []
        self._inside = False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            return func(*args, **(kwargs or {}))
        if depends_on_values(func, args):
            self._refuse(f"{func} depends on values")
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, kwargs):
            if outputs is not args[0]:
                self._refuse(f"{func} draws random numbers")
            return outputs  # dropout, which is off
        self.steps.append(Step(func, args, kwargs, outputs))
        return outputs

    def product(self, weight: StoredWeight, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Returns a product with a stored weight, and notes it as one operation."""
        self._inside = True
        try:
            outputs = weight.multiply(inputs, bias)
        finally:
            self._inside = False
        self.steps.append(Step(weight, (inputs, bias), {}, outputs))
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

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SHOWS_VALUES:
            self._refuse(f"{func.__name__} depends on values")
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


# One per thread: another one may capture another model at the same time.
_current: ContextVar[CapturingCache] = ContextVar("capturing")


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
