"""Meters with counters and clocks that are made of lists or files; and engines that hold what was planned."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters import MedusaDrafter, MergedDrafter, ModelDrafter, NGramDrafter
from experiments.measuring.meters import Clocks, LoadMeter, drafter_cache, held_by
from experiments.measuring.peaks import Peaks, measure_peaks
from experiments.session.engines import better_peaks
from specdec import Drafter, Engine, Target
from specdec.physics.devices import read_devices, row_of
from tests.components import medusa_heads
from tests.models import tiny_model
from verifiers import RejectionVerifier

SIZES: Any = {"max_batch_size": 3, "max_length": 40}


def clocks(*readings: Clocks | None) -> Callable[[], Clocks | None]:
    return iter(readings).__next__


def test_load_in_cores() -> None:
    # Within 2 s, cores were busy for 5 s, of which this process had 3 s.
    meter = LoadMeter(clocks((10.0, 100.0, 7.0, 4), (12.0, 105.0, 10.0, 4)))
    assert meter.stop() == {"cores": 4, "own": 1.5, "others": 1.0}
    assert LoadMeter(clocks(None, None)).stop() == {}
    assert LoadMeter(clocks((1.0, 1.0, 1.0, 4), (1.0, 1.0, 1.0, 4))).stop() == {}, "no time has passed"
    here = LoadMeter()
    while not (load := here.stop()):
        pass
    assert load["cores"] >= 1


def test_what_engines_share_counts_once() -> None:
    target, small = Target(tiny_model()), tiny_model("llama_mqa_tied")
    engine = Engine(target, ModelDrafter(small, shape=[2, 2], kv_cache="int8"), RejectionVerifier(), **SIZES)
    alone = Engine(target, **SIZES)
    held = held_by([engine, engine, alone])
    assert held["kv"] == 2 * held_by([alone])["kv"], "an engine that is named twice counts once"
    for model, found in ((target.model, held["weights"]), (small, held["drafter"])):
        tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}.values()
        assert found == sum(t.numel() * t.element_size() for t in tensors), "a table that is shared counts once"
    assert held_by([alone, Engine(target, **SIZES)])["copies"] == sum(alone.runner.executor.copies().values())
    heads = medusa_heads(target.model)
    drafter = MergedDrafter(lookup=NGramDrafter(), model=MedusaDrafter(heads))
    held = held_by([Engine(target, drafter, RejectionVerifier(), **SIZES)])
    assert held["drafter"] == sum(p.numel() * p.element_size() for p in heads.parameters()) > 0
    assert held["drafter_kv"] == 0, "heads and parts of other drafters count"


def test_a_drafters_cache_is_its_own_and_has_its_largest_window() -> None:
    def cache(drafter: Drafter) -> dict[str, Any]:
        return drafter_cache(Engine(Target(tiny_model()), drafter, RejectionVerifier(), **SIZES))

    sliding, full = (ModelDrafter(tiny_model(f"mistral_{kind}"), 2) for kind in ("sliding", "full"))
    bytes_each = Engine(Target(tiny_model("mistral_full")), **SIZES).runner.cache.bytes_per_position
    assert cache(sliding) == {"bytes_per_position": bytes_each, "window": 7}
    assert cache(full) == {"bytes_per_position": bytes_each, "window": None}
    assert cache(NGramDrafter()) == {"bytes_per_position": 0, "window": None}


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


def test_a_processor_that_widens_16_bits_is_measured_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a product of 16-bit numbers is emulated, forwards are widened, and would reach several times its rate."""
    best = "experiments.measuring.peaks.shortest"
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
