"""How much memory a device has left, and what an error says that ran out of it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_CPU = "can't allocate memory"


def free_memory(device: torch.device) -> int:
    """Returns the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def ran_out(error: BaseException) -> bool:
    """Returns whether an error says that a device, or the host, has no memory left.

    torch has a class for it, which its allocator for the CPU does not use.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU in str(error)


def shortage(error: BaseException, device: torch.device) -> str:
    """Returns in words how much memory an error asked for, and how much there was.

    Args:
        error: One for which ``ran_out`` is true.
        device: Where the work runs, if the error does not tell.
    """
    message = str(error)
    gpu = re.search(r"GPU (\d+) has", message)
    place = f"cuda:{gpu[1]}" if gpu is not None else "cpu" if _CPU in message else str(device)
    asked = re.search(rf"ried to allocate {_SIZE}", message)
    left = re.search(rf"of which {_SIZE} is free", message)
    free = _bytes(left) if left is not None else free_memory(torch.device(place))
    wanted = "more" if asked is None else written(_bytes(asked))
    return f"out of memory on {place}: {wanted} asked for, {written(free)} free"


@contextmanager
def one_sentence_if_short(device: torch.device, remedy: str) -> Iterator[None]:
    """Turn an error of the ``with`` block that says that memory has run out into a ``ValueError`` with a remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise ValueError(f"{shortage(error, device)}; {remedy}") from error


def written(size: float) -> str:
    """Returns a number of bytes as text: ``"1.50 GiB"``, ``"300 MiB"``."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def _bytes(found: re.Match[str]) -> float:
    return float(found[1]) * _UNITS[found[2]]
