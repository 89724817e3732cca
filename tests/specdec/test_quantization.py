"""Quantized layers: kernels against plain products, speculation with them, what they cost in bytes, what is refused."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from drafters.model import ModelDrafter
from specdec.engine.engine import Engine
from specdec.exactness.ties import examine
from specdec.execution.few_rows import MOST_ROWS
from specdec.modeling.loading import load_model
from specdec.modeling.runner import ModelRunner
from specdec.modeling.target import Target
from specdec.quantization import METHODS, quantize
from specdec.quantization.base import QuantizedLinear, num_weights, rounded_to, weights_read
from specdec.quantization.dispatch import COMPACT_ROWS, KERNEL_ROWS, KERNEL_ROWS_FLOAT32, DispatchedLinear, kernel_rows
from specdec.quantization.fp8 import to_fp8
from specdec.quantization.int4 import GROUP, Int4Linear, from_int4, to_int4
from specdec.quantization.int8 import Int8Linear, to_int8
from specdec.requests import SamplingParams
from tests.models import tiny_model
from tests.verifiers.cases import complete
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


class Rounding(nn.Linear):
    """What a quantized layer of a float32 model is said to compute: bfloat16 goes in and comes out."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        outputs = nn.functional.linear(input.bfloat16().float(), self.weight).bfloat16().float()
        return outputs if self.bias is None else outputs + self.bias


def dequantized(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a quantized model with ordinary linear layers of the same numbers, in float32 or its own dtype."""
    plain = copy.deepcopy(model)
    for parent in list(plain.modules()):
        for name, module in parent.named_children():
            if isinstance(module, DispatchedLinear):
                out, width = module.out_features, module.in_features
                kind = Rounding if module.rounds_to is torch.bfloat16 else nn.Linear
                linear = kind(width, out, bias=module.bias is not None)
                linear.weight = nn.Parameter(by_hand(module))
                if module.bias is not None:
                    linear.bias = module.bias
                setattr(parent, name, linear)
    return plain if plain.dtype is torch.float64 else plain.float()


def by_hand(layer: DispatchedLinear) -> torch.Tensor:
    """The weights of a layer, from what it stores, in float32 or the scale's dtype, whichever is finer."""
    scale = layer.scale if layer.scale.dtype is torch.float64 else layer.scale.float()
    if isinstance(layer, Int4Linear):
        rows = [[nibble - 8 for byte in row for nibble in (byte >> 4, byte & 15)] for row in layer.weight.tolist()]
        numbers = torch.tensor(rows).to(scale.dtype)[:, : layer.in_features]
        return numbers * scale.repeat_interleave(GROUP, dim=1)[:, : layer.in_features]
    numbers = layer.weight if isinstance(layer, Int8Linear) else layer.weight.view(torch.float8_e4m3fn)
    return numbers.to(scale.dtype) * scale[:, None]


def quantized(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Quantized even where that is not faster, or impossible to run fast (fp8 on a CPU)."""
    return quantize(model, name, check=False)


def test_to_int8_example() -> None:
    integers, scale = to_int8(torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]))
    assert integers.tolist() == [[64, -127, 32], [0, 0, 0]]
    # The nearest number to 1 / 127 that bfloat16 holds: the kernels take no others.
    assert scale.tolist() == [float(torch.tensor(1 / 127).bfloat16()), 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_of_a_weight_is_half_a_step(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 64).to(dtype)
    integers, scale = to_int8(weight)
    error = (integers.double() * scale.double()[:, None] - weight.double()).abs()
    # A scale that was rounded down clips the largest weight by at most half of bfloat16's 2^-8.
    clipped = weight.double().abs().amax(1, keepdim=True) * (2**-9 if dtype is torch.bfloat16 else 1e-6)
    assert (error <= torch.maximum(scale.double()[:, None] / 2 * 1.0001, clipped)).all()


def test_the_error_of_an_int4_weight_is_a_step() -> None:
    weight = torch.randn(40, 3 * GROUP + 10)
    stored, scale = to_int4(weight)
    error = (from_int4(stored, scale, weight.shape[1]) - weight).abs()
    steps = scale.abs().repeat_interleave(GROUP, dim=1)[:, : weight.shape[1]]
    # Half a step, except that the largest weights are clipped: by up to a step and a half at 8.5 steps of 7.
    assert (error <= 1.6 * steps).all()
    assert (error <= 0.51 * steps).float().mean() > 0.95
    # A grid for every group of 64 normal numbers leaves about a tenth of their norm.
    assert error.norm() / weight.norm() < 0.11


def test_int4_numbers_are_exact_in_bfloat16() -> None:
    """So the kernels, which dequantize to bfloat16, multiply by the numbers of the float32 copy."""
    stored, scale = to_int4(torch.randn(64, 4 * GROUP) * torch.logspace(-3, 3, 64)[:, None])
    numbers = from_int4(stored, scale, 4 * GROUP)
    assert torch.equal(numbers.bfloat16().float(), numbers)
    # With scales of eight bits they would not be.
    numbers = from_int4(stored, scale * (1 + 2**-6), 4 * GROUP)
    assert not torch.equal(numbers.bfloat16().float(), numbers)


def test_to_int4_example() -> None:
    stored, scale = to_int4(torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]))
    # An eighth is a five-bit number; -8 stands for the largest weight, and nothing is clipped.
    assert scale.tolist() == [[0.125], [1.0]]
    assert [[byte >> 4, byte & 15] for byte in stored[0].tolist()] == [[8 + 4, 8 - 8], [8 + 2, 8]]
    assert from_int4(stored, scale, 3).tolist() == [[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]


def test_fp8_keeps_small_weights() -> None:
    weight = torch.tensor([[1.0, -0.5, 1e-3, 0.0]])
    bits, scale = to_fp8(weight)
    numbers = bits.view(torch.float8_e4m3fn).float() * scale[:, None]
    torch.testing.assert_close(numbers, weight, rtol=2**-4, atol=0.0)
    assert numbers[0, 0] == 1.0


ROWS = [1, 2, 3, KERNEL_ROWS, KERNEL_ROWS + 1, KERNEL_ROWS_FLOAT32, KERNEL_ROWS_FLOAT32 + 1, 33, COMPACT_ROWS + 1]


@pytest.fixture
def torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are multiplied as without a C compiler."""
    monkeypatch.setattr("specdec.execution.few_rows.native_library", lambda: None)


@pytest.mark.parametrize("widths", [(48, 64), (5, 16), (33, 128), (20, 40), (16, 97)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", METHODS)
def test_every_path_is_the_same_function(name: str, widths: tuple[int, int], dtype: torch.dtype) -> None:
    out, width = widths
    for rows in ROWS:
        layer = METHODS[name](torch.randn(out, width).to(dtype), torch.randn(out).to(dtype) if rows % 2 else None)
        inputs = torch.randn(rows, width).to(dtype)
        # In float32, inputs are rounded; weights are not, in any scheme.
        expected = inputs.bfloat16().double() @ by_hand(layer).double().T
        if layer.bias is not None:
            expected += layer.bias.double()
        found = layer(inputs)
        assert found.dtype is dtype and found.shape == (rows, out)
        # bfloat16 has 2^-9 of rounding: once for the output, once for each weight of the copy, once with the bias.
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error < 2 * 2**-8, f"{rows} rows: {error:.4f}"


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_in_float32_all_numbers_of_rows_give_nearly_the_same_bits(name: str) -> None:
    """Kernel and copy round alike, so their outputs differ only where float32's last bits decide about a rounding."""
    weight = torch.randn(512, 768, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(40, 768, generator=torch.Generator().manual_seed(1))
    layer = METHODS[name](weight, None)
    whole = layer(inputs)
    single = torch.cat([layer(row[None]) for row in inputs])
    # 1e-3 was measured to be a few times what happens; a copy of other numbers or without rounding differs everywhere.
    assert (whole != single).float().mean() < 1e-3
    assert (nn.functional.linear(inputs, layer.dequantized()) != single).float().mean() > 0.9


@pytest.mark.usefixtures("torchs_kernels")
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("rows", [2, 3, 9])
def test_few_rows_go_through_the_kernel(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fast is asked of injected facts here: this machine may have no native bfloat16."""
    calls: list[int] = []
    for dtype, native, least, most in (
        (torch.bfloat16, True, KERNEL_ROWS, KERNEL_ROWS),
        (torch.bfloat16, False, 1000, 1 << 62),
        (torch.float32, True, KERNEL_ROWS_FLOAT32, KERNEL_ROWS_FLOAT32),
        (torch.float16, True, 0, 0),
    ):
        monkeypatch.setattr("specdec.quantization.dispatch._native", lambda native=native: native)
        limit = kernel_rows(dtype, torch.device("cpu"), copied=True)
        assert least <= limit and (limit <= most or not native)
        layer = METHODS[name](torch.randn(16, 64).to(dtype), None)
        kernel = type(layer).kernel
        monkeypatch.setattr(type(layer), "kernel", lambda *arguments, k=kernel: calls.append(1) or k(*arguments))
        calls.clear()
        layer(torch.randn(rows, 64).to(dtype))
        assert bool(calls) is (rows <= limit), (dtype, native)
        monkeypatch.setattr(type(layer), "kernel", kernel)


@pytest.mark.usefixtures("torchs_kernels")
@pytest.mark.parametrize("offset", [0, 1, 2, 8, 16])
def test_integers_at_addresses_the_kernel_cannot_read(offset: int) -> None:
    """A mapped file has them at any address. torch's kernel crashes on some, with AVX512."""
    layer = Int8Linear(torch.randn(32, 64).bfloat16(), None)
    inputs = torch.randn(KERNEL_ROWS, 64).bfloat16()
    expected = layer(inputs)
    store = torch.empty(layer.weight.numel() + 64, dtype=torch.int8)
    start = -store.data_ptr() % 64 + offset
    elsewhere = store[start : start + layer.weight.numel()].view_as(layer.weight).copy_(layer.weight)
    layer.weight = nn.Parameter(elsewhere, requires_grad=False)
    assert torch.equal(layer(inputs), expected)


def test_a_float32_scale_that_the_kernel_cannot_take() -> None:
    """Checkpoints of an earlier version have such scales; one row must be multiplied by the same numbers as many."""
    layer = Int8Linear(torch.randn(16, 64), None)
    layer.scale *= 1 + 2**-9
    inputs = torch.randn(20, 64)
    assert torch.equal(layer(inputs)[:1], layer(inputs[:1]))


@pytest.mark.usefixtures("torchs_kernels")
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", METHODS)
def test_other_dtypes_multiply_plainly(dtype: torch.dtype, name: str) -> None:
    layer = METHODS[name](torch.randn(16, 32).to(dtype), None)
    assert layer.rounds_to is None
    inputs = torch.randn(2, 32).to(dtype)
    torch.testing.assert_close(layer(inputs), inputs @ by_hand(layer).to(dtype).t())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("tied", [False, True])
def test_all_linear_layers_are_quantized(name: str, tied: bool) -> None:
    model = quantized(small(tied=tied), name)
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


@pytest.mark.parametrize("name", [complete(name, strong=name in ("int8", "int4_compact", "fp8")) for name in METHODS])
def test_speculation_with_a_quantized_target_is_plain_decoding_with_it(name: str) -> None:
    target = Target(quantized(tiny_model().double(), name))
    draft = ModelDrafter(tiny_model().double(), [2, 2, 1], sampling="deterministic")  # what the target was before
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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        complete("int8", torch.float32, strong=True),
        complete("int8", torch.bfloat16, strong=False),
        complete("int4", torch.float32, strong=False),
        complete("int4", torch.bfloat16, strong=True),
        complete("int4_compact", torch.float32, strong=False),
        complete("int4_compact", torch.bfloat16, strong=False),
    ],
)
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
        parted = next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if parted is None:
            agreed += len(pairs)
            continue
        agreed += parted
        before = [*prompt, *own.token_ids[:parted]]
        tie = examine(target.model, before, pairs[parted], sampling, prompt_length=len(prompt))
        assert tie.margin is not None and tie.bound is not None and tie.margin <= tie.bound, tie
    assert agreed > 32, "they agree for more than the length of one output"


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        complete(name, temperature, strong=(name, temperature) in (("int8", 0.0), ("int4", 1.0), ("fp8", 0.0)))
        for name in METHODS
        for temperature in (0.0, 1.0)
    ],
)
def test_a_quantized_copy_of_the_target_drafts_well(name: str, temperature: float) -> None:
    model = tiny_model()
    engine = Engine(
        Target(model),
        ModelDrafter(quantized(copy.deepcopy(model), name), 3),
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
    assert rate > (0.5 if "int4" in name else 0.8), f"{rate:.2f} of the drafted tokens were accepted"
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


def test_many_rows_of_float32_read_the_copy() -> None:
    model = quantize(small(dtype=torch.float32), "int8")
    assert Target(model).bytes_per_weight < 1.5
    assert weights_read(model, MOST_ROWS + 1).bytes == 4 * weights_read(model).weights


@pytest.mark.parametrize("name", ["int4", "int4_compact"])
def test_two_int4_weights_are_in_a_byte(name: str) -> None:
    before, model = small(), quantize(small(), name)
    assert num_weights(model) == Target(model).num_parameters == before.num_parameters()
    read, layers = weights_read(model), [module for module in model.modules() if isinstance(module, Int4Linear)]
    assert read.weights == weights_read(before).weights
    scales = sum(2 * 2 * layer.scale.numel() for layer in layers)  # each with an offset, in bfloat16
    assert read.bytes == sum(layer.num_weights for layer in layers) / 2 + scales + 2 * 5 * 32


@pytest.mark.parametrize(
    "call", [lambda: quantize(small(), "int3"), lambda: load_model("no/model", quantization="int3")]
)
def test_unknown_names_are_told(call: object) -> None:
    with pytest.raises(
        ValueError, match="quantization='int3': give one of int8, int8_compact, int4, int4_compact, fp8"
    ):
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
