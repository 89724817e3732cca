"""The least time that work can take on a device, and how close a measured time is to it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Roof:
    """What a device does at best.

    Attributes:
        bandwidth: Bytes per second between memory and processor.
        flops: Operations per second in matrix products.
    """

    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """Operations per byte above which products, not memory, are the limit."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """Return the operations per second that work with ``intensity`` operations per byte can reach."""
        return min(self.flops, intensity * self.bandwidth)

    def least_seconds(self, work: "Work") -> float:
        """Return the time that nobody can beat: memory and products at their best, one behind the other's back."""
        return max(work.bytes / self.bandwidth, work.flops / self.flops)


@dataclass(frozen=True)
class Work:
    """What a step has to do.

    Attributes:
        bytes: What must be moved between memory and processor.
        flops: Operations, where a multiplication and an addition are two.
    """

    bytes: float
    flops: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)


def bandwidth_utilization(moved: float, seconds: float, bandwidth: float) -> float:
    """Return the share of a bandwidth that moving so many bytes in so many seconds makes use of (MBU)."""
    return moved / (seconds * bandwidth)


def flop_utilization(flops: float, seconds: float, peak: float) -> float:
    """Return the share of the peak that so many operations in so many seconds make use of (MFU)."""
    return flops / (seconds * peak)


TOLERANCE = 0.05
"""How much faster than the bound a time may be before it is suspect: the roof itself is measured, with noise."""

CACHES = 4
"""Work of fewer bytes than this many times the caches may find much of its data there."""


def suspicion(work: Work, seconds: float, roof: Roof, *, cache_bytes: int) -> str:
    """Return why a time cannot be right, or is no statement about memory; empty if nothing speaks against it.

    Args:
        cache_bytes: The size of the device's last cache; 0 if it is unknown.
    """
    least = roof.least_seconds(work)
    if seconds >= least * (1 - TOLERANCE):
        return ""
    if work.bytes < CACHES * cache_bytes:
        return "served by caches"
    return f"FASTER THAN PHYSICS ({seconds / least:.2f} of the least time)"
