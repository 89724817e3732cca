"""Rounding to a dtype in the middle of a kernel, where the model's own operations have stored their results."""
# ruff: noqa: N803 (a kernel's constants are written in capitals)

from typing import no_type_check

import triton
import triton.language as tl
from triton.runtime import JITFunction


@triton.jit
@no_type_check
def rounded(numbers, DTYPE: tl.constexpr):
    """Returns float32 numbers, rounded to a dtype."""
    if _CUTS and tl.bfloat16 == DTYPE:
        bits = numbers.to(tl.int32, bitcast=True)
        numbers = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return numbers.to(DTYPE).to(tl.float32)


_CUTS = tl.constexpr(not isinstance(rounded, JITFunction))
"""Whether kernels run in Triton's interpreter, which cuts off what bfloat16 does not hold."""
