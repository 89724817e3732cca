"""Keys or values that are stored in a format of one byte per number, as a tensor that a model can be given."""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from specdec.cache.formats import Format


class QuantizedTensor(Tensor):
    """Looks like a tensor of the model's dtype, and is decoded by the first operation that reads it.

    So any attention function can read a quantized cache. One that knows this class takes ``codes`` and ``scales``, and
    need never have all numbers in memory. It cannot be written to.

    Attributes:
        codes: Bytes, in the shape of the tensor.
        scales: One float32 factor per vector: the same shape, with 1 for the last axis.
        format: How numbers are stored.
    """

    codes: Tensor
    scales: Tensor
    format: Format

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scales: Tensor, format: Format, dtype: torch.dtype) -> "QuantizedTensor":
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scales, made.format = codes, scales, format
        return made

    def decoded(self) -> Tensor:
        """Returns the numbers, as a plain tensor."""
        return self.format.decode(self.codes, self.scales, self.dtype)

    def __repr__(self, **kwargs: object) -> str:
        return f"QuantizedTensor({tuple(self.shape)}, {self.dtype}, stored in {self.format.name})"

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and isinstance(args[0], QuantizedTensor):
            raise RuntimeError(f"{func} would write to keys or values that are quantized: use kv_cache=None")
        args, kwargs = tree_map_only(QuantizedTensor, QuantizedTensor.decoded, (args, kwargs or {}))
        return func(*args, **kwargs)
