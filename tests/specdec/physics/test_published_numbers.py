"""Numbers that texts about serving print: each follows from the formulas, or is corrected here with the printed one."""

import pytest

from experiments.bench.chapter.models import DEEPSEEK_V3, LLAMA_8B, ROUND_8B, ROUND_70B
from specdec.physics.bounds import Roof
from specdec.physics.capacity import Served, kv_bytes_per_position, weight_bytes
from specdec.physics.precision import Precision, bytes_of
from specdec.physics.serving import (
    all_reduce_seconds,
    hours_per_million,
    latency,
    load_seconds,
    price_per_million,
)
from specdec.physics.shape import Attention, Layer, ModelShape, experts_hit, nominal
from specdec.physics.work import StepWork, prefill_work, step_work

H100 = Roof(bandwidth=3.35e12, flops=989.4e12)
A100 = Roof(bandwidth=2.0e12, flops=312e12)
HALF = Precision()
INT4 = Precision(weights=0.5)


def decode(batch: int, context: float = 0, precision: Precision = HALF) -> StepWork:
    return step_work(ROUND_70B, precision, batch=batch, context=context)


def test_weights_of_70b_and_their_loading() -> None:
    assert weight_bytes(ROUND_70B, HALF) == 140e9
    assert load_seconds(140e9, 7e9) == 20


@pytest.mark.parametrize(("tokens", "size"), [(1, 327_680), (4096, 1.34e9), (4608, 1.51e9), (100_000, 32.8e9)])
def test_kv_cache_of_70b(tokens: int, size: float) -> None:
    assert kv_bytes_per_position(ROUND_70B, HALF) * tokens == pytest.approx(size, rel=2e-3)
    assert decode(1, 4096).kv_write_bytes == 327_680, "a step writes one position"


def test_prefill_of_70b() -> None:
    work = prefill_work(ROUND_70B, HALF, tokens=4096)
    assert work.linear_flops == pytest.approx(5.734e14, rel=1e-3)
    assert work.linear.intensity == pytest.approx(4096), "printed as 4,093 = 573 / 0.14"
    assert work.linear.intensity / H100.ridge > 13
    seconds = H100.least_seconds(work.linear)
    assert seconds == pytest.approx(0.5795, abs=1e-4)
    assert [seconds / used for used in (0.5, 0.7)] == pytest.approx([1.16, 0.83], abs=5e-3), "0.8 to 1.2 s"
    assert work.bound(H100) == "compute"


def test_a_short_prefill_is_bound_by_memory() -> None:
    work = prefill_work(ROUND_70B, HALF, tokens=256)
    assert work.linear.intensity == 256
    assert work.bound(H100) == "memory"


def test_decoding_70b_one_row() -> None:
    work = decode(1).linear
    assert work.flops == 140e9 and work.intensity == 1
    assert 1000 * H100.least_seconds(work) == pytest.approx(41.791, abs=1e-3)
    assert 1 / H100.least_seconds(work) == pytest.approx(23.93, abs=5e-3)


def test_decoding_70b_behind_4608_tokens() -> None:
    work = decode(1, 4608)
    assert work.total.bytes == pytest.approx(141.5e9, rel=1e-3)
    assert work.kv_read_bytes / work.total.bytes == pytest.approx(0.0107, abs=5e-5)
    assert 1000 * work.least_seconds(H100) == pytest.approx(42.24, abs=5e-3)


def test_decoding_70b_in_int4() -> None:
    work = decode(1, precision=INT4)
    assert work.weight_bytes == 35e9 and work.linear.intensity == 4
    assert 1000 * H100.least_seconds(work.linear) == pytest.approx(10.448, abs=1e-3)


@pytest.mark.parametrize(
    ("batch", "tflop", "rate"),
    # 128 rows are printed with 3,072 tokens/s, which is 128 times the rounded 24.
    [(1, 0.14, 23.93), (32, 4.48, 765.7), (128, 17.92, 3063)],
)
def test_batches_of_70b_without_their_cache(batch: int, tflop: float, rate: float) -> None:
    work = decode(batch).linear
    assert work.flops == pytest.approx(tflop * 1e12)
    assert batch / H100.least_seconds(work) == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(
    ("batch", "bound"), [(1, "memory"), (8, "memory"), (32, "memory"), (128, "memory"), (512, "compute")]
)
def test_intensity_is_the_batch(batch: int, bound: str) -> None:
    work = decode(batch)
    assert work.linear.intensity == batch
    assert ("memory" if work.linear.intensity < H100.ridge else "compute") == bound
    assert H100.ridge == pytest.approx(295.3, abs=0.05), "in between"


@pytest.mark.parametrize(("batch", "milliseconds"), [(32, 56.2), (128, 99.5)])
def test_the_cache_of_a_batch_is_not_negligible(batch: int, milliseconds: float) -> None:
    """Printed without the cache: 41.8 ms for both."""
    work = decode(batch, 4608)
    assert 1000 * (work.weight_bytes + work.kv_read_bytes) / H100.bandwidth == pytest.approx(milliseconds, abs=0.05)


def test_prefill_and_decode_differ_by_the_ridge() -> None:
    prefill = 4096 / H100.least_seconds(prefill_work(ROUND_70B, HALF, tokens=4096).linear)
    plain = 1 / H100.least_seconds(decode(1).linear)
    assert prefill == pytest.approx(7068, rel=1e-3)
    assert prefill / plain == pytest.approx(295, rel=2e-3), "about 300 times"


def test_attention_of_70b() -> None:
    """2,621,440 operations per token of context; as many as the 140 GFLOP of the products at 53,406 tokens."""
    assert ROUND_70B.pair_flops == 2_621_440
    assert ROUND_70B.pair_flops * 4096 == pytest.approx(10.7e9, rel=5e-3)
    assert ROUND_70B.pair_flops * 4096 / 140e9 == pytest.approx(0.077, abs=5e-4)
    assert 140e9 / ROUND_70B.pair_flops == pytest.approx(53_406, abs=1)
    prefill = prefill_work(ROUND_70B, HALF, tokens=4096)
    assert prefill.attention_flops == pytest.approx(22.0e12, rel=2e-3)
    assert prefill.attention_flops / prefill.linear_flops == pytest.approx(0.038, abs=5e-4)


def test_8b_on_an_a100() -> None:
    work = step_work(ROUND_8B, HALF, batch=1, context=0)
    seconds = A100.least_seconds(work.linear)
    assert work.weight_bytes == 16e9 and seconds == pytest.approx(8e-3) and 1 / seconds == pytest.approx(125)
    assert 100 * work.weight_bytes == 1.6e12, "read for 100 tokens"


def test_a_request_of_1000_and_100_tokens_on_an_a100() -> None:
    prefill = A100.least_seconds(prefill_work(ROUND_8B, HALF, tokens=1000).linear)
    decoding = 100 * A100.least_seconds(step_work(ROUND_8B, HALF, batch=1, context=0).linear)
    assert 1000 * prefill == pytest.approx(51.28, abs=5e-3)
    assert prefill + decoding == pytest.approx(0.851, abs=5e-4)
    assert prefill / (prefill + decoding) == pytest.approx(0.06, abs=5e-3)


def test_llama_2_7b() -> None:
    shape = nominal(7_000_000_000, layers=32, heads=32, kv_heads=32)
    assert kv_bytes_per_position(shape, HALF) == 524_288
    cache = 2048 * kv_bytes_per_position(shape, HALF)
    assert cache / 32 == 33_554_432 and cache == 1 << 30
    assert weight_bytes(shape, HALF) == 14e9
    assert 15.5e9 < weight_bytes(shape, HALF) + cache + 0.5e9 < weight_bytes(shape, HALF) + cache + 1e9 < 17e9


@pytest.mark.parametrize(
    ("name", "size"),
    [("float32", 4), ("float16", 2), ("bfloat16", 2), ("int8", 1), ("fp8", 1), ("int4", 0.5)],
)
def test_bytes_per_parameter(name: str, size: float) -> None:
    assert bytes_of(name) == size


def test_factors_of_groups_take_memory() -> None:
    """0.53 bytes per weight are printed for factors *and* zero points of 16 bits; that is the factors alone."""
    assert Precision.of(weights="int4", group=64).weights == 0.53125
    assert Precision.of(weights="int4", group=64, zero_points=True).weights == 0.5625


@pytest.mark.parametrize(
    ("layers", "heads", "kv_heads", "size"),
    [
        pytest.param(32, 32, 8, 131_072, id="Llama-3.1-8B"),
        pytest.param(36, 32, 8, 147_456, id="Qwen3-8B"),
        pytest.param(32, 32, 1, 16_384, id="one head for all"),
    ],
)
def test_kv_bytes_per_token(layers: int, heads: int, kv_heads: int, size: int) -> None:
    assert kv_bytes_per_position(nominal(layers, layers=layers, heads=heads, kv_heads=kv_heads), HALF) == size


def test_latents_are_much_smaller_than_the_heads_that_they_stand_for() -> None:
    assert kv_bytes_per_position(DEEPSEEK_V3, HALF) == 70_272
    equivalent = Attention.grouped(weights=0, heads=128, kv_heads=128, head_dim=128)
    assert 61 * equivalent.kept * 2 == 3_997_696


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
    one = ModelShape(
        kind="one matrix", hidden=0, vocab=0, layers=(Layer(attention=attention),), table_weights=0, output_weights=0
    )
    wide, narrow = prefill_work(one, HALF, tokens=1000), step_work(one, HALF, batch=1, context=0)
    assert (wide.linear_flops, narrow.linear_flops) == (2 * 1000 * 4096**2, 2 * 4096**2)
    assert wide.weight_bytes == narrow.weight_bytes


def test_mistral_7b_four_rows() -> None:
    """Printed as 8 GB of cache and 22 to 24 GB in all, which counts 32 heads where there are 8 for keys and values."""
    shape = nominal(7_264_000_000, layers=32, heads=32, kv_heads=8)
    cache = 4 * 4096 * kv_bytes_per_position(shape, HALF)
    assert cache == 2 << 30
    assert 16.5e9 < weight_bytes(shape, HALF) + cache + 0.5e9 < 19e9
    wrong = 4 * 4096 * kv_bytes_per_position(nominal(32, layers=32, heads=32, kv_heads=32), HALF)
    assert wrong == 8 << 30


def test_rows_of_70b_on_two_devices() -> None:
    """Printed as 40 GB and 26 rows on one device, where 140 GB of weights do not fit; on two, 20 GB are left."""
    served = Served(shape=ROUND_70B, precision=HALF, activations=0.0)
    assert served.most_rows(80e9, length=4608) == 0
    assert served.most_rows(160e9, length=4608) == 13
    assert int(40e9 / (4608 * 327_680)) == 26, "the arithmetic of what is printed"


def test_memory_that_is_left_for_the_cache() -> None:
    assert 80e9 - weight_bytes(nominal(15_000_000_000, layers=40, heads=40, kv_heads=8), HALF) == 50e9


def test_logits_take_memory() -> None:
    """64 rows with 8 drafted nodes, 128,000 tokens, float32."""
    shape = ModelShape(kind="", hidden=0, vocab=128_000, layers=(), table_weights=0, output_weights=0)
    assert step_work(shape, HALF, batch=64, context=0, drafted=8).logit_bytes == pytest.approx(295e6, rel=1e-3)


@pytest.mark.parametrize(
    ("length", "rows"), [pytest.param(2048, 200), pytest.param(4096, 100), pytest.param(32_768, 12)]
)
def test_slots_of_8b(length: int, rows: int) -> None:
    served = Served(shape=LLAMA_8B, precision=HALF, activations=0.0, overhead=2e9)
    assert served.most_rows(0.9 * 80e9, length=length) == rows
    assert served.longest(0.9 * 80e9, rows=rows) >= length
    assert served.longest(0.9 * 80e9, rows=rows + 1) < length


def test_pages_of_8b() -> None:
    served = Served(shape=LLAMA_8B, precision=HALF, activations=0.0, overhead=2e9)
    assert served.most_paged_rows(0.9 * 80e9, mean_length=1024) == 398


@pytest.mark.parametrize(("price", "rate", "million"), [(2.0, 24, 23.15), (2.0, 766, 0.725), (1.4, 1700, 0.229)])
def test_price_of_a_million_tokens(price: float, rate: float, million: float) -> None:
    assert price_per_million(price, rate) == pytest.approx(million, rel=2e-3)
    assert hours_per_million(rate) == pytest.approx(million / price, rel=2e-3)


def test_latency_counts_the_first_token_once() -> None:
    """Printed with N and with N - 1: the time to the first token ends with the first of the N."""
    assert latency(0.5, 0.05, 1) == 0.5
    assert latency(0.5, 0.05, 101) == pytest.approx(5.5)


def test_a_model_on_two_devices_sums_in_every_layer() -> None:
    """70B on two H100: 20.9 ms of weights each, and 160 sums."""
    assert 1000 * H100.least_seconds(decode(1).linear) / 2 == pytest.approx(20.9, abs=0.05)
    assert 2 * len(ROUND_70B.layers) == 160
    one = all_reduce_seconds(devices=2, tokens=8, hidden=8192, number_bytes=2, bandwidth=450e9, latency=5e-6)
    assert one == pytest.approx(8 * 8192 * 2 / 450e9 + 5e-6)
    assert all_reduce_seconds(devices=1, tokens=8, hidden=8192, number_bytes=2, bandwidth=450e9) == 0
