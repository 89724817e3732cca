"""Roofs, utilization, and times that cannot be right."""

import pytest

from specdec.physics.bounds import Roof, Work, bandwidth_utilization, flop_utilization, suspicion

H100 = Roof(bandwidth=3.35e12, flops=989.4e12)


@pytest.mark.parametrize(
    ("roof", "ridge"),
    [
        pytest.param(H100, 295.3, id="H100"),
        # fp8 is printed as 1,979 and as 1,987
        pytest.param(Roof(3.35e12, 1979e12), 590.7, id="H100 fp8"),
        pytest.param(Roof(2.0e12, 312e12), 156.0, id="A100, rounded"),
        pytest.param(Roof(1.555e12, 312e12), 200.6, id="A100 40 GB"),
        pytest.param(Roof(2.039e12, 312e12), 153.0, id="A100 80 GB"),
    ],
)
def test_ridges_of_devices(roof: Roof, ridge: float) -> None:
    assert roof.ridge == pytest.approx(ridge, abs=0.05)
    assert roof.attainable(roof.ridge * 2) == roof.flops
    assert roof.attainable(roof.ridge / 2) == pytest.approx(roof.flops / 2)


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
