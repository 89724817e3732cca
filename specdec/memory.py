"""How much memory a device has left, and what an error says that ran out of it."""

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specdec.native.library import cache_folder, native_library
from specdec.slot_memory import SlotMemory, remedy, written_bytes

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_CPU = "can't allocate memory"
_KEPT = (-3, 32 << 20), (-1, 128 << 20)  # M_MMAP_THRESHOLD, as large as it may be, and M_TRIM_THRESHOLD
_LEAST_ON_DISK = 1 << 28  # bytes of weights that are written to disk so that memory holds them once
_CLEAN = re.compile(r"^(\w+)-(\w+) ...p \w+ \S+ [1-9].*\n(?:(?!(?:Anonymous|Swap): +[1-9])\w+:.*\n)+VmFlags", re.M)


def free_memory(device: torch.device) -> int:
    """Returns the bytes that can still be allocated on a device, with those that torch keeps there and does not use."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return psutil.virtual_memory().available


def give_back() -> None:
    """Give memory that is free now back to the system. What rounds free from now on, glibc's allocator is to keep.

    New pages cost more than the work: probabilities of five rows of 151,936 tokens take 4.1 ms with, 0.5 without them.
    """
    with suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        for option, size in () if "MALLOC_TRIM_THRESHOLD_" in os.environ else _KEPT:
            library.mallopt(option, size)


def clean_files() -> list[tuple[int, int]]:
    """Return the addresses at which files are mapped that nobody has written to there; none outside of Linux."""
    with suppress(OSError):
        areas = Path("/proc/self/smaps").read_text(errors="replace")
        return [(int(begin, 16), int(end, 16)) for begin, end in _CLEAN.findall(areas)]
    return []


def drop(tensor: torch.Tensor, clean: list[tuple[int, int]]) -> None:
    """Take a tensor that a clean file holds out of memory: its next reader has it read again."""
    storage, page = tensor.untyped_storage(), mmap.PAGESIZE
    begin, end = storage.data_ptr() // page * page, storage.data_ptr() + storage.nbytes()
    if any(first <= begin < end <= last for first, last in clean):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def onto_disk(model: torch.nn.Module) -> None:
    """Move linear weights that no file holds (cast, or of a GGUF file) into files without a name, for ``drop``.

    Panels take their place in memory. Small models stay as they are, and what finds no room on the disk.
    """
    linear = (getattr(each, "weight", None) for each in model.modules() if type(each) is torch.nn.Linear)
    weights = {id(one): one for one in linear if type(one) is torch.nn.Parameter and one.device.type == "cpu"}.values()
    if sum(one.nbytes for one in weights) < _LEAST_ON_DISK or not native_library() or not (clean := clean_files()):
        return
    with suppress(OSError, SafetensorError), TemporaryDirectory(dir=cache_folder()) as folder:
        for weight in weights:
            if not any(first <= weight.data_ptr() < last for first, last in clean):
                save_file({"weight": weight.detach().contiguous()}, file := Path(folder, "weight"))
                weight.data = load_file(file)["weight"]
                file.unlink()  # not at the end: whoever is killed leaves one weight there at most


def off_files(model: torch.nn.Module) -> None:
    """Copy a model's integers on a CPU out of the files that are mapped for them: panels will take their place."""
    files = clean_files()
    for tensor in [each for each in model.parameters() if each.device.type == "cpu" and not each.is_floating_point()]:
        mapped, tensor.data = tensor.data, tensor.data.clone()
        drop(mapped, files)


def ran_out(error: BaseException) -> bool:
    """Returns whether an error says that a device, or the host, has no memory left."""
    of_torch = isinstance(error, RuntimeError) and _CPU in str(error)  # its allocator for the CPU has no class for it
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or of_torch


def shortage(error: BaseException, device: torch.device) -> str:
    """The memory in words that an error (``ran_out``) asked for and what there was; on ``device`` by default."""
    message = str(error)
    gpu = re.search(r"GPU (\d+) has", message)
    place = f"cuda:{gpu[1]}" if gpu is not None else "cpu" if _CPU in message else str(device)
    found = [re.search(words, message) for words in (f"ried to allocate {_SIZE}", f"of which {_SIZE} is free")]
    asked, left = (None if size is None else float(size[1]) * _UNITS[size[2]] for size in found)
    free = free_memory(torch.device(place)) if left is None else left
    wanted = "more" if asked is None else written_bytes(asked)
    return f"out of memory on {place}: {wanted} asked for, {written_bytes(free)} free"


class NoRoomError(ValueError):
    """A cache, called ``whose``, of ``rows`` slots of so many positions that does not fit; says what would."""

    def __init__(
        self, slots: SlotMemory, *, rows: int, length: int, place: torch.device, free: float,
        whose: str = "the KV cache",
    ):  # fmt: skip
        self.slots, self.rows, self.length, self.place, self.free = slots, rows, length, place, free
        verb = "need" if " and " in whose else "needs"
        each = f"{length + slots.drafted} positions x {slots.per_position:.0f}"
        each = each if slots.per_position else f"{slots.per_row:.0f}"  # of any length
        super().__init__(
            f"{whose} {verb} {written_bytes(slots.bytes(rows=rows, length=length))} ({rows} slots x {each} bytes), but "
            f"{place} has {written_bytes(free)} free: {remedy(slots, free, rows=rows, length=length, least=2)}"
        )

    def beside(self, other: SlotMemory, place: torch.device) -> "NoRoomError":
        """Returns the refusal of this cache together with another one, which is allocated already.

        Both have as many slots. The other's memory counts as free, because fewer or shorter slots make room in both.
        """
        if place != self.place:
            return self
        sizes = {"rows": self.rows, "length": self.length}
        free, whose = self.free + other.bytes(**sizes), "the KV caches of target and drafter"
        return NoRoomError(self.slots.beside(other), **sizes, place=place, free=free, whose=whose)


@contextmanager
def one_sentence_if_short(device: torch.device, remedy: str) -> Iterator[None]:
    """Turn an error of the ``with`` block that says that memory has run out into a ``ValueError`` with a remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise ValueError(f"{shortage(error, device)}; {remedy}") from error
