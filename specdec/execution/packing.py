"""Linear weights in the layout that the CPU's matrix kernels want, so that they are not rearranged at every call.

oneDNN multiplies in blocks. Given a plain matrix it rearranges or walks it badly each time, which for the few rows of
decoding costs as much as the product: packed once, the linear layers of a 110M Llama take 0.5 to 0.65 of the time in
bfloat16 at 1 to 9 rows and 0.3 to 0.5 in float32 (torch 2.13, AVX512-BF16; ``python -m benchmarks.speed packing``).

The model itself is not touched: the packed copies take the layers' place during our forwards only. In bfloat16 they
give the same bits; in float32 sums are ordered otherwise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specdec.memory import free_memory

_DTYPES = (torch.float32, torch.bfloat16)

_ROWS = 8  # rows that the layout is chosen for; others lose little
_SHARE = 0.5  # of the free memory that copies may take

_MOST_JOINT = 1 << 21  # weights of layers that are multiplied as one

_LEAST_BFLOAT16 = 1 << 14
_LEAST_FLOAT32 = 400_000
"""A call of oneDNN costs about 17 microseconds. Smaller products, counted as weights in bfloat16 and as weights times
rows in float32, are quicker by the plain path."""


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
        forward: Of the packed weight; an attribute of this name in the module hides that of its class.
        packed: The packed weight, read by ``forward``.
        version: Of the parameters when they were packed.
    """

    module: nn.Linear
    forward: Callable[[Tensor], Tensor]
    packed: PackedWeight
    version: tuple[int, ...]


class PackedLinears:
    """Packed copies of a model's linear layers.

    Layers of other classes (quantized, adapted, distributed) stay as they are, and so does everything on other
    devices, in other dtypes, or without oneDNN. Copies are made if half of the free memory holds them.

    Args:
        model: Whose layers to pack.

    Attributes:
        bytes: Memory of the copies.
    """

    def __init__(self, model: nn.Module):
        self._layers: list[_Layer] = []
        self._joint: dict[tuple[int, ...], PackedWeight] = {}
        self._changes = 0
        self.bytes = 0
        linears = [module for module in model.modules() if isinstance(module, nn.Linear) and _packable(module)]
        weights = {module.weight for module in linears}
        needed = sum(weight.numel() * weight.element_size() for weight in weights)
        if needed > _SHARE * free_memory(torch.device("cpu")):
            return
        self.bytes = needed
        self._layers = [_layer(module) for module in linears]

    def __len__(self) -> int:
        return len(self._layers)

    def refresh(self) -> int:
        """Pack those weights again that have been changed in place or replaced (by training, say).

        Returns:
            A number that grows when there were any.
        """
        if any(_version(layer.module) != layer.version for layer in self._layers):
            known = {layer.module: layer for layer in self._layers}
            # A model may also have been moved to another device or dtype, where nothing is packed.
            self._layers = [
                layer if _version(module) == layer.version else _layer(module)
                for module, layer in known.items()
                if _version(module) == layer.version or _packable(module)
            ]
            self._joint.clear()
            self._changes += 1
        return self._changes

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
        # Not that of a forward which somebody has given a layer since.
        free = [(vars(layer.module), layer.forward) for layer in self._layers if "forward" not in vars(layer.module)]
        for names, forward in free:
            names["forward"] = forward
        try:
            yield
        finally:
            for names, _ in free:
                del names["forward"]


_packed: WeakKeyDictionary[nn.Module, PackedLinears] = WeakKeyDictionary()


def packed_linears(model: nn.Module) -> PackedLinears:
    """The packed copies of a model, made once however many engines use it."""
    if model not in _packed:
        _packed[model] = PackedLinears(model)
    return _packed[model]


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has kernels for a weight of this device and dtype on this processor."""
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype is not torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


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

    return _Layer(module, forward, packed, _version(module))


def _version(module: nn.Linear) -> tuple[int, ...]:
    """Changes whenever a layer's parameters do (but for writes through ``.data``)."""
    parameters = [module.weight] if module.bias is None else [module.weight, module.bias]
    return tuple(n for p in parameters for n in (p.data_ptr(), 0 if p.is_inference() else p._version))
