"""Int8: the kernel against a plain product, speculation with it, what it costs in bytes, and what is refused."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from drafters.model import ModelDrafter
from specdec.engine.engine import Engine
from specdec.modeling.loading import load_model
from specdec.modeling.runner import ModelRunner
from specdec.modeling.target import Target
from specdec.quantization import METHODS, quantize
from specdec.quantization.base import QuantizedLinear, weights_read
from specdec.quantization.int8 import KERNEL_ROWS, Int8Linear, from_int8, to_int8
from specdec.requests import SamplingParams
from tests.models import tiny_model
from verifiers.rejection import RejectionVerifier

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 8], [5]]


def small(*, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """A Llama whose widths the kernel takes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(5.0)
    return model.to(dtype)


def dequantized(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a quantized model with ordinary linear layers of the same numbers."""
    plain = copy.deepcopy(model)
    for parent in list(plain.modules()):
        for name, module in parent.named_children():
            if isinstance(module, Int8Linear):
                out, width = module.weight.shape
                linear = nn.Linear(width, out, bias=module.bias is not None)
                linear.weight = nn.Parameter(module.weight.float() * module.scale.float()[:, None])
                if module.bias is not None:
                    linear.bias = module.bias
                setattr(parent, name, linear)
    return plain.float()


def test_to_int8_example() -> None:
    integers, scale = to_int8(torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]))
    assert integers.tolist() == [[64, -127, 32], [0, 0, 0]]
    assert scale.tolist() == pytest.approx([1 / 127, 1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_of_a_weight_is_half_a_step(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 64).to(dtype)
    integers, scale = to_int8(weight)
    error = (integers.double() * scale.double()[:, None] - weight.double()).abs()
    # A scale that was rounded down clips the largest weight by at most half of bfloat16's 2^-8.
    clipped = weight.double().abs().amax(1, keepdim=True) * (2**-9 if dtype is torch.bfloat16 else 1e-6)
    assert (error <= torch.maximum(scale.double()[:, None] / 2 * 1.0001, clipped)).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, KERNEL_ROWS, KERNEL_ROWS + 1, 16, 33])
@pytest.mark.parametrize("widths", [(48, 64), (5, 16), (33, 128), (20, 40)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("keep_copy", [False, True])
def test_every_path_is_the_same_function(rows: int, widths: tuple[int, int], bias: bool, keep_copy: bool) -> None:
    out, width = widths
    layer = Int8Linear(
        torch.randn(out, width).bfloat16(), torch.randn(out).bfloat16() if bias else None, keep_copy=keep_copy
    )
    inputs = torch.randn(rows, width).bfloat16()
    expected = inputs.double() @ (layer.weight.double() * layer.scale.double()[:, None]).T
    if bias:
        expected += layer.bias.double()
    found = layer(inputs)
    assert found.dtype is torch.bfloat16 and found.shape == (rows, out)
    # bfloat16 has 2^-9 of rounding: once for the output, once for each weight of the copy, once with the bias.
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < 2 * 2**-8, f"{error:.4f}"


def test_shapes_and_addresses_the_kernel_cannot_read() -> None:
    """It reads sixteen inputs at a time from aligned addresses, and crashes on others."""
    layer = Int8Linear(torch.randn(16, 32).bfloat16(), None)
    store = torch.randn(1 + 4 * 32).bfloat16()
    odd = store[1:].view(2, 2, 32)
    torch.testing.assert_close(layer(odd), layer(odd.clone()))
    columns = torch.randn(32, 3).bfloat16().t()
    torch.testing.assert_close(layer(columns), layer(columns.contiguous()))
    assert layer(torch.zeros(0, 32).bfloat16()).shape == (0, 16)
    assert layer(torch.randn(1, 1, 32).bfloat16()).shape == (1, 1, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("keep_copy", [False, True])
def test_other_dtypes_multiply_plainly(dtype: torch.dtype, keep_copy: bool) -> None:
    layer = Int8Linear(torch.randn(16, 32).to(dtype), None, keep_copy=keep_copy)
    inputs = torch.randn(2, 32).to(dtype)
    expected = inputs @ from_int8(layer.weight, layer.scale).t()
    torch.testing.assert_close(layer(inputs), expected)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("tied", [False, True])
def test_all_linear_layers_are_quantized(name: str, tied: bool) -> None:
    model = quantize(small(tied=tied), name)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 2 * 7 + 1
    assert model.dtype is torch.bfloat16
    assert model.get_input_embeddings().weight.dtype is torch.bfloat16
    assert Target(model).vocab_size == 64
    assert ModelRunner(model, max_batch_size=1, max_length=16).vocab_size == 64


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("architecture", ["llama", "llama_mqa_tied", "qwen2", "qwen3", "gemma3", "phi3", "gpt2"])
@torch.inference_mode()
def test_models_are_their_dequantized_selves(architecture: str, name: str) -> None:
    model = quantize(tiny_model(architecture), name)
    tokens = torch.randint(64, (2, 10))
    found, expected = model(tokens).logits, dequantized(model)(tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    original = tiny_model(architecture)(tokens).logits
    assert not torch.equal(found, original)
    assert (found.argmax(-1) == original.argmax(-1)).float().mean() > 0.7


@pytest.mark.parametrize("rows", [1, 5, 20])
@torch.inference_mode()
def test_bfloat16_is_as_near_to_the_exact_numbers_as_ordinary_layers_are(rows: int) -> None:
    model = quantize(small(), "int8")
    exact = dequantized(model)
    tokens = torch.randint(64, (1, rows))
    expected = exact(tokens).logits
    ordinary = (copy.deepcopy(exact).bfloat16()(tokens).logits.float() - expected).pow(2).mean().sqrt()
    own = (model(tokens).logits.float() - expected).pow(2).mean().sqrt()
    assert own < 1.5 * ordinary + 1e-3, f"int8 {own:.4f}, ordinary layers {ordinary:.4f}"


@pytest.mark.parametrize("name", METHODS)
def test_speculation_with_a_quantized_target_is_plain_decoding_with_it(name: str) -> None:
    target = Target(quantize(tiny_model(), name))
    draft = ModelDrafter(tiny_model(), [2, 2, 1], sampling="deterministic")  # what the target was before
    engine = Engine(target, draft, RejectionVerifier(), max_batch_size=2, max_length=64)
    sampling = SamplingParams(max_new_tokens=32)
    plain = engine.generate(PROMPTS, sampling, speculate=False)
    speculated = engine.generate(PROMPTS, sampling)
    assert [c.token_ids for c in speculated] == [c.token_ids for c in plain]
    # It is the quantized model's own greedy decoding, and not the original's.
    own = dequantized(target.model)
    tokens = list(PROMPTS[0])
    with torch.inference_mode():
        for _ in range(32):
            tokens.append(int(own(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert tuple(tokens[len(PROMPTS[0]) :]) == plain[0].token_ids


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_quantized_copy_of_the_target_drafts_well(name: str, temperature: float) -> None:
    model = tiny_model()
    engine = Engine(
        Target(model),
        ModelDrafter(quantize(copy.deepcopy(model), name), 3),
        RejectionVerifier(),
        max_batch_size=3,
        max_length=64,
    )
    sampling = SamplingParams(temperature=temperature, max_new_tokens=32, seed=1)
    done = engine.generate(PROMPTS, sampling)
    if temperature == 0:
        assert [c.token_ids for c in done] == [c.token_ids for c in engine.generate(PROMPTS, sampling, speculate=False)]
    steps = [step for completion in done for step in completion.steps]
    rate = sum(step.accepted for step in steps) / sum(step.proposed_depth for step in steps)
    assert rate > 0.8, f"{rate:.2f} of the drafted tokens were accepted"
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules()), "the target itself was quantized"


def test_bfloat16_speculation_runs_on_both_paths() -> None:
    """Greedy output may differ at near-ties between kernels, as it does between bfloat16's own; here it has none."""
    model = small()
    target = Target(quantize(model, "int8"))
    engine = Engine(target, ModelDrafter(small(), KERNEL_ROWS + 2), RejectionVerifier(), max_length=64)
    sampling = SamplingParams(max_new_tokens=16)
    plain = engine.generate(PROMPTS[:1], sampling, speculate=False)[0]
    speculated = engine.generate(PROMPTS[:1], sampling)[0]
    assert len(speculated.token_ids) == len(plain.token_ids) == 16
    assert len(speculated.steps) < 16


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_are_counted(tied: bool) -> None:
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
    assert runner.weight_bytes(KERNEL_ROWS + 1) == 2 * (linear + norms)
    assert target.bytes_per_weight == pytest.approx(few / (linear + norms))
    compact = quantize(small(tied=tied), "int8_compact")
    assert weights_read(compact, 100).bytes == few
    assert runner.bytes_per_token == 2 * 2 * 2 * 8 * 2  # layers x (K and V) x kv heads x head_dim x bfloat16


def test_float32_reads_the_copy() -> None:
    model = quantize(small(dtype=torch.float32), "int8")
    assert Target(model).bytes_per_weight == 4.0


@pytest.mark.parametrize(
    "call", [lambda: quantize(small(), "int3"), lambda: load_model("no/model", quantization="int3")]
)
def test_unknown_names_are_told(call: object) -> None:
    with pytest.raises(ValueError, match="quantization='int3': give one of int8, int8_compact"):
        call()  # type: ignore[operator]


def test_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="quantized already"):
        quantize(quantize(small(), "int8"), "int8")


def test_loading_quantizes(tmp_path: object) -> None:
    small(tied=True).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), quantization="int8", device="cpu")
    assert isinstance(model.get_output_embeddings(), Int8Linear)
    drafter = ModelDrafter.from_pretrained(str(tmp_path), quantization="int8_compact", device="cpu", shape=2)
    engine = Engine(Target(model), drafter, RejectionVerifier(), max_length=32)
    done = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12))[0]
    assert np.mean([step.accepted for step in done.steps]) > 1
