"""Which row of the table of devices a GPU's own name means, and what is measured on the processor."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.measuring.peaks import Peaks, measure_peaks
from experiments.session.engines import better_peaks
from specdec.physics.devices import read_devices, row_of

DEVICES = read_devices()


def test_a_gpu_is_found_by_its_name_and_memory() -> None:
    for name, gigabytes, row in (
        ("NVIDIA H100 80GB HBM3", 80, "h100"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80gb"),
        ("NVIDIA A10", 24, "a10"),
        ("NVIDIA GeForce RTX 1234", 24, None),
    ):
        found = row_of(name, gigabytes * 1e9, DEVICES)
        assert (None if found is None else found.name) == row


def test_the_peaks_of_a_processor_are_numbers() -> None:
    peaks = measure_peaks(torch.device("cpu"), torch.float32, seconds=0.0, largest=1 << 20)
    assert min(peaks.copy, peaks.read, peaks.flops) > 0
    assert peaks.roof.bandwidth == max(peaks.copy, peaks.read)
    assert peaks.better(peaks) == peaks


def test_a_processor_that_widens_16_bits_is_measured_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a product of 16-bit numbers is emulated, forwards are widened, and would reach several times its rate."""
    best = "experiments.measuring.peaks._best"
    for widened, plain in ((4.0, 1.0), (1.0, 4.0)):  # seconds, of a processor that widens and of one that does not
        monkeypatch.setattr(best, lambda call, *of, w=widened, p=plain: w if call().dtype == torch.bfloat16 else p)
        found, usual = (
            measure_peaks(torch.device("cpu"), of, seconds=0, largest=1 << 20).flops
            for of in (torch.bfloat16, torch.float32)
        )
        assert (found == usual) is (widened > plain) and found >= usual


def test_peaks_of_a_busy_moment_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Peaks(copy=2e9, read=3e9, flops=5e9, cache_bytes=1)
    monkeypatch.setattr("experiments.session.engines.brief_peaks", lambda *of: quiet)
    target: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    before = {"copy": 4e9, "read": 1e9, "flops": 1e9, "cache_bytes": 1, "printed_flops": 9e9}
    found = better_peaks(before, target)
    assert found == {"copy": 4e9, "read": 3e9, "flops": 5e9, "cache_bytes": 1, "printed_flops": 9e9}
