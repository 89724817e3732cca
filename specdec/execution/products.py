"""Weights that multiply any number of rows, in this project's C where it is compiled (``native/products.c``).

They lie in panels: some neighbouring output channels, and for these the weights of the first two inputs, of the next
two, and so on. So they are read in the order in which they lie (``docs/engine.md``). **A row's outputs are the same
bits for any number of rows**, because each sum, in float32, takes the inputs in one order.

A float32 weight whose numbers all fit into 16 bits is kept in 16 bits: half of the traffic for the same function.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.counting import count_operation
from specdec.native.library import MULTIPLY, is_plain, native_library, perform
from specdec.opaque import opaque

NO_MEMORY = "no memory for a copy of a product's inputs: lower batch sizes or lengths, or take a smaller model"

GROUP = 64  # int4 weights of a row that share a scale
_FLOAT32, _BFLOAT16, _FLOAT16, _INT8, _INT4 = range(5)
_EXACT, _HALF, _ROUNDED = range(3)  # float32; bfloat16; float32 that is rounded to bfloat16
_VECTORS = 4  # of a panel
_ZEROS = 0x88  # two int4 weights of 0 as ``Int4Linear`` stores them
_ROWS = 1024  # whose digits are looked at together; the first of them refuse most weights that never had 16 bits


class PanelWeight:
    """A linear layer's weight ``[out, in]`` in panels. It never changes, so copies of a module share it.

    Args:
        panels: The numbers, panel by panel along the first axis, filled up with zeros.
        dtype: The dtype of inputs and outputs, float32 or bfloat16.
        scales: Of quantized weights, in float32: one per channel, or for int4 ``[panel, group, channel]``.
    """

    parts: "tuple[PanelWeight, ...]" = ()  # whose outputs stand side by side in this one

    def __init__(
        self, panels: Tensor, format: int, out: int, width: int, dtype: torch.dtype, scales: Tensor | None = None
    ):
        self.panels, self.scales, self.format = panels, scales, format
        self.out, self.width, self.dtype = out, width, dtype
        self.kind = _HALF if dtype is torch.bfloat16 else _EXACT if scales is None else _ROUNDED
        self.bytes = sum(each.numel() * each.element_size() for each in (panels, scales) if each is not None)

    def __deepcopy__(self, memo: object) -> "PanelWeight":
        return self

    def __call__(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product of ``torch.nn.functional.linear``, for inputs of the weight's dtype, as one operation."""
        return opaque(self.multiply, inputs, bias)

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Return what ``__call__`` does, which programs leave out."""
        inputs = inputs.contiguous()
        width = inputs.shape[-1]
        outputs = inputs.new_empty((*inputs.shape[:-1], self.out))
        added = bias.contiguous() if bias is not None and is_plain(bias) else None
        more = 0 if self.scales is None else self.scales.data_ptr(), 0 if added is None else added.data_ptr()
        sizes = self.out, width, self.width, inputs.numel() // width, self.format, self.kind
        if not perform(MULTIPLY.pack(0, self.panels.data_ptr(), *more, inputs.data_ptr(), outputs.data_ptr(), *sizes)):
            raise MemoryError(NO_MEMORY)
        count_operation("panels")
        return outputs if bias is None or added is not None else outputs.add_(bias)

    def unpacked(self) -> Tensor:
        """Return the integers that ``int8_panels`` or ``int4_panels`` was given, which fill these panels."""
        words = self.panels.view(torch.int16)
        if self.format == _INT4:
            one, two, three, four = self.panels.unbind(-1)
            first, last = (one << 4 | three & 15, one & 240 | three >> 4), (two << 4 | four & 15, two & 240 | four >> 4)
            words = torch.cat([*first, *last], dim=-1)
        return words.transpose(1, 2).contiguous().view(self.out, -1).view(self.panels.dtype)

    @classmethod
    def joined(cls, parts: "Sequence[PanelWeight]") -> "PanelWeight | None":
        """Return several weights of the same inputs as one, with their outputs side by side; None if they do not fit.

        The numbers are not kept twice: the parts become views of the whole.
        """
        first = parts[0]
        alike = {(part.format, part.width, part.dtype) for part in parts}
        # A panel of one part alone would be cut by the next one's first channel.
        whole = all(part.out == part.panels.shape[0] * panel_channels() for part in parts[:-1])
        if len(alike) > 1 or not whole or any(part.scales is not None for part in parts):
            return None
        panels = torch.cat([part.panels for part in parts])
        for part, view in zip(parts, panels.split([part.panels.shape[0] for part in parts]), strict=True):
            part.panels = view
        return cls(panels, first.format, sum(part.out for part in parts), first.width, first.dtype)


def panels(weight: Tensor) -> PanelWeight | None:
    """Return a weight ``[out, in]`` in panels, in 16 bits where these hold every number; None if no C takes it."""
    if not readable(weight):
        return None
    weight = weight.detach()
    with torch.inference_mode():
        format = _format_of(weight)
        filled = _filled(weight.to((torch.float32, torch.bfloat16, torch.float16)[format]), 2)
        # Both inputs of a channel stay side by side in bfloat16, and words are copied faster than single numbers.
        made = _turned(filled.view(torch.int32) if format == _BFLOAT16 else filled).view(filled.dtype)
    return PanelWeight(made, format, weight.shape[0], filled.shape[1], weight.dtype)


def int8_panels(weight: Tensor, scale: Tensor) -> PanelWeight | None:
    """Return int8 weights ``[out, in]``, -127 to 127, and scales ``[out]`` in the inputs' dtype; None as ``panels``."""
    if not readable(weight, scale) or weight.min() == -128:  # which `Int8Linear` never stores
        return None
    with torch.no_grad():
        filled = _filled(weight.detach(), GROUP)
        made, scales = _turned(filled.view(torch.int16)).view(torch.int8), scale.detach().float().contiguous()
    return PanelWeight(made, _INT8, weight.shape[0], filled.shape[1], scale.dtype, scales)


def int4_panels(stored: Tensor, scale: Tensor) -> PanelWeight | None:
    """Return int4 weights, ``[out, in / 2]`` as ``Int4Linear`` stores them, with scales ``[out, in / 64]``."""
    if not readable(stored, scale):
        return None
    out, groups = scale.shape
    with torch.no_grad():
        digits, channels = _filled(stored.detach(), GROUP // 2, _ZEROS), panel_channels()
        made = digits.new_empty(len(digits) // channels, digits.shape[1], channels // _VECTORS, _VECTORS)
        # A lane's word has four bits for each vector: of the first input in its lower half, of the second in its upper.
        for rows, into in zip(digits.split(_ROWS), made.split(_ROWS // channels), strict=True):
            one, two, three, four = _turned(rows).unflatten(2, (_VECTORS, -1)).unbind(2)
            even, odd = (one >> 4 | two & 240, three >> 4 | four & 240), (one & 15 | two << 4, three & 15 | four << 4)
            torch.stack([*even, *odd], dim=-1, out=into)
        scales = F.pad(scale.detach().float(), (0, 0, 0, -out % channels)).view(-1, channels, groups)
    return PanelWeight(made, _INT4, out, groups * GROUP, scale.dtype, scales.transpose(1, 2).contiguous())


def panel_channels() -> int:
    """Return the number of output channels of a panel on this processor."""
    return native_library().panel_channels()  # type: ignore[union-attr]


def _filled(weight: Tensor, inputs: int, value: int = 0) -> Tensor:
    """Return a contiguous weight with whole panels of channels, and a multiple of so many inputs."""
    more = (0, -weight.shape[1] % inputs, 0, -weight.shape[0] % panel_channels())
    return F.pad(weight, more, value=value) if any(more) or weight.storage_offset() % inputs else weight.contiguous()


def _turned(words: Tensor) -> Tensor:
    """Return words ``[out, in]`` as ``[panel, in, channel]``."""
    return words.view(-1, panel_channels(), words.shape[1]).transpose(1, 2).contiguous()


def _format_of(weight: Tensor) -> int:
    """Return the smallest format that holds a weight exactly."""
    if weight.dtype is torch.bfloat16:
        return _BFLOAT16
    for format, dtype in ((_BFLOAT16, torch.bfloat16), (_FLOAT16, torch.float16)):
        if all(torch.equal(rows.to(dtype).float(), rows) for rows in weight.split(_ROWS)):
            return format
    return _FLOAT32


def readable(*tensors: Tensor) -> bool:
    """Return whether there is C that reads these tensors, the last of which has the dtype of inputs and outputs."""
    here = all(tensor.device.type == "cpu" and is_plain(tensor) and tensor.numel() > 0 for tensor in tensors)
    return here and tensors[-1].dtype in (torch.float32, torch.bfloat16) and native_library() is not None
