"""The quantizations that there are, by name."""

from collections.abc import Callable

from torch import Tensor

from specdec.quantization import fp8, int4, int8
from specdec.quantization.base import QuantizedLinear

METHODS: dict[str, Callable[[Tensor, Tensor | None], QuantizedLinear]] = {
    "int8": int8.with_copies,
    "int8_compact": int8.compact,
    "int4": int4.with_copies,
    "int4_compact": int4.compact,
    "fp8": fp8.Fp8Linear,
}
"""Each makes a layer from a weight of shape (out, in) and a bias. It must also take tensors on torch's ``meta`` device,
which have shapes but no numbers: in this way the layers of a saved model are made before its numbers are read."""
