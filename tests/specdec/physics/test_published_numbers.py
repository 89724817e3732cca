"""Numbers that texts about serving print: each follows from the formulas, or is corrected here with the printed one.

They are those of ``docs/why-decoding-is-slow.md``, too.
"""

from collections.abc import Callable

import pytest

from specdec.physics.capacity import Served, kv_bytes_per_position
from specdec.physics.precision import Precision, bytes_of
from specdec.physics.rounds import RoofRounds
from specdec.physics.shape import Attention, Layer, ModelShape, experts_hit, nominal
from specdec.physics.speculation import latency, price_per_million, target_efficiency
from specdec.physics.work import Roof, StepWork, prefill_work, step_work
from tests.public_models import DEEPSEEK_V3, LLAMA_8B, ROUND_8B, ROUND_70B, SHAPES

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


NUMBERS: dict[str, tuple[Callable[[], float], float]] = {
    "prefill, FLOP": (lambda: PREFILL.linear_flops, 5.734e14),
    "prefill, FLOP per byte (printed as 4,093 = 573 / 0.14)": (lambda: PREFILL.linear.intensity, 4096),
    "prefill, s": (lambda: seconds(PREFILL), 0.5795),
    "decode, ms": (lambda: 1000 * seconds(decode()), 41.791),
    "its cache's share": (lambda: decode(1, 4608).kv_read_bytes / decode(1, 4608).total.bytes, 0.01067),
    "decode behind 4,608 tokens, ms": (lambda: 1000 * H100.least_seconds(decode(1, 4608).total), 42.24),
    "int4, bytes": (lambda: decode(precision=INT4).weight_bytes, 35e9),
    "32 rows, tokens/s": (lambda: 32 / seconds(decode(32)), 765.7),
    "attention, FLOP per token and position": (lambda: ROUND_70B.pair_flops, 2_621_440),
    "attention of the prefill, FLOP": (lambda: PREFILL.attention_flops, 22.0e12),
    "8B on an A100, ms": (lambda: 1000 * seconds(step_work(ROUND_8B, HALF, batch=1, context=0), A100), 8),
    "utilization of a token (printed as 0.005 %)": (lambda: 16e9 * 125 / A100.flops, 0.00641),
    "int4 with factors (printed as 0.53 with zero points)": (lambda: bytes_of("int4") + 2 / 64, 0.53125),
    **{
        f"bytes of {name}": (lambda name=name: bytes_of(name), size)
        for name, size in (("float32", 4), ("float16", 2), ("bfloat16", 2), ("int8", 1), ("fp8", 1), ("int4", 0.5))
    },
    "int4 with zero points": (lambda: bytes_of("int4") + 4 / 64, 0.5625),
    "KV of latents": (lambda: kv_bytes_per_position(DEEPSEEK_V3, HALF), 70_272),
    "Mistral-7B, 4 rows of 4,096 (printed as 8 GB)": (lambda: 4 * 4096 * KV_8B, 2 << 30),
    "70B on one device (printed as 26 rows)": (lambda: SERVED_70B.most_rows(80e9, length=4608), 0),
    "70B on two devices, rows": (lambda: SERVED_70B.most_rows(160e9, length=4608), 13),
    "8B, slots of 4,096": (lambda: SERVED_8B.most_rows(0.9 * 80e9, length=4096), 100),
    "8B, pages": (lambda: (0.9 * 80e9 - SERVED_8B.memory(rows=0, length=0).total) // (KV_8B * (1024 + 1 + 7.5)), 398),
    "price of a million tokens at 24 tokens/s": (lambda: price_per_million(2.0, 24), 23.15),
    "latency counts the first token once": (lambda: latency(0.5, 0.05, 101), 5.5),
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


def test_experts_that_are_hit() -> None:
    for tokens, *hit in ((1, 2, 8, 8), (4, 5.47, 29.1, 30.5), (8, 7.2, 51.6, 57.4), (32, 8, 111.8, 163.3)):
        found = [experts_hit(tokens, experts=e, chosen=k) for e, k in ((8, 2), (128, 8), (256, 8))]
        assert found == pytest.approx(hit, abs=0.05)


def test_target_efficiency_of_dense_models_and_mixtures() -> None:
    """Verifying three drafted tokens behind 1,024 positions on an H100: cheapest for few rows, or in the middle."""
    for name, cells in (
        ("llama-3.1-8b", "1.00 1.00 0.99 0.75 0.55"),
        ("mixtral-8x7b", "0.40 0.90 1.00 1.00 0.66"),
        ("qwen3-30b-a3b", "0.39 0.49 0.88 0.99 0.99"),
    ):
        cost = RoofRounds(shape=SHAPES[name], precision=HALF, roof=H100)
        found = [target_efficiency(cost, batch=batch, drafted=3, context=1024) for batch in (1, 8, 32, 128, 512)]
        assert [f"{value:.2f}" for value in found] == cells.split()


def test_matrices_of_prefill_and_decode() -> None:
    """[1000, 4096] x [4096, 4096] against [1, 4096] x [4096, 4096]: 1,000 times the operations, the same weights."""
    attention = Attention.grouped(weights=4096 * 4096, heads=32, kv_heads=32, head_dim=128)
    sizes = {"hidden": 0, "vocab": 0, "table_weights": 0, "output_weights": 0}
    one = ModelShape(kind="one matrix", layers=(Layer(attention=attention),), **sizes)
    wide, narrow = prefill_work(one, HALF, tokens=1000), step_work(one, HALF, batch=1, context=0)
    assert (wide.linear_flops, narrow.linear_flops) == (2 * 1000 * 4096**2, 2 * 4096**2)
    assert wide.weight_bytes == narrow.weight_bytes
    # Logits take memory: 64 rows with 8 drafted nodes, 128,000 tokens, float32.
    shape = ModelShape(kind="", layers=(), **sizes | {"vocab": 128_000})
    assert step_work(shape, HALF, batch=64, context=0, drafted=8).logit_bytes == pytest.approx(295e6, rel=1e-3)


def test_round_models_have_exactly_so_many_weights() -> None:
    shape = nominal(640, layers=4, heads=2, kv_heads=1, head_dim=8)
    assert shape.weights == shape.active_weights == 640 and len(shape.layers) == 4
    with pytest.raises(ValueError, match="641 parameters"):
        nominal(641, layers=4, heads=2, kv_heads=1)
