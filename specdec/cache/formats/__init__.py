"""The number formats of a quantized KV cache, one file each."""

import torch

from specdec.cache.formats.base import SMALLEST_SCALE, Format
from specdec.cache.formats.e4m3 import EightBitFloats
from specdec.cache.formats.e5m2 import WideEightBitFloats
from specdec.cache.formats.int8 import EightBitIntegers

FORMATS: dict[str, Format] = {each.name: each for each in (EightBitIntegers(), EightBitFloats(), WideEightBitFloats())}
"""What ``kv_cache=`` names."""

__all__ = ["FORMATS", "SMALLEST_SCALE", "Format", "check_device", "check_format"]


def check_format(name: object) -> Format | None:
    """Returns the format of that name; None for a cache in the model's own dtype."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"kv_cache={name!r}: give {', '.join(FORMATS)}, or None for the model's own dtype")
    return FORMATS[name]


def check_device(format: Format, device: torch.device) -> None:
    """Refuse a format that a device cannot compute."""
    try:
        codes, scales = format.encode(torch.ones(1, 2, device=device))
        right = bool((format.decode(codes, scales, torch.float32) == 1).all())
    except (RuntimeError, TypeError, NotImplementedError):
        right = False
    if not right:
        others = [name for name in FORMATS if name != format.name]
        raise ValueError(f"kv_cache={format.name!r}: {device} cannot convert to it; give {others[0]!r} or None")
