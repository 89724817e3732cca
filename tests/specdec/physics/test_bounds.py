"""Roofs, utilization, and times that cannot be right."""

import pytest

from specdec.physics.bounds import Roof, Work, bandwidth_utilization, flop_utilization, suspicion

H100 = Roof(bandwidth=3.35e12, flops=989.4e12)


def test_ridges_and_what_can_be_attained() -> None:
    assert H100.ridge == pytest.approx(295.3, abs=0.05)
    assert Roof(3.35e12, 1979e12).ridge == pytest.approx(590.7, abs=0.05), "fp8, printed as 1,979 and as 1,987"
    assert Roof(2.0e12, 312e12).ridge == 156, "A100, rounded"
    assert H100.attainable(H100.ridge * 2) == H100.flops
    assert H100.attainable(H100.ridge / 2) == pytest.approx(H100.flops / 2)


def test_utilization() -> None:
    assert flop_utilization(300e12, 1.0, 990e12) == pytest.approx(0.30, abs=0.005)
    assert bandwidth_utilization(2.5e12, 1.0, 3.35e12) == pytest.approx(0.75, abs=0.005)


def test_times_below_the_bound_are_suspect() -> None:
    work = Work(140e9, 140e9)
    least = H100.least_seconds(work)
    assert suspicion(work, least, H100, cache_bytes=50 << 20) == ""
    assert suspicion(work, least * 0.96, H100, cache_bytes=50 << 20) == "", "the roof was measured, with noise"
    assert suspicion(work, least * 0.5, H100, cache_bytes=50 << 20).startswith("FASTER THAN PHYSICS (0.50")
    small = Work(100e6, 100e6)
    assert suspicion(small, 1e-6, H100, cache_bytes=50 << 20) == "served by caches"
    assert suspicion(small, 1e-6, H100, cache_bytes=0).startswith("FASTER THAN PHYSICS")
