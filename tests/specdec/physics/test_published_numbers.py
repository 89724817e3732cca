"""Numbers that texts about serving print: each follows from the formulas, or is corrected here with the printed one.

They are those of ``docs/why-decoding-is-slow.md``, too. And the rates of devices, printed or of one's own; tokens per
round, best draft lengths and what limits them.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdec.drafting.policies.lengths import best_depths
from specdec.physics import speculation
from specdec.physics.capacity import Served, kv_bytes_per_position
from specdec.physics.costs import StepSize
from specdec.physics.devices import find_device, read_devices
from specdec.physics.precision import Precision, bytes_of
from specdec.physics.rounds import LLAMA_8B_H100 as FITTED
from specdec.physics.rounds import DraftModel, RoofRounds, TimedRounds, round_seconds
from specdec.physics.shape import Layer, ModelShape, experts_hit, nominal
from specdec.physics.speculation import best_length, break_even_batch, chain_tokens, speedup_of, target_efficiency
from specdec.physics.work import Roof, StepWork, prefill_work, step_work
from tests.public_models import DEEPSEEK_V3, LLAMA_8B, ROUND_8B, ROUND_70B, SHAPES

H100 = Roof(bandwidth=3.35e12, flops=989.4e12)
A100 = Roof(bandwidth=2.0e12, flops=312e12)
HALF, INT4 = Precision(), Precision(weights=0.5)
PREFILL, SHORT = (prefill_work(ROUND_70B, HALF, tokens=tokens) for tokens in (4096, 256))
KV_8B = kv_bytes_per_position(ROUND_8B, HALF)
SERVED_8B = Served(shape=LLAMA_8B, precision=HALF, activations=0.0, overhead=2e9)
SERVED_70B = Served(shape=ROUND_70B, precision=HALF, activations=0.0)


def decode(batch: int = 1, context: float = 0, precision: Precision = HALF) -> StepWork:
    return step_work(ROUND_70B, precision, batch=batch, context=context)


def seconds(work: StepWork, roof: Roof = H100) -> float:
    """Of the products with weights alone, as texts count."""
    return roof.least_seconds(work.linear)


NUMBERS = {
    "prefill, FLOP": (lambda: PREFILL.linear_flops, 5.734e14),
    "prefill, FLOP per byte (printed as 4,093 = 573 / 0.14)": (lambda: PREFILL.linear.intensity, 4096),
    "prefill, s": (lambda: seconds(PREFILL), 0.5795),
    "decode, ms": (lambda: 1000 * seconds(decode()), 41.791),
    "its cache's share": (lambda: decode(1, 4608).kv_read_bytes / decode(1, 4608).total.bytes, 0.01067),
    "decode behind 4,608 tokens, ms": (lambda: 1000 * H100.least_seconds(decode(1, 4608).total), 42.24),
    "int4, bytes": (lambda: decode(precision=INT4).weight_bytes, 35e9),
    "decode, FLOP": (lambda: decode().linear_flops, 1.4e11),
    "32 rows, tokens/s": (lambda: 32 / seconds(decode(32)), 765.7),
    "logits of 64 x 9, bytes": (lambda: step_work(LLAMA_8B, HALF, batch=64, context=0, drafted=8).logit_bytes, 295.5e6),
    "attention, FLOP per token and position": (lambda: ROUND_70B.pair_flops, 2_621_440),
    "attention of the prefill, FLOP": (lambda: PREFILL.attention_flops, 22.0e12),
    "ridge of an A100": (lambda: A100.ridge, 156),
    "8B on an A100, ms": (lambda: 1000 * seconds(step_work(ROUND_8B, HALF, batch=1, context=0), A100), 8),
    "utilization of a token (printed as 0.005 %)": (lambda: 16e9 * 125 / A100.flops, 0.00641),
    "int4 with factors (printed as 0.53 with zero points)": (lambda: bytes_of("int4") + 2 / 64, 0.53125),
    "int4 with zero points": (lambda: bytes_of("int4") + 4 / 64, 0.5625),
    "KV of latents": (lambda: kv_bytes_per_position(DEEPSEEK_V3, HALF), 70_272),
    "Mistral-7B, 4 rows of 4,096 (printed as 8 GB)": (lambda: 4 * 4096 * KV_8B, 2 << 30),
    "70B on one device (printed as 26 rows)": (lambda: SERVED_70B.most_rows(80e9, length=4608), 0),
    "70B on two devices, rows": (lambda: SERVED_70B.most_rows(160e9, length=4608), 13),
    "8B, slots of 4,096": (lambda: SERVED_8B.most_rows(0.9 * 80e9, length=4096), 100),
    "8B, pages": (lambda: (0.9 * 80e9 - SERVED_8B.memory(rows=0, length=0).total) // (KV_8B * (1024 + 1 + 7.5)), 398),
    "price of a million tokens at 24 tokens/s": (lambda: speculation.price_per_million(2.0, 24), 23.15),
    "latency counts the first token once": (lambda: speculation.latency(0.5, 0.05, 101), 5.5),
}


def test_published() -> None:
    assert PREFILL.bound(H100) == "compute" and SHORT.bound(H100) == "memory"
    found = {name: compute() for name, (compute, _) in NUMBERS.items()}
    assert found == pytest.approx({name: expected for name, (_, expected) in NUMBERS.items()}, rel=1e-3)


def test_the_cache_of_a_batch_is_not_negligible() -> None:
    """Printed without the cache: 41.8 ms for both."""
    for batch, milliseconds in ((32, 56.2), (128, 99.5)):
        work = decode(batch, 4608)
        found = 1000 * (work.weight_bytes + work.kv_read_bytes) / H100.bandwidth
        assert found == pytest.approx(milliseconds, abs=0.05)


def test_experts_that_are_hit_and_target_efficiency_of_dense_models_and_mixtures() -> None:
    """Verifying three drafted tokens behind 1,024 positions on an H100: cheapest for few rows, or in the middle."""
    for tokens, *hit in ((1, 2, 8, 8), (4, 5.47, 29.1, 30.5), (8, 7.2, 51.6, 57.4), (32, 8, 111.8, 163.3)):
        found = [experts_hit(tokens, experts=e, chosen=k) for e, k in ((8, 2), (128, 8), (256, 8))]
        assert found == pytest.approx(hit, abs=0.05)
    for name, cells in (
        ("llama-3.1-8b", "1.00 1.00 0.99 0.75 0.55"),
        ("mixtral-8x7b", "0.40 0.90 1.00 1.00 0.66"),
        ("qwen3-30b-a3b", "0.39 0.49 0.88 0.99 0.99"),
    ):
        cost = RoofRounds(shape=SHAPES[name], precision=HALF, roof=H100)
        assert target_efficiency(cost, batch=64, drafted=0, context=1024) == 1
        found = [target_efficiency(cost, batch=batch, drafted=3, context=1024) for batch in (1, 8, 32, 128, 512)]
        assert [f"{value:.2f}" for value in found] == cells.split()


ROW = "tiny:\n  memory: 1e9\n  bandwidth: 2.0e9\n  flops: {float32: 4e9}\n  source: here\n"


def test_the_table_that_ships() -> None:
    devices = read_devices()
    assert set(devices) >= {"h100", "h200", "b200", "a100-40gb", "a100-80gb", "l40s", "a10", "rtx4090", "mi300x"}
    for device in devices.values():
        assert len(device.source) > 20 and device.memory >= 1e10 and device.cache > 0, device
        assert 20 < device.roof("bfloat16").ridge < 500, f"{device.name}: dense rates, not those with sparsity"
        assert device.flops["float16"] == device.flops["bfloat16"]
        if "fp8" in device.flops:
            assert device.flops["fp8"] == pytest.approx(2 * device.flops["float16"], rel=0.02)
    ridges = (("h100", "float16", 295.3), ("h100", "fp8", 590.7), ("a100-40gb", "float16", 200.6))
    for name, dtype, ridge in (*ridges, ("a100-80gb", "float16", 153.0)):
        assert devices[name].roof(dtype).ridge == pytest.approx(ridge, abs=0.05)
    chip = devices["h100"].chip
    assert chip is not None and chip["processors"] == 132 and chip["link"] == 900e9
    assert chip["processors"] * chip["registers"] == chip["processors"] * chip["shared"] == 33 << 20, "33 MiB of each"
    assert devices["mi300x"].chip is None


def test_names_may_be_written_in_other_ways_and_near_ones_are_offered() -> None:
    devices = read_devices()
    for name, found in (("h100", "h100"), ("H100", "h100"), ("A100_80GB", "a100-80gb"), ("a100 80gb", "a100-80gb")):
        assert find_device(name, devices).name == found
    for name, said in (("h10", "mean h100"), ("a100", "a100-40gb or a100-80gb"), ("4090", "rtx4090"), ("tpu", "h100")):
        with pytest.raises(ValueError, match=said):
            find_device(name, devices)


def test_a_row_of_ones_own_and_rows_that_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(ROW + "  measured: {bandwidth: 1.5e9}\n")
    device = read_devices(path)["tiny"]
    assert device.roof("float32").bandwidth == 2e9, "printed"
    assert device.roof("float32", measured=True).bandwidth == 1.5e9
    assert device.roof("float32", measured=True).flops == 4e9, "not measured, so printed"
    with pytest.raises(ValueError, match="does not compute in fp8: give one of float32"):
        device.roof("fp8")
    for text, said in (
        ("", "has no rows"),
        ("a: [", "cannot be read"),
        (ROW.replace("  bandwidth: 2.0e9\n", ""), "tiny has no bandwidth"),
        (ROW.replace("2.0e9", "fast"), "tiny.bandwidth='fast'"),
        (ROW.replace("float32", "float8"), "give numbers by name, out of float32"),
        (ROW + "  colour: red\n", "'colour'"),
        (ROW + "  chip: {processors: 3, registers: 0, shared: 1}\n", "tiny.chip.registers=0"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_devices(path)


def test_tokens_per_round_by_enumeration_and_with_a_rate_per_position() -> None:
    for rate, length in ((0.8, 4), (0.5, 7), (0.0, 3), (0.9, 1), (1.0, 2), (0.5, 0)):
        expected = sum(
            rate ** sum(flags) * (1 - rate) ** (length - sum(flags)) * (1 + len(list(itertools.takewhile(bool, flags))))
            for flags in itertools.product((True, False), repeat=length)
        )
        assert chain_tokens(rate, length) == pytest.approx(expected)
    assert chain_tokens([0.5, 0.2], 1) == pytest.approx(1.5)
    assert chain_tokens([0.5, 0.2], 3) == pytest.approx(1 + 0.5 + 0.1 + 0.02), "the last rate goes on"


def test_best_length_where_verifying_is_free() -> None:
    for rate, cost, length, best in ((0.6, 0.1, 3, 1.674), (0.8, 0.05, 8, 3.092), (0.9, 0.02, 19, 6.365)):
        free = TimedRounds(nodes=[1, 31], seconds={1: [1.0, 1.0]}, share=cost)
        found = best_length(free, rate, batch=1, context=0, longest=30)
        assert (found.drafted, found.speedup) == (length, pytest.approx(best, abs=5e-4))


BATCHES = (1, 8, 32, 64, 128, 256, 512)


@pytest.mark.parametrize(
    ("rate", "context", "batches", "cells"),
    [
        (0.5, 1024, BATCHES, "7/1.51 4/1.41 3/1.27 2/1.20 2/1.14 1/1.10 1/1.09"),
        (0.7, 1024, BATCHES, "8/2.42 8/2.18 5/1.80 4/1.62 3/1.47 3/1.36 2/1.31"),
        (0.8, 1024, BATCHES, "8/3.27 8/2.95 7/2.33 6/2.01 4/1.76 4/1.60 3/1.51"),
        (0.9, 1024, BATCHES, "8/4.63 8/4.17 8/3.29 8/2.75 7/2.30 6/2.01 5/1.84"),
        (0.7, 256, (1, 8, 32, 128, 512), "8/2.42 8/2.16 5/1.73 3/1.29 1/1.07"),
        (0.7, 4096, (1, 8, 32, 128, 512), "8/2.43 8/2.25 6/2.02 4/1.87 4/1.83"),
        (0.7, 16_384, (1, 8, 32, 128, 512), "8/2.46 8/2.44 7/2.43 7/2.44 7/2.44"),
    ],
)
def test_best_length_under_load_and_by_context(rate: float, context: int, batches: tuple[int, ...], cells: str) -> None:
    """The best lengths and their speedups; and what a policy chooses that knows the rate, row by row."""
    found = [best_length(FITTED, rate, batch=batch, context=context, longest=8) for batch in batches]
    assert [f"{each.drafted}/{each.speedup:.2f}" for each in found] == cells.split()
    for batch, best in zip(batches, found, strict=True):
        survival = np.tile(rate ** np.arange(1, 9), (batch, 1))
        assert set(best_depths(survival, FITTED, float(batch * context)).tolist()) == {best.drafted}


def test_published_costs_are_one_formula() -> None:
    """Rows may have drafts of different lengths, and pieces of prompts cost what other tokens do."""
    (seconds,) = FITTED.ragged(32, 32 * 900.0, drafted=np.array([128]), deepest=np.array([8]))
    assert seconds == pytest.approx(round_seconds(FITTED, batch=32, drafted=4, context=900.0))
    chunk = FITTED.prefill_seconds(StepSize(tokens=512, positions=1000, pairs=0))
    assert chunk == pytest.approx(5.88590713e-3 + 512 * 2.10103129e-5 + 1000 * 3.92645679e-8)


def test_the_batch_up_to_which_it_pays() -> None:
    batch = break_even_batch(FITTED, 0.5, drafted=3, context=1024)
    assert batch is not None and 256 < batch < 512
    assert speedup_of(FITTED, 0.5, batch=batch, drafted=3, context=1024) >= 1
    assert speedup_of(FITTED, 0.5, batch=batch + 1, drafted=3, context=1024) < 1
    assert break_even_batch(FITTED, 0.5, drafted=3, context=16_384) is None, "long contexts pay at any batch"


def windowed(shape: ModelShape) -> ModelShape:
    """The same with a window of 1,024 positions in every other layer."""
    parts = [layer.attention for layer in shape.layers if layer.attention is not None]
    windows = [replace(part, window=1024 if index % 2 else None) for index, part in enumerate(parts)]
    return replace(shape, layers=tuple(Layer(attention=part) for part in windows))


def test_critical_context() -> None:
    for shape, drafted, context in (
        (ROUND_70B, 0, 1487),
        (ROUND_70B, 3, 6490),
        (ROUND_8B, 0, 420),
        (ROUND_8B, 3, 1748),
        (windowed(ROUND_70B), 0, 2 * 1487 - 1024),
        (windowed(ROUND_70B), 3, 2 * 6490 - 1024),
    ):
        found = speculation.critical_context(shape, HALF, ridge=H100.ridge, drafted=drafted)
        assert found is not None and found == pytest.approx(context, abs=1.5)
        step = step_work(shape, HALF, batch=1, context=found, drafted=drafted)
        # Operations of a row's tokens over what it reads, without the weights.
        rate = (step.attention_flops + 2 * (drafted + 1) * shape.active_weights) / step.kv_read_bytes
        assert rate == pytest.approx(H100.ridge, rel=2e-3)
    # Operations per byte of decode's attention with a key for every head, one for 8 heads, and latents.
    multi_head = nominal(32, layers=32, heads=32, kv_heads=32)
    for shape, intensity in ((multi_head, 1.0), (ROUND_70B, 8.0), (DEEPSEEK_V3, 241.8)):
        assert shape.pair_flops / (2.0 * shape.kept_per_position) == pytest.approx(intensity, abs=0.05)


def test_drafting_one_by_one_costs_a_forward_each() -> None:
    model = DraftModel(shape=nominal(32_000_000, layers=1, heads=32, kv_heads=8), precision=HALF)
    chained = RoofRounds(shape=LLAMA_8B, precision=HALF, roof=H100, drafter=model, overhead=1e-4)
    at_once = replace(chained, drafter=replace(model, at_once=True))
    options = {"batch": 1, "context": 0}
    assert chained.draft(drafted=0, **options) == 0
    assert chained.draft(drafted=4, **options) == pytest.approx(4 * chained.draft(drafted=1, **options), rel=1e-3)
    assert at_once.draft(drafted=4, **options) == pytest.approx(at_once.draft(drafted=1, **options), rel=1e-3)
    whole = round_seconds(chained, batch=1, drafted=4, context=0)
    assert whole == chained.verify(drafted=4, **options) + chained.draft(drafted=4, **options)
