"""How a launch of tree attention is divided: its tiles, and the pieces of a long context."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

PROGRAMS_PER_PROCESSOR = 4  # of a GPU's multiprocessor, if the context is long enough for so many pieces
LEAST_KEYS = 128  # positions in a piece: below that, joining the pieces costs more than reading them in turn
MOST_PIECES = 128


class Tiles(NamedTuple):
    """How a launch is divided."""

    queries: int  # nodes times query heads of a key head, per program
    keys: int  # positions per step of a program
    warps: int
    stages: int  # steps whose keys and values are on their way at the same time


def choose_pieces(programs: int, keys: int, available: int) -> int:
    """Return the number of pieces of a context of ``keys`` positions, for ``programs`` per piece and ``processors``."""
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * available, programs)
    return max(1, min(wanted, triton.cdiv(keys, LEAST_KEYS), MOST_PIECES))


def choose_tiles(queries: int, head_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Return tiles that fit into a multiprocessor's registers and shared memory, as ptxas reports (not measured)."""
    wide = max(head_dim, value_dim)
    if dtype is torch.float32:  # without tensor cores, all of it stands in registers
        most, widest_step = 16, 32 if wide <= 128 else 16
    else:
        most, widest_step = (128, 128) if wide <= 128 else (64, 64) if wide <= 256 else (16, 32)
    block = min(most, max(16, triton.next_power_of_2(queries)))
    room = int(0.9 * shared_memory(device))
    for keys, stages in ((128, 2), (64, 3), (64, 2), (32, 3), (32, 2), (32, 1)):
        if keys > widest_step or block * keys > 128 * 64 or (keys == 128 and block > 32):
            continue  # the scores would not fit into the registers
        if (block * head_dim + stages * keys * (head_dim + value_dim)) * dtype.itemsize <= room:
            break
    else:
        keys, stages = 16, 1
    return Tiles(block, keys, 8 if block == 128 or block * wide >= 32 * 256 or wide > 256 else 4, stages)


@lru_cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 on a CPU, where the interpreter runs one program after the other."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may have."""
    if device.type == "cpu":
        return 96 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
