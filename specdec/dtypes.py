"""The dtype that ``dtype="auto"`` means."""

from typing import NamedTuple

import torch

from specdec.machine import dtype_name, is_native
from specdec.native import DTYPES, native_library


class DtypeChoice(NamedTuple):
    """A dtype, and why it is that one: ``auto: float32, …``, for the heading of a table."""

    dtype: torch.dtype
    reason: str


def choose_dtype(checkpoint: torch.dtype, device: torch.device, *, fast: bool | None = None) -> DtypeChoice:
    """Return the dtype that ``dtype="auto"`` means for a checkpoint of a dtype on a device, and why.

    ``fast`` says whether the device computes fast in that dtype; None asks it. CPUs do without arithmetic of their own
    where this project's C multiplies: it reads a weight at its own size, and the weights are held once.
    """
    stored, in_c = dtype_name(checkpoint), device.type == "cpu" and checkpoint in DTYPES and bool(native_library())
    if in_c or is_native(checkpoint, device) if fast is None else fast:
        return DtypeChoice(checkpoint, f"auto: {stored}, as in the checkpoint")
    # A GPU without bfloat16 has float16, at half the memory of float32. A CPU keeps all of the checkpoint's digits.
    dtype = torch.float16 if device.type == "cuda" and checkpoint is torch.bfloat16 else torch.float32
    reason = f"because this {'GPU' if device.type == 'cuda' else 'CPU'} has no fast {stored} arithmetic"
    return DtypeChoice(dtype, f"auto: {dtype_name(dtype)}, {reason} (checkpoint: {stored})")
