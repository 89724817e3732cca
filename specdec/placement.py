"""Where a model's parts run: all on one device, or spread over several by accelerate's hooks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
"""Maps that accelerate makes, from the memory that every device has left."""
_OFFLOADED = ("cpu", "disk")


def is_spread(model: nn.Module) -> bool:
    """Return whether hooks of accelerate move a model's inputs, or its weights, between its parts."""
    return hasattr(model, "_hf_hook")


def is_shared(model: nn.Module) -> bool:
    """Return whether other processes hold the rest of this model (tensor parallelism of transformers)."""
    return (getattr(model, "_tp_size", None) or 1) > 1


def is_divided(model: Any) -> bool:
    """Return whether a model's layers run on several devices, or in several processes."""
    device_map = (getattr(model, "hf_device_map", None) or {}) if is_spread(model) else {}
    return is_shared(model) or len({_device(place) for place in device_map.values() if not _is_offloaded(place)}) > 1


def main_device(model: Any) -> torch.device:
    """Return the device on which a model takes its tokens and returns its logits."""
    if not is_spread(model):
        return model.device  # of a spread one, offloaded parameters stand on the meta device until their layer runs
    device_map = getattr(model, "hf_device_map", None)
    place = getattr(model._hf_hook, "execution_device", None)
    return device_of_map(device_map or ({} if place is None else {"": place}))


def device_of_map(device_map: Mapping[str, Any]) -> torch.device:
    """Return a map's main device: the first that is no place for offloaded weights, or else the CPU."""
    return next((_device(place) for place in device_map.values() if not _is_offloaded(place)), torch.device("cpu"))


def _is_offloaded(place: Any) -> bool:
    """Return whether weights only wait at a place of a map: their layers run on the main device."""
    return str(place) in _OFFLOADED


def _device(place: Any) -> torch.device:
    found = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    return torch.device("cuda", 0) if found == torch.device("cuda") else found


def check_device_map(device_map: Any) -> None:
    """Refuse a map that is none, or that leaves weights without numbers."""
    remedy = "give 'auto', or a dict from names of modules to devices such as 0, 'cpu' or 'disk'"
    if isinstance(device_map, Mapping):
        if not device_map or not all(isinstance(name, str) for name in device_map):
            raise ValueError(f"device_map={dict(device_map)!r}: {remedy}")
        for name, place in device_map.items():
            if str(place) != "disk":
                _check_place(f"device_map[{name!r}]", place)
    elif device_map not in AUTOMATIC:
        raise ValueError(f"device_map={device_map!r}: {remedy}; a single device is given as device=")


def _check_place(name: str, place: Any) -> None:
    try:
        if isinstance(place, bool) or not isinstance(place, int | str | torch.device):
            raise TypeError
        device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name}={place!r}: give a device such as 0, 'cuda:1', 'cpu' or 'disk'") from error
    if device.type == "meta":
        raise ValueError(f"{name}='meta' leaves these weights without numbers: give 'disk' to keep them on disk")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"{name}={place!r} is not there: this machine has {count} GPUs that torch can use")
