"""The least time that work can take on a device."""

from dataclasses import dataclass

TOLERANCE = 0.05
"""How much faster than the bound a time may be before it is suspect: the roof itself is measured, with noise."""
CACHES = 4
"""Work of fewer bytes than this many times the caches may find much of its data there."""


@dataclass(frozen=True)
class Work:
    """Bytes that must be moved between memory and processor, and operations (a multiplication is one)."""

    bytes: float
    flops: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Roof:
    """The bytes per second that a device moves at best, and the operations per second of its matrix products."""

    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """Operations per byte above which products, not memory, are the limit."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """Return the operations per second that work with ``intensity`` operations per byte can reach."""
        return min(self.flops, intensity * self.bandwidth)

    def least_seconds(self, work: Work) -> float:
        """Return the time that nobody can beat: memory and products at their best, one behind the other's back."""
        return max(work.bytes / self.bandwidth, work.flops / self.flops)
