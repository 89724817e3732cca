"""Linear weights in the layout that the CPU's matrix kernels want, so that they are not rearranged at every call.

oneDNN multiplies in blocks. Given a plain matrix it rearranges or walks it badly each time, which for the few rows of
decoding costs as much as the product: packed once, the linear layers of a 110M Llama take 0.5 to 0.65 of the time in
bfloat16 at 1 to 9 rows and 0.3 to 0.5 in float32 (torch 2.13, AVX512-BF16; ``python -m benchmarks.speed packing``).

The model itself is not touched: the packed copies take the layers' place during our forwards only. In bfloat16 they
give the same bits; in float32 sums are ordered otherwise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from specdec.execution.freshness import Values
from specdec.machine import prefers_packed
from specdec.memory import free_memory

_DTYPES = (torch.float32, torch.bfloat16)

_ROWS = 8  # rows that the layout is chosen for; others lose little
_SHARE = 0.5  # the part of the free memory that copies may take

_MOST_JOINT = 1 << 21  # weights, over layers that are multiplied together

_LEAST_BFLOAT16 = 1 << 14
_LEAST_FLOAT32 = 400_000
"""A call of oneDNN costs about 17 microseconds. Smaller products, counted as weights in bfloat16 and as weights times
rows in float32, are quicker by the plain path."""


_only_plain: ContextVar[bool] = ContextVar("plain_weights", default=False)


@contextmanager
def plain_weights() -> Iterator[None]:
    """Let layers that pack weights of their own (int8) multiply by ordinary ones meanwhile."""
    token = _only_plain.set(True)
    try:
        yield
    finally:
        _only_plain.reset(token)


def packing_allowed() -> bool:
    """Returns whether layers may use packed weights now."""
    return not _only_plain.get()


class PackedWeight:
    """A weight ``[out, in]`` in oneDNN's layout, which only its products can read.

    It never changes, and so is not copied with a module that has one.

    Args:
        weight: In a dtype that ``can_pack``.
    """

    def __init__(self, weight: Tensor):
        self.dtype = weight.dtype
        with torch.inference_mode():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)

    def __call__(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """What ``torch.nn.functional.linear`` gives for inputs of the weight's dtype, of which there are some."""
        return torch.ops.mkldnn._linear_pointwise.default(inputs, self.packed, bias, "none", [], "")

    def __deepcopy__(self, memo: object) -> "PackedWeight":
        return self


@dataclass(frozen=True)
class _Layer:
    """One linear layer.

    Attributes:
        module: The layer.
        forward: The packed weight's product; as an attribute of the module it hides that of its class.
        weight: What was packed.
        packed: The packed weight, read by ``forward``.
        values: Tells when the layer's parameters have changed since they were packed.
    """

    module: nn.Linear
    forward: Callable[[Tensor], Tensor]
    weight: Tensor
    packed: PackedWeight
    values: Values


class PackedLinears:
    """Packed copies of a model's linear layers.

    Layers of other classes (quantized, adapted, distributed) stay as they are, and so does everything on other
    devices, in other dtypes, or without oneDNN. Copies are made if half of the free memory holds them.

    Args:
        model: Whose layers to pack; it is not kept alive, but its layers are.

    Attributes:
        bytes: Memory of the copies.
    """

    def __init__(self, model: nn.Module):
        self._model = ref(model)
        self._layers: list[_Layer] = []
        self._joint: dict[tuple[int, ...], PackedWeight] = {}
        self._changes = 0
        self.bytes = 0
        self._pack(model)

    def __len__(self) -> int:
        return len(self._layers)

    def belongs_to(self, model: nn.Module) -> bool:
        """Returns whether these are copies of this very model's layers."""
        return self._model() is model

    def refresh(self, *, modules_changed: bool = False, all_values: bool = False) -> int:
        """Pack those weights again that have been changed in place or replaced (by training, say).

        Args:
            modules_changed: The model's modules are no longer those that it had.
            all_values: Every weight may have changed, whatever it looks like.

        Returns:
            A number that grows when there were any changes.
        """
        if not (modules_changed or all_values or self._replaced() or self._values.changed()):
            return self._changes
        model = self._model()
        if model is not None:
            self._pack(model, known={} if all_values else {layer.module: layer for layer in self._layers})
        self._joint.clear()
        self._changes += 1
        return self._changes

    def _replaced(self) -> bool:
        return any(layer.module.weight is not layer.weight for layer in self._layers)

    def _pack(self, model: nn.Module, known: Mapping[nn.Linear, _Layer] | None = None) -> None:
        """Pack all layers that can be, except those of which the copy is right still."""
        known = known or {}
        linears = [module for module in model.modules() if isinstance(module, nn.Linear) and _packable(module)]
        weights = {module.weight for module in linears}
        self._layers = []
        self.bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        if self.bytes > _SHARE * free_memory(torch.device("cpu")) and not known:
            linears, self.bytes = [], 0
        for module in linears:
            layer = known.get(module)
            keep = layer is not None and layer.weight is module.weight and not layer.values.changed()
            self._layers.append(layer if layer is not None and keep else _layer(module))
        self._values = Values(p for layer in self._layers for p in _parameters(layer.module))

    def joint(self, packed: Sequence[Tensor]) -> PackedWeight | None:
        """Several layers' weights as one, their outputs side by side; the same sums in fewer calls.

        None for tensors that are not of these layers, and for large ones, where a call's own cost does not count and
        another copy does.
        """
        key = tuple(id(tensor) for tensor in packed)
        if key not in self._joint:
            known = {id(layer.packed.packed): layer.module.weight for layer in self._layers}
            weights = [known[each] for each in key if each in known]
            if len(weights) < len(key) or sum(weight.numel() for weight in weights) > _MOST_JOINT:
                return None
            self._joint[key] = PackedWeight(torch.cat([weight.detach() for weight in weights]))
        return self._joint[key]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the copies take the layers' place."""
        # Leave a layer alone if its `forward` has been replaced since packing.
        free = [(vars(layer.module), layer.forward) for layer in self._layers if "forward" not in vars(layer.module)]
        for names, forward in free:
            names["forward"] = forward
        try:
            yield
        finally:
            for names, _ in free:
                del names["forward"]


# By the model's identity, for as long as an executor uses them: copies must not outlive the engines.
_packed: WeakValueDictionary[int, PackedLinears] = WeakValueDictionary()


def packed_linears(model: nn.Module) -> PackedLinears:
    """Returns the packed copies of a model: made once however many engines use it, dropped with the last of them."""
    known = _packed.get(id(model))
    if known is None or not known.belongs_to(model):
        _packed[id(model)] = known = PackedLinears(model)
    return known


def can_pack(weight: Tensor) -> bool:
    """Returns whether a weight of this device and dtype is faster packed, on this processor."""
    return weight.device.type == "cpu" and weight.dtype in _DTYPES and prefers_packed(weight.dtype)


def _packable(module: nn.Linear) -> bool:
    # An instance that has a forward of its own was changed by somebody, who expects it to be called.
    if type(module) is not nn.Linear or "forward" in vars(module) or not can_pack(module.weight):
        return False
    return module.weight.dtype is torch.float32 or module.weight.numel() >= _LEAST_BFLOAT16


def _layer(module: nn.Linear) -> _Layer:
    weight = module.weight
    packed, width = PackedWeight(weight), weight.shape[1]
    # Rows from which the packed weight is the quicker one.
    least = 0 if packed.dtype is torch.bfloat16 else -(-_LEAST_FLOAT32 // weight.numel()) * width

    def forward(inputs: Tensor) -> Tensor:
        if inputs.dtype is not packed.dtype or inputs.numel() < least or inputs.numel() == 0:
            return nn.functional.linear(inputs, module.weight, module.bias)
        return packed(inputs, module.bias)

    return _Layer(module, forward, weight, packed, Values(_parameters(module)))


def _parameters(module: nn.Linear) -> list[Tensor]:
    return [module.weight] if module.bias is None else [module.weight, module.bias]
