"""A model's forward, recorded once for a shape and replayed as a flat list of tensor operations.

The Python between a model's operations (modules, wrappers, configurations) costs as much as the operations themselves
where these are small: a drafter's, or a small target's for a few tokens on a CPU. A recording leaves it out. It is
to the CPU what a captured graph is to a GPU, but for what changes between calls: attention is one opaque step, which
reads the cache and the masks of the moment, so a recording depends on the numbers of rows and tokens alone and not
on any length.

Nothing is assumed: a recording is made from other tokens and positions than those it is first compared on, where it
must give the eager forward's very logits, and a model that cannot be recorded (its steps depend on values, its
attention is its own, it has code or hooks of somebody else's) goes on as it was.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from specdec.cache import OwnLayout

NAME = "specdec_recorded"
"""What a model's attention is called while it is recorded."""

OURS = ("torch", "transformers", "specdec")
"""Whose modules and hooks can be recorded: others may keep a state that a recording would not see change."""

Attend = Callable[..., Tensor]
Program = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class UnrecordableError(RuntimeError):
    """A model does something that a recording cannot repeat."""


def record(
    call: Callable[[Tensor, Tensor], Sequence[Tensor]],
    tokens: Tensor,
    positions: Tensor,
    *,
    cache: "RecordingCache",
    attend: Attend,
) -> Program:
    """Record a forward.

    Args:
        call: The model with everything but tokens and positions given: ``NAME`` for its attention, ``cache``, and the
            masks that ``cache`` knows. Returns tensors.
        tokens: Of the shape to be recorded; the values do not matter.
        positions: Of the same shape.
        cache: Sees what goes from a layer's projections to its attention.
        attend: What a layer's attention is when the recording runs, ``attend(query, key, value, sinks, layer, mask,
            scaling, softcap)``: the arguments of the recorded attention call with the *new* keys and values, the
            layer's index, and the number of the mask. Returns ``[batch, query, head, value_dim]``.

    Raises:
        Exception: Whatever tracing raises; the model cannot be recorded.
    """
    with torch.inference_mode(False), torch.no_grad(), _recording(cache):
        graph = make_fx(call, tracing_mode="real")(tokens.clone(), positions.clone())
    if cache.waiting is not None:
        raise UnrecordableError("a layer's keys do not go to the attention function")
    return _program(graph, attend)


def recordable(modules: Iterable[nn.Module]) -> bool:
    """Whether all of a model's modules, and all hooks on them, are known code."""
    for module in modules:
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(_home(code) not in OURS for code in (type(module), *hooks)) or "forward" in vars(module):
            return False
    return True


def _home(code: Any) -> str:
    return (getattr(code, "__module__", None) or type(code).__module__).split(".")[0]


class RecordingCache(OwnLayout):
    """Hands keys and values through to the attention function, and notes which layer they are of.

    Args:
        num_layers: Of the model.
        masks: What the layers are given as masks; attention must get one of these very tensors.

    Attributes:
        waiting: Keys and values on their way from a layer's projections to its attention.
    """

    def __init__(self, num_layers: int, masks: list[Tensor]):
        super().__init__(num_layers)
        self.masks = masks
        self.waiting: tuple[Tensor, Tensor, int] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object):
        if self.waiting is not None:
            raise UnrecordableError("a layer's keys do not go to the attention function")
        self.waiting = key_states, value_states, layer_idx
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        raise UnrecordableError("a layer selects keys by an indexer")

    def take(self, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[int, int]:
        """The layer whose keys and values these are, and the number of the mask."""
        if self.waiting is None or self.waiting[0] is not key or self.waiting[1] is not value:
            raise UnrecordableError("keys or values are changed between the cache and the attention function")
        number = next((i for i, known in enumerate(self.masks) if known is mask), None)
        if number is None:
            raise UnrecordableError("the mask is changed on its way to the attention function")
        layer, self.waiting = self.waiting[2], None
        return layer, number

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


_caches: list[RecordingCache] = []


@contextmanager
def _recording(cache: RecordingCache) -> Iterator[None]:
    _caches.append(cache)
    try:
        yield
    finally:
        _caches.pop()


def _recorded_attention(
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
    """Stands for the attention function while a model is recorded: one opaque step."""
    layer, mask = _caches[-1].take(key, value, attention_mask)
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
AttentionInterface.register(NAME, _recorded_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)


def _program(graph: fx.GraphModule, attend: Attend) -> Program:
    """A Python function of a recorded graph: a line per operation, everything else bound beforehand."""
    graph.graph.eliminate_dead_code()
    nodes = list(graph.graph.nodes)
    last_use = {argument: node for node in nodes for argument in node.all_input_nodes}
    bound: dict[str, Any] = {}
    lines: list[str] = []
    parameters: list[str] = []

    def bind(value: object) -> str:
        name = f"c{len(bound)}"
        bound[name] = value
        return name

    def text(argument: object) -> str:
        if isinstance(argument, fx.Node):
            return names[argument]
        if isinstance(argument, (list, tuple)):
            inner = "".join(f"{text(part)}, " for part in argument)
            return f"[{inner}]" if isinstance(argument, list) else f"({inner})"
        if argument is None or isinstance(argument, (bool, int, str)):
            return repr(argument)
        return bind(argument)

    names: dict[fx.Node, str] = {}
    functions: dict[object, str] = {}
    for number, node in enumerate(nodes):
        if node.op == "placeholder":
            names[node] = f"v{number}"
            parameters.append(names[node])
        elif node.op == "get_attr":
            names[node] = bind(getattr(graph, str(node.target)))
        elif node.op == "call_function":
            target = attend if node.target is torch.ops.specdec.attend.default else node.target
            # The built-in behind an overload: a Python call less for each.
            function = getattr(target, "_op", target)
            if target not in functions:
                functions[target] = bind(function)
            arguments = [text(argument) for argument in node.args]
            arguments += [f"{name}={text(argument)}" for name, argument in node.kwargs.items()]
            names[node] = f"v{number}"
            lines.append(f"v{number} = {functions[target]}({', '.join(arguments)})")
        else:
            assert node.op == "output", node.op
            lines.append(f"return {text(tuple(node.args[0]))}")
            break
        done = [
            names[argument]
            for argument in node.all_input_nodes
            if last_use[argument] is node and names[argument].startswith("v")
        ]
        if done:
            lines.append(f"del {', '.join(done)}")
    body = "\n        ".join(lines)
    # Constants are cells of an enclosing function: quicker to read than globals.
    source = (
        f"def make({', '.join(bound)}):\n    def replay({', '.join(parameters)}):\n        {body}\n    return replay\n"
    )
    scope: dict[str, Any] = {}
    exec(compile(source, "<recorded forward>", "exec"), scope)
    return scope["make"](**bound)
