"""Numbers that texts about serving print: each follows from the formulas, or is corrected here with the printed one.

``tests/experiments/bench/test_chapter.py`` compares many more, where the chapter shows them.
"""

from collections.abc import Callable

import pytest

from experiments.bench.chapter.models import DEEPSEEK_V3, LLAMA_8B, ROUND_7B, ROUND_8B, ROUND_70B
from specdec.physics.bounds import Roof, flop_utilization
from specdec.physics.capacity import Served, kv_bytes_per_position, weight_bytes
from specdec.physics.precision import Precision, bytes_of
from specdec.physics.serving import all_reduce_seconds, hours_per_million, latency, load_seconds, price_per_million
from specdec.physics.shape import Attention, Layer, ModelShape, experts_hit, nominal
from specdec.physics.work import StepWork, prefill_work, step_work

H100 = Roof(bandwidth=3.35e12, flops=989.4e12)
A100 = Roof(bandwidth=2.0e12, flops=312e12)
HALF, INT4 = Precision(), Precision(weights=0.5)
PREFILL, SHORT = (prefill_work(ROUND_70B, HALF, tokens=tokens) for tokens in (4096, 256))
KV_70B, KV_8B = (kv_bytes_per_position(shape, HALF) for shape in (ROUND_70B, ROUND_8B))
SERVED_8B = Served(shape=LLAMA_8B, precision=HALF, activations=0.0, overhead=2e9)
SERVED_70B = Served(shape=ROUND_70B, precision=HALF, activations=0.0)


def decode(batch: int = 1, context: float = 0, precision: Precision = HALF) -> StepWork:
    return step_work(ROUND_70B, precision, batch=batch, context=context)


def seconds(work: StepWork, roof: Roof = H100) -> float:
    """Of the products with weights alone, as texts count."""
    return roof.least_seconds(work.linear)


def of_8b(tokens: int) -> float:
    return seconds(prefill_work(ROUND_8B, HALF, tokens=tokens), A100)


NUMBERS: dict[str, tuple[Callable[[], float], float]] = {
    "weights of 70B": (lambda: weight_bytes(ROUND_70B, HALF), 140e9),
    "loading them, s": (lambda: load_seconds(140e9, 7e9), 20),
    "KV of a token": (lambda: KV_70B, 327_680),
    "a step writes one position": (lambda: decode(1, 4096).kv_write_bytes, 327_680),
    "KV of 4,096 tokens": (lambda: 4096 * KV_70B, 1.342e9),
    "KV of 100,000 tokens": (lambda: 100_000 * KV_70B, 32.77e9),
    "prefill, FLOP": (lambda: PREFILL.linear_flops, 5.734e14),
    "prefill, FLOP per byte (printed as 4,093 = 573 / 0.14)": (lambda: PREFILL.linear.intensity, 4096),
    "prefill, s": (lambda: seconds(PREFILL), 0.5795),
    "prefill at an MFU of 70 %, s": (lambda: seconds(PREFILL) / 0.7, 0.828),
    "short prefill, FLOP per byte": (lambda: SHORT.linear.intensity, 256),
    "decode, FLOP": (lambda: decode().linear_flops, 140e9),
    "decode, ms": (lambda: 1000 * seconds(decode()), 41.791),
    "decode, tokens/s": (lambda: 1 / seconds(decode()), 23.93),
    "decode behind 4,608 tokens, bytes": (lambda: decode(1, 4608).total.bytes, 141.5e9),
    "its cache's share": (lambda: decode(1, 4608).kv_read_bytes / decode(1, 4608).total.bytes, 0.01067),
    "decode behind 4,608 tokens, ms": (lambda: 1000 * decode(1, 4608).least_seconds(H100), 42.24),
    "int4, bytes": (lambda: decode(precision=INT4).weight_bytes, 35e9),
    "int4, ms": (lambda: 1000 * seconds(decode(precision=INT4)), 10.448),
    "int4, FLOP per byte": (lambda: decode(precision=INT4).linear.intensity, 4),
    "32 rows, FLOP": (lambda: decode(32).linear_flops, 4.48e12),
    "32 rows, tokens/s": (lambda: 32 / seconds(decode(32)), 765.7),
    "128 rows, tokens/s (printed as 3,072, of the rounded 24)": (lambda: 128 / seconds(decode(128)), 3063),
    "prefill over decode": (lambda: 4096 * seconds(decode()) / seconds(PREFILL), 295.3),
    "attention, FLOP per token and position": (lambda: ROUND_70B.pair_flops, 2_621_440),
    "context where it equals the products": (lambda: 140e9 / ROUND_70B.pair_flops, 53_406),
    "attention of the prefill, FLOP": (lambda: PREFILL.attention_flops, 22.0e12),
    "8B on an A100, ms": (lambda: 1000 * seconds(step_work(ROUND_8B, HALF, batch=1, context=0), A100), 8),
    "1,000 tokens of its prompt, ms": (lambda: 1000 * of_8b(1000), 51.28),
    "utilization of a token (printed as 0.005 %)": (lambda: flop_utilization(16e9, 1 / 125, 312e12), 0.00641),
    "Llama-2-7B, 2,048 tokens": (lambda: 2048 * kv_bytes_per_position(ROUND_7B, HALF), 1 << 30),
    "int4 with factors (printed as 0.53 with zero points)": (
        lambda: Precision.of(weights="int4", group=64).weights,
        0.53125,
    ),
    "int4 with zero points": (lambda: Precision.of(weights="int4", group=64, zero_points=True).weights, 0.5625),
    "KV of Llama-3.1-8B": (lambda: kv_bytes_per_position(LLAMA_8B, HALF), 131_072),
    "KV of latents": (lambda: kv_bytes_per_position(DEEPSEEK_V3, HALF), 70_272),
    "Mistral-7B, 4 rows of 4,096 (printed as 8 GB)": (lambda: 4 * 4096 * KV_8B, 2 << 30),
    "70B on one device (printed as 26 rows)": (lambda: SERVED_70B.most_rows(80e9, length=4608), 0),
    "70B on two devices, rows": (lambda: SERVED_70B.most_rows(160e9, length=4608), 13),
    "8B, slots of 4,096": (lambda: SERVED_8B.most_rows(0.9 * 80e9, length=4096), 100),
    "8B, slots of 32,768": (lambda: SERVED_8B.most_rows(0.9 * 80e9, length=32_768), 12),
    "8B, pages": (lambda: SERVED_8B.most_paged_rows(0.9 * 80e9, mean_length=1024), 398),
    "price of a million tokens at 24 tokens/s": (lambda: price_per_million(2.0, 24), 23.15),
    "at 1,700 tokens/s and 1.40 per hour": (lambda: price_per_million(1.4, 1700), 0.2288),
    "hours of a million tokens": (lambda: hours_per_million(766), 0.3626),
    "latency counts the first token once": (lambda: latency(0.5, 0.05, 101), 5.5),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_published(name: str) -> None:
    compute, expected = NUMBERS[name]
    assert compute() == pytest.approx(expected, rel=1e-3)


def test_what_bounds_a_forward() -> None:
    assert PREFILL.bound(H100) == "compute" and SHORT.bound(H100) == "memory"
    for batch in (1, 8, 32, 128, 512):
        assert decode(batch).linear.intensity == batch
        assert (batch < H100.ridge) == (batch < 512)


@pytest.mark.parametrize(("batch", "milliseconds"), [(32, 56.2), (128, 99.5)])
def test_the_cache_of_a_batch_is_not_negligible(batch: int, milliseconds: float) -> None:
    """Printed without the cache: 41.8 ms for both."""
    work = decode(batch, 4608)
    assert 1000 * (work.weight_bytes + work.kv_read_bytes) / H100.bandwidth == pytest.approx(milliseconds, abs=0.05)


def test_bytes_per_parameter() -> None:
    sizes = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1, "int4": 0.5}
    assert {name: bytes_of(name) for name in sizes} == sizes


@pytest.mark.parametrize(
    ("tokens", "hit"),
    [(1, (2, 8, 8)), (4, (5.47, 29.1, 30.5)), (8, (7.2, 51.6, 57.4)), (32, (8, 111.8, 163.3))],
)
def test_experts_that_are_hit(tokens: int, hit: tuple[float, ...]) -> None:
    found = [experts_hit(tokens, experts=e, chosen=k) for e, k in ((8, 2), (128, 8), (256, 8))]
    assert found == pytest.approx(hit, abs=0.05)


def test_matrices_of_prefill_and_decode() -> None:
    """[1000, 4096] x [4096, 4096] against [1, 4096] x [4096, 4096]: 1,000 times the operations, the same weights."""
    attention = Attention.grouped(weights=4096 * 4096, heads=32, kv_heads=32, head_dim=128)
    sizes = {"hidden": 0, "vocab": 0, "table_weights": 0, "output_weights": 0}
    one = ModelShape(kind="one matrix", layers=(Layer(attention=attention),), **sizes)
    wide, narrow = prefill_work(one, HALF, tokens=1000), step_work(one, HALF, batch=1, context=0)
    assert (wide.linear_flops, narrow.linear_flops) == (2 * 1000 * 4096**2, 2 * 4096**2)
    assert wide.weight_bytes == narrow.weight_bytes


def test_logits_take_memory() -> None:
    """64 rows with 8 drafted nodes, 128,000 tokens, float32."""
    shape = ModelShape(kind="", hidden=0, vocab=128_000, layers=(), table_weights=0, output_weights=0)
    assert step_work(shape, HALF, batch=64, context=0, drafted=8).logit_bytes == pytest.approx(295e6, rel=1e-3)


def test_a_model_on_two_devices_sums_in_every_layer() -> None:
    """70B on two H100: 20.9 ms of weights each, and 160 sums."""
    one = all_reduce_seconds(devices=2, tokens=8, hidden=8192, number_bytes=2, bandwidth=450e9, latency=5e-6)
    assert one == pytest.approx(8 * 8192 * 2 / 450e9 + 5e-6)
    assert all_reduce_seconds(devices=1, tokens=8, hidden=8192, number_bytes=2, bandwidth=450e9) == 0


def test_round_models_have_exactly_so_many_weights() -> None:
    shape = nominal(640, layers=4, heads=2, kv_heads=1, head_dim=8)
    assert shape.weights == shape.active_weights == 640 and len(shape.layers) == 4
    with pytest.raises(ValueError, match="641 parameters are no multiple of 4 layers"):
        nominal(641, layers=4, heads=2, kv_heads=1)
