"""What the device can do at best, measured: bytes per second in a copy, operations per second in a product."""

from experiments.measuring.peaks import Peaks as Measured
from experiments.measuring.peaks import cache_bytes
from experiments.measuring.peaks import measure_peaks as measure_roof

__all__ = ["Measured", "cache_bytes", "measure_roof"]
