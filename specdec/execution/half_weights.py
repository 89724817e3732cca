"""Float32 weights whose numbers are all 16-bit numbers, multiplied from 16 bits: half of the memory traffic.

Most checkpoints hold bfloat16 or float16. On a processor without such arithmetic they are loaded in float32, where
half of every number's bits are zeros, and decoding is bound by reading them. FBGEMM multiplies float32 inputs by
float16 weights, which it widens in registers, with sums in float32. So the product is *the same function* wherever
float16 holds every weight exactly, and this is checked, number by number.

A bfloat16 number has fewer digits than float16, but a wider range. Multiplied by a power of two, which is exact, a
layer's weights fit unless some of them are about 2^32 times smaller than the largest (not counting zeros).

One thread, milliseconds for the output layer (32000 x 768) of a 110M Llama with 1 / 9 / 32 / 512 rows, torch 2.13 on an
AMD EPYC with AVX512: 1.4 / 2.5 / 9 / 190, against 2.8 / 4.1 / 9.8 / 160 on float32 weights packed for oneDNN, and 5.5 /
12 / 30 / 400 on plain ones.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.execution.stored_weight import StoredWeight

_LARGEST_EXPONENT = 16  # float16 holds numbers below 2 ** 16
_MOST_RAISED = 120  # so that the power of two and its inverse are ordinary float32 numbers
_ROWS = 1024  # looked at together; the first of them refuse most weights that never had 16 bits


class HalfWeight(StoredWeight):
    """A float32 weight ``[out, in]`` that is kept as float16 numbers in FBGEMM's layout and one power of two.

    Its products are multiplied by that power, ``factor``.
    """

    dtype = torch.float32

    def __init__(self, packed: Any, factor: float, bytes: int):
        self.bytes = bytes
        self._packed = packed
        self._factor = factor

    @classmethod
    def of(cls, weight: Tensor) -> "HalfWeight | None":
        """Return a weight's exact copy in 16 bits; None if there is none, or no library that multiplies with it."""
        if weight.dtype is not torch.float32 or weight.numel() == 0 or not half_products():
            return None
        with torch.inference_mode():
            weight = weight.detach()
            largest = weight.abs().amax()
            if not torch.isfinite(largest):
                return None
            highest = min(_LARGEST_EXPONENT - int(torch.frexp(largest).exponent), _MOST_RAISED)
            for power in dict.fromkeys((0, highest)):
                if all(_is_exact(rows, power) for rows in weight.split(_ROWS)):
                    raised = (weight * 2.0**power).contiguous()
                    packed = torch.ops.quantized.linear_prepack_fp16.default(raised, None)
                    return cls(packed, 2.0**-power, 2 * weight.numel())
        return None

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """See ``StoredWeight.multiply``."""
        outputs = torch.ops.quantized.linear_dynamic_fp16.default(inputs, self._packed)
        if self._factor != 1:
            outputs.mul_(self._factor)
        return outputs if bias is None else outputs.add_(bias)


def _is_exact(weight: Tensor, power: int) -> bool:
    """Return whether float16 holds ``weight * 2 ** power`` without any loss."""
    return torch.equal((weight * 2.0**power).half().float() * 2.0**-power, weight)


@cache
def half_products() -> bool:
    """Return whether this torch multiplies float32 inputs by float16 weights as exactly as it says.

    It needs FBGEMM, which there is for processors with AVX2. The operations belong to torch's older quantization, and
    may go one day: then float32 weights are packed as they are.
    """
    try:
        with torch.inference_mode():
            weight = torch.arange(-32.0, 32.0).view(4, 16)
            packed = torch.ops.quantized.linear_prepack_fp16.default(weight, None)
            outputs = torch.ops.quantized.linear_dynamic_fp16.default(weight[:2], packed)
        # Whole numbers: any order of the sums gives the same.
        return torch.equal(outputs, weight[:2] @ weight.T)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
