"""The quantizations that there are, by name."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from specdec.quantization.dispatch import DispatchedLinear
from specdec.quantization.fp8 import Fp8Linear
from specdec.quantization.int4 import Int4Linear
from specdec.quantization.int8 import Int8Linear

METHODS: dict[str, Callable[[Tensor, Tensor | None], DispatchedLinear]] = {
    "int8": Int8Linear,
    "int8_compact": partial(Int8Linear, keep_copy=False),
    "int4": Int4Linear,
    "int4_compact": partial(Int4Linear, keep_copy=False),
    "fp8": Fp8Linear,
}
"""Each makes a layer from a weight of shape (out, in) and a bias. It must also take tensors on torch's ``meta`` device,
which have shapes but no numbers: in this way the layers of a saved model are made before its numbers are read."""
