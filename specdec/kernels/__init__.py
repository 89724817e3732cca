"""Every Triton kernel, what it is given of a cache, and the one question whether kernels run here.

Triton is imported when somebody asks that. On a CPU the operations of torch run; tests compare the two in Triton's
interpreter.
"""

import logging
import os
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

OLDEST_GPU = (8, 0)
"""The lowest compute capability whose tensor cores Triton uses."""


def usable(tensor: Tensor) -> bool:
    """Return whether kernels take this tensor: it is on a GPU that runs them."""
    return tensor.device.type == "cuda" and obstacle(tensor.device) is None


@cache
def obstacle(device: torch.device) -> str | None:
    """Return why kernels do not run on a device, as a clause; None if they do. A warning says it once for a GPU."""
    try:
        reason = _obstacle(device)
    except Exception as error:  # a broken installation raises anything, as does a machine without a C compiler
        reason = f"Triton does not work here: {error}"
    if reason is not None and device.type == "cuda":
        logger.warning("torch's operations run in place of Triton's kernels, which are faster, because %s", reason)
    return reason


def _obstacle(device: torch.device) -> str | None:
    try:
        import triton
    except ImportError:
        return "Triton is not installed (CUDA builds of torch bring it; pip install triton)"
    if int(triton.__version__.split(".")[0]) < 3:
        return f"Triton {triton.__version__} is older than 3.0"
    if device.type != "cuda":
        # Kernels run on the CPU, as Triton's documentation says, by an environment variable.
        interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
        return None if interpreted else f"kernels are compiled for GPUs, and the model is on {device}"
    if (found := torch.cuda.get_device_capability(device)) < OLDEST_GPU:
        have, need = (".".join(map(str, version)) for version in (found, OLDEST_GPU))
        return f"this GPU has compute capability {have}, and kernels need {need}"
    from specdec.kernels.random import uniforms

    zeros = torch.zeros(1, dtype=torch.long, device=device)
    uniforms(zeros, zeros, zeros, (1, 1, 1), 53)
    return None


class Stored(NamedTuple):
    """A layer's keys and values as a kernel reads them, which walks through the slots itself.

    Every tensor is a view of the cache's own memory, whose strides tell where things are.

    Attributes:
        keys: ``[slot, kv_head, position, head_dim]``, in the dtype that they are stored in.
        values: ``[slot, kv_head, position, value_dim]``, in the dtype that they are stored in.
        key_scales: Factors of quantized keys, ``[slot, kv_head, position]`` in float32; None if they are not quantized.
        value_scales: Factors of quantized values, likewise.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


class Destination(NamedTuple):
    """Where a layer's new entries go, for a kernel that puts them there itself.

    Attributes:
        keys: The layer's keys, ``[slot, position, kv_head, head_dim]``: a view of the cache's own memory.
        values: Its values, likewise.
        rows: Index along the first axis of every node's entry, ``[batch, node]`` or ``[batch, 1]``.
        cells: Index along the second axis, ``[batch, node]``.
    """

    keys: Tensor
    values: Tensor
    rows: Tensor
    cells: Tensor
