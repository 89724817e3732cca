"""The arithmetic of costs, on published models and devices and on numbers worked out by hand."""

import itertools

import pytest

from specdec.roofline.bounds import Roof, Work, bandwidth_utilization, flop_utilization, suspicion
from specdec.roofline.speculation import speedup, tokens_per_round
from specdec.roofline.transformer import DecoderShape

H100 = Roof(bandwidth=3.35e12, flops=989.4e12)
LLAMA_70B = DecoderShape(layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, head_dim=128, vocab=128256)
LLAMA_8B = DecoderShape(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)


def test_keys_and_values_per_token() -> None:
    assert LLAMA_70B.kv_bytes_per_token(2) == 327_680
    assert LLAMA_70B.kv_bytes_per_token(2) * 4096 == pytest.approx(1.34e9, rel=0.01)
    assert LLAMA_8B.kv_bytes_per_token(2) == 131_072
    assert LLAMA_8B.kv_bytes_per_token(1) == 65_536, "8 bits per element"
    one_head = DecoderShape(layers=32, hidden=4096, intermediate=1, heads=32, kv_heads=1, head_dim=128, vocab=1)
    assert one_head.kv_bytes_per_token(2) == 16_384


def test_weights_of_published_models() -> None:
    """Llama-3.1-8B has 8.03 billion parameters, of which the embedding table is not read as a whole."""
    assert LLAMA_8B.layer_weights + 2 * LLAMA_8B.output_weights == pytest.approx(8.03e9, rel=0.001)
    assert LLAMA_70B.layer_weights + 2 * LLAMA_70B.output_weights == pytest.approx(70.55e9, rel=0.001)


def test_weights_are_those_of_the_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=10,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    shape = DecoderShape.of(config)
    assert shape.layer_weights + shape.output_weights == matrices


def test_attention_of_70b() -> None:
    """2,621,440 operations per token of context; as many as the 140 GFLOP of the products at 53,406 tokens."""
    assert LLAMA_70B.attention_flops(queries=1, context=1) == 2_621_440
    assert LLAMA_70B.attention_flops(queries=1, context=4096) == pytest.approx(10.7e9, rel=0.01)
    assert LLAMA_70B.attention_flops(queries=1, context=53_406) == pytest.approx(140e9, rel=1e-3)
    assert LLAMA_70B.attention_flops(queries=4096, context=2048) == pytest.approx(22.0e12, rel=0.01), "a whole prefill"


def test_a_step_counts_products_and_attention() -> None:
    plain = LLAMA_8B.step_flops(batch=1, nodes=1, context=0)
    products = 2 * (LLAMA_8B.layer_weights + LLAMA_8B.output_weights)
    assert plain == products + LLAMA_8B.attention_flops(queries=1, context=1), "a token sees itself"
    wide = LLAMA_8B.step_flops(batch=3, nodes=5, context=100)
    assert wide == 15 * products + LLAMA_8B.attention_flops(queries=15, context=103)


def test_prefill_needs_no_output_layer() -> None:
    whole = LLAMA_70B.prefill_flops(4096)
    assert whole == 2 * LLAMA_70B.layer_weights * 4096 + LLAMA_70B.attention_flops(queries=4096, context=2048)


@pytest.mark.parametrize(
    ("weight_bytes", "batch", "milliseconds"),
    [(140e9, 1, 41.791), (141.5e9, 1, 42.24), (35e9, 1, 10.448), (140e9, 32, 41.791)],
)
def test_decoding_70b_is_bound_by_memory(weight_bytes: float, batch: int, milliseconds: float) -> None:
    work = Work(weight_bytes, batch * 140e9)
    assert 1000 * H100.least_seconds(work) == pytest.approx(milliseconds, abs=0.01)
    assert work.intensity == pytest.approx(batch * 140e9 / weight_bytes)


def test_prefill_of_70b_is_bound_by_products() -> None:
    work = Work(140e9, 5.734e14)
    assert work.intensity == pytest.approx(4096, rel=1e-3)
    assert work.intensity / H100.ridge > 13
    assert H100.least_seconds(work) == pytest.approx(0.5795, abs=1e-4)
    assert H100.ridge > 256, "a prompt of 256 tokens is just bound by memory"


@pytest.mark.parametrize(
    ("roof", "ridge"),
    [(H100, 295.3), (Roof(3.35e12, 1979e12), 590.7), (Roof(1.555e12, 312e12), 200.6), (Roof(2.039e12, 312e12), 153.0)],
)
def test_ridges_of_devices(roof: Roof, ridge: float) -> None:
    assert roof.ridge == pytest.approx(ridge, abs=0.05)
    assert roof.attainable(roof.ridge * 2) == roof.flops
    assert roof.attainable(roof.ridge / 2) == pytest.approx(roof.flops / 2)


def test_utilization() -> None:
    assert flop_utilization(300e12, 1.0, 990e12) == pytest.approx(0.30, abs=0.005)
    assert bandwidth_utilization(2.5e12, 1.0, 3.35e12) == pytest.approx(0.75, abs=0.005)
    # Llama-3.1-8B at 125 tokens/s on an A100 computes 2 TFLOP/s, 0.64 % of what the device can.
    assert flop_utilization(16e9, 1 / 125, 312e12) == pytest.approx(0.0064, abs=5e-5)


def test_times_below_the_bound_are_suspect() -> None:
    work = Work(140e9, 140e9)
    least = H100.least_seconds(work)
    assert suspicion(work, least, H100, cache_bytes=50 << 20) == ""
    assert suspicion(work, least * 0.96, H100, cache_bytes=50 << 20) == "", "the roof was measured, with noise"
    assert suspicion(work, least * 0.5, H100, cache_bytes=50 << 20).startswith("FASTER THAN PHYSICS (0.50")
    small = Work(100e6, 100e6)
    assert suspicion(small, 1e-6, H100, cache_bytes=50 << 20) == "served by caches"
    assert suspicion(small, 1e-6, H100, cache_bytes=0).startswith("FASTER THAN PHYSICS")


@pytest.mark.parametrize(("rate", "length"), [(0.8, 4), (0.5, 7), (0.0, 3), (0.9, 1)])
def test_tokens_per_round_by_the_closed_form_and_by_enumeration(rate: float, length: int) -> None:
    expected = sum(
        rate ** sum(flags) * (1 - rate) ** (length - sum(flags)) * (1 + len(list(itertools.takewhile(bool, flags))))
        for flags in itertools.product((True, False), repeat=length)
    )
    assert tokens_per_round([rate] * length) == pytest.approx(expected)
    assert tokens_per_round([rate] * length) == pytest.approx((1 - rate ** (length + 1)) / (1 - rate))


def test_tokens_per_round_with_a_rate_per_position() -> None:
    assert tokens_per_round([]) == 1
    assert tokens_per_round([1.0, 1.0]) == 3
    assert tokens_per_round([0.5, 0.2]) == pytest.approx(1 + 0.5 + 0.1)


@pytest.mark.parametrize(
    ("rate", "cost", "length", "best"), [(0.6, 0.1, 3, 1.674), (0.8, 0.05, 8, 3.092), (0.8, 0.1, 6, 2.470)]
)
def test_speedup_of_known_settings(rate: float, cost: float, length: int, best: float) -> None:
    found = speedup(tokens_per_round([rate] * length), plain=1.0, verify=1.0, draft=length * cost)
    assert found == pytest.approx(best, abs=5e-4)


def test_speedup_pays_for_everything_in_a_round() -> None:
    assert speedup(3.0, plain=10.0, verify=11.0, draft=3.0, outside=1.0) == 2.0
