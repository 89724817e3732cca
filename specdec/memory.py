"""How much memory a device has left."""

import psutil
import torch


def free_memory(device: torch.device) -> int:
    """Returns the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
