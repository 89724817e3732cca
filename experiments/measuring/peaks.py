"""The device at its best, measured: bytes per second in a copy, operations per second in a product."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.measuring.rounds import now
from specdec.execution.products import panels
from specdec.memory import free_memory
from specdec.physics.work import Roof


@dataclass(frozen=True)
class Peaks:
    """The device at its best.

    Attributes:
        copy: Bytes per second, read and written, in a copy of memory much larger than the caches.
        read: Bytes per second in a sum over such memory. On many CPUs it is more than a copy reaches, where every line
            that is written is read first.
        flops: Operations per second in a large matrix product.
        cache_bytes: The size of the last cache; 0 if the system does not say.
    """

    copy: float
    read: float
    flops: float
    cache_bytes: int

    @property
    def roof(self) -> Roof:
        """The bound for any work: the faster of both ways to use the memory."""
        return Roof(max(self.copy, self.read), self.flops)


def measure_peaks(device: torch.device, dtype: torch.dtype, *, seconds: float, largest: int | None = None) -> Peaks:
    """Measure a device, for about ``seconds`` per figure.

    ``largest`` bounds the bytes that are read, and half of which are copied onto the other half; None for 4 GiB on a
    GPU, and elsewhere for 512 MiB or eight times the caches. Of all products that a forward may take, the fastest
    counts: on a CPU that of packed weights, too, and float32's beside the one in ``dtype`` where a processor has no
    instructions for 16-bit numbers and widens them.
    """
    caches = cache_bytes(device)
    wanted = 4 << 30 if device.type == "cuda" else max(512 << 20, 8 * caches)
    size = min(wanted if largest is None else largest, free_memory(device) // 8)

    def best(call: Callable[[], object]) -> float:
        return shortest(call, device, seconds)

    def memory() -> tuple[float, float]:  # a function, so that the memory is gone afterwards
        whole = torch.ones(2, size // 8, device=device)
        return size / best(lambda: whole[1].copy_(whole[0])), size / best(whole.sum)

    copy, read = memory()
    width = 8192 if device.type == "cuda" else 1024 if largest is None else 512
    widened = {torch.float32} if device.type == "cpu" and dtype.itemsize == 2 else set()

    def product(dtype: torch.dtype) -> float:
        a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        calls: list[Callable[[], object]] = [lambda: a @ b]
        if (packed := panels(b)) is not None:  # so do forwards: on some processors that is nearly twice as fast
            calls.append(lambda: packed.multiply(a, None))
        return 2 * width**3 / min(map(best, calls))

    return Peaks(copy, read, max(map(product, {dtype, *widened})), caches)


def brief_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Return peaks that are measured in about half a second, in twice the caches: a server has half a gigabyte."""
    largest = 1 << 30 if device.type == "cuda" else max(64 << 20, 2 * cache_bytes(device))
    return measure_peaks(device, dtype, seconds=0.1, largest=largest)


def cache_bytes(device: torch.device, root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the size of the last cache before a device's memory; 0 if the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    texts = [file.read_text().strip() for file in root.glob("index*/size")]
    units = {"K": 10, "M": 20, "G": 30}
    sizes = [int(t.rstrip("KMG")) << units.get(t[-1], 0) for t in texts if t.rstrip("KMG").isdecimal()]
    return max(sizes, default=0)


def shortest(call: Callable[[], object], device: torch.device, limit: float) -> float:
    """Return the shortest of a call's times, of at least three and at most fifty."""
    call()
    began = now(device)
    times: list[float] = []
    while len(times) < 3 or (len(times) < 50 and time.perf_counter() - began < limit):
        start = now(device)
        call()
        times.append(now(device) - start)
    return min(times)
