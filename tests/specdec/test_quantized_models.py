"""Models of quantized layers: what they compute, speculation with them, what they cost in bytes, what is refused."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from drafters.model import ModelDrafter
from specdec.checks.ties import examine
from specdec.engine.engine import Engine
from specdec.execution.few_rows import MOST_ROWS
from specdec.quantization import METHODS, quantize
from specdec.quantization.base import QuantizedLinear, num_weights, rounded_to, weights_read
from specdec.quantization.dispatch import KERNEL_ROWS
from specdec.quantization.int4 import Int4Linear
from specdec.quantization.int8 import Int8Linear
from specdec.requests import SamplingParams
from specdec.target.loading import load_model
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from tests.models import tiny_model
from tests.specdec.quantized import PROMPTS, dequantized, quantized, small
from tests.verifiers.cases import complete
from verifiers.rejection import RejectionVerifier


@pytest.mark.parametrize("name", METHODS)
def test_all_linear_layers_are_quantized(name: str) -> None:
    """A tied output layer, too."""
    model = quantized(small(tied=True), name)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 2 * 7 + 1
    assert model.dtype is model.get_input_embeddings().weight.dtype is torch.bfloat16
    assert Target(model).vocab_size == ModelRunner(model, max_batch_size=1, max_length=16).vocab_size == 64


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        *((name, "llama_mqa_tied") for name in METHODS),
        ("int4", "gpt2"),
        *(complete("int8", name, strong=False) for name in ("llama", "qwen2", "qwen3", "gemma3", "phi3")),
    ],
)
@torch.inference_mode()
def test_models_are_their_dequantized_selves(architecture: str, name: str) -> None:
    tokens = torch.randint(64, (2, 10), generator=torch.Generator().manual_seed(0))
    model = quantized(tiny_model(architecture).double(), name)
    found, expected = model(tokens).logits, dequantized(model)(tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    # In float32 one number in thousands may be rounded to bfloat16 the other way, and a few logits of its row move.
    model = quantized(tiny_model(architecture), name)
    found, expected = model(tokens).logits, dequantized(model)(tokens).logits
    assert ((found - expected).square().mean() / expected.var()).sqrt() < 2**-8
    original = tiny_model(architecture)(tokens).logits
    assert not torch.equal(found, original)
    assert (found.argmax(-1) == original.argmax(-1)).float().mean() > (0.3 if "int4" in name else 0.7)
    assert rounded_to(model) is torch.bfloat16 and rounded_to(tiny_model(architecture)) is None


@torch.inference_mode()
def test_bfloat16_is_as_near_to_the_exact_numbers_as_ordinary_layers_are() -> None:
    model = quantize(small(), "int8")
    exact = dequantized(model)
    rounded = copy.deepcopy(exact).bfloat16()
    for rows in (1, 5, 20):
        tokens = torch.randint(64, (1, rows))
        expected = exact(tokens).logits
        ordinary, own = ((each(tokens).logits.float() - expected).pow(2).mean().sqrt() for each in (rounded, model))
        assert own < 1.5 * ordinary + 1e-3, f"int8 {own:.4f}, ordinary layers {ordinary:.4f}"


def test_speculation_with_a_quantized_target_is_plain_decoding_with_it() -> None:
    target = Target(quantized(tiny_model().double(), "int4_compact"))
    draft = ModelDrafter(tiny_model().double(), [2, 2, 1], sampling="deterministic")  # what the target was before
    engine = Engine(target, draft, RejectionVerifier(), max_batch_size=2, max_length=64)
    sampling = SamplingParams(max_new_tokens=16)
    plain = engine.generate(PROMPTS, sampling, speculate=False)
    assert [c.token_ids for c in engine.generate(PROMPTS, sampling)] == [c.token_ids for c in plain]
    # It is the quantized model's own greedy decoding, and not the original's.
    whole = torch.tensor([[*PROMPTS[0], *plain[0].token_ids]])
    with torch.inference_mode():
        own, other = (each(whole).logits[0].argmax(-1) for each in (dequantized(target.model), draft.model))
    start = len(PROMPTS[0]) - 1
    assert tuple(own[start:-1].tolist()) == plain[0].token_ids != tuple(other[start:-1].tolist())


@pytest.mark.parametrize(("name", "dtype"), [("int8", torch.float32), ("int4", torch.bfloat16)])
def test_what_speculation_decodes_otherwise_was_a_tie(name: str, dtype: torch.dtype) -> None:
    """Kernels and copies round, so outputs may part at near-ties; what the rounding does not explain is an error."""
    target = Target(quantized(small(dtype=dtype), name))
    draft = ModelDrafter(small(dtype=dtype), [2, 2, 2, 2, 1, 1], sampling="deterministic")
    engine = Engine(target, draft, RejectionVerifier(), max_batch_size=3, max_length=64)
    sampling = SamplingParams(max_new_tokens=32)
    plain = engine.generate(PROMPTS, sampling, speculate=False)
    agreed = 0
    for prompt, own, other in zip(PROMPTS, plain, engine.generate(PROMPTS, sampling), strict=True):
        pairs = list(zip(own.token_ids, other.token_ids, strict=True))
        parted = next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), len(pairs))
        agreed += parted
        if parted < len(pairs):
            before = [*prompt, *own.token_ids[:parted]]
            tie = examine(target.model, before, pairs[parted], sampling, prompt_length=len(prompt))
            assert tie.margin is not None and tie.bound is not None and tie.margin <= tie.bound, tie
    assert agreed > 32, "they agree for more than the length of one output"


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_are_counted(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.quantization.dispatch._native", lambda: True)  # elsewhere kernels take all rows
    model = small(tied=tied)
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    norms = 5 * 32
    before = weights_read(model)
    assert (before.weights, before.bytes) == (linear + norms, 2 * (linear + norms))
    assert Target(model).bytes_per_weight == 2.0
    outputs = sum(module.weight.shape[0] for module in model.modules() if isinstance(module, nn.Linear))
    target = Target(quantize(model, "int8"))
    runner = ModelRunner(target.model, max_batch_size=1, max_length=16)
    few = linear + 2 * outputs + 2 * norms
    assert runner.weight_bytes() == runner.weight_bytes(KERNEL_ROWS) == few
    assert runner.weight_bytes(MOST_ROWS + 1) == 2 * (linear + norms)
    assert target.bytes_per_weight == pytest.approx(few / (linear + norms))
    compact = quantized(small(tied=tied), "int8_compact")
    assert weights_read(compact, 100).bytes == few
    assert runner.bytes_per_token == 2 * 2 * 2 * 8 * 2  # layers x (K and V) x kv heads x head_dim x bfloat16


@pytest.mark.parametrize("name", ["int4", "int4_compact"])
def test_two_int4_weights_are_in_a_byte(name: str) -> None:
    before, model = small(), quantize(small(), name)
    assert num_weights(model) == Target(model).num_parameters == before.num_parameters()
    read, layers = weights_read(model), [module for module in model.modules() if isinstance(module, Int4Linear)]
    assert read.weights == weights_read(before).weights
    scales = sum(2 * 2 * layer.scale.numel() for layer in layers)  # each with an offset, in bfloat16
    assert read.bytes == sum(layer.num_weights for layer in layers) / 2 + scales + 2 * 5 * 32


def test_unknown_names_and_twice_are_refused() -> None:
    for call in (quantize, lambda model, name: load_model("no/model", quantization=name)):
        with pytest.raises(ValueError, match=rf"quantization='int3': give one of {', '.join(METHODS)}"):
            call(small(), "int3")
    with pytest.raises(ValueError, match=r"quantization='int8': .* already"):
        quantize(quantize(small(), "int8"), "int8")


def test_loading_quantizes(tmp_path: object) -> None:
    small(tied=True).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), quantization="int8", device="cpu")
    assert isinstance(model.get_output_embeddings(), Int8Linear)
    drafter = ModelDrafter.from_pretrained(str(tmp_path), quantization="int8_compact", device="cpu", shape=2)
    engine = Engine(Target(model), drafter, RejectionVerifier(), max_length=32)
    done = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12))[0]
    assert np.mean([step.accepted for step in done.steps]) > 1
