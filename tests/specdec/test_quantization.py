"""Quantized layers: numbers by hand, kernels against plain products, and schemes that would not be faster."""

import copy
import itertools
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from drafters.model import ModelDrafter
from specdec.machine import dtype_name
from specdec.quantization import METHODS, quantization_of, quantize
from specdec.quantization import speed as checks
from specdec.quantization.base import QuantizedLinear
from specdec.quantization.fp8 import to_fp8
from specdec.quantization.int4 import GROUP, Int4Linear, from_int4, to_int4
from specdec.quantization.int8 import Int8Linear, to_int8
from specdec.quantization.speed import AUTO, MEASURED_FROM, check_fast, fastest, measure_row, obstacle
from specdec.target.loading import load_model
from tests.models import tiny_model


def small(*, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A Llama whose widths the kernel takes."""
    return tiny_model("llama_mqa_tied" if tied else "llama", layers=2).to(dtype)


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
            if isinstance(module, QuantizedLinear):
                out, width = module.out_features, module.in_features
                kind = Rounding if module.rounds_to is torch.bfloat16 else nn.Linear
                linear = kind(width, out, bias=module.bias is not None)
                linear.weight = nn.Parameter(by_hand(module))
                if module.bias is not None:
                    linear.bias = module.bias
                setattr(parent, name, linear)
    return plain if plain.dtype is torch.float64 else plain.float()


def by_hand(layer: QuantizedLinear) -> torch.Tensor:
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


def test_numbers_of_the_schemes() -> None:
    weight = torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]])
    integers, scale = to_int8(weight)
    assert integers.tolist() == [[64, -127, 32], [0, 0, 0]]
    # The nearest number to 1 / 127 that bfloat16 holds: the kernels take no others.
    assert scale.tolist() == [float(torch.tensor(1 / 127).bfloat16()), 1.0]
    stored, scale = to_int4(weight)
    # An eighth is a five-bit number; -8 stands for the largest weight, and nothing is clipped.
    assert scale.tolist() == [[0.125], [1.0]]
    assert [[byte >> 4, byte & 15] for byte in stored[0].tolist()] == [[8 + 4, 8 - 8], [8 + 2, 8]]
    assert torch.equal(from_int4(stored, scale, 3), weight)
    weight = torch.randn(40, 3 * GROUP + 10)
    # Half a step; a scale that was rounded down clips the largest weight by at most half of bfloat16's 2^-8.
    for dtype, clipped in ((torch.float32, 1e-6), (torch.bfloat16, 2**-9)):
        given = weight.to(dtype)
        integers, scale = to_int8(given)
        steps, largest = scale.double()[:, None], given.double().abs().amax(1, keepdim=True)
        error = (integers.double() * steps - given.double()).abs()
        assert (error <= torch.maximum(steps / 2 * 1.0001, largest * clipped)).all()
    stored, scale = to_int4(weight)
    error = (from_int4(stored, scale, weight.shape[1]) - weight).abs()
    steps = scale.abs().repeat_interleave(GROUP, dim=1)[:, : weight.shape[1]]
    # Half a step, except that the largest weights are clipped: by up to a step and a half at 8.5 steps of 7.
    assert (error <= 1.6 * steps).all()
    assert (error <= 0.51 * steps).float().mean() > 0.95
    # A grid for every group of 64 normal numbers leaves about a tenth of their norm.
    assert error.norm() / weight.norm() < 0.11
    numbers = from_int4(*to_int4(torch.randn(64, 4 * GROUP) * torch.logspace(-3, 3, 64)[:, None]), 4 * GROUP)
    assert torch.equal(numbers.bfloat16().float(), numbers)
    weight = torch.tensor([[1.0, -0.5, 1e-3, 0.0]])
    bits, scale = to_fp8(weight)
    numbers = bits.view(torch.float8_e4m3fn).float() * scale[:, None]
    torch.testing.assert_close(numbers, weight, rtol=2**-4, atol=0.0)
    assert numbers[0, 0] == 1.0


@pytest.mark.parametrize("compiled", [True, False], ids=["C", "dequantized"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", METHODS)
def test_every_path_is_the_same_function(name: str, dtype: torch.dtype, compiled: bool, monkeypatch) -> None:
    if not compiled:
        monkeypatch.setattr("specdec.execution.products.native_library", lambda: None)
    for (out, width), rows in itertools.product([(48, 64), (5, 16), (20, 97)], [1, 2, 4, 70]):
        layer = METHODS[name](torch.randn(out, width).to(dtype), torch.randn(out).to(dtype) if rows % 2 else None)
        inputs = torch.randn(rows, width).to(dtype)
        # In float32, inputs are rounded; weights are not, in any scheme.
        expected = inputs.bfloat16().double() @ by_hand(layer).double().T
        if layer.bias is not None:
            expected += layer.bias.double()
        found = layer(inputs)
        columns = layer(inputs.t().contiguous().t()[:, None])[:, 0]
        torch.testing.assert_close(columns, found, rtol=2**-7, atol=2**-5)
        assert found.dtype is dtype and found.shape == (rows, out)
        assert layer(inputs[:0]).shape == (0, out)
        # bfloat16 has 2^-9 of rounding: once for the output, once for each weight of the copy, once with the bias.
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error < 2 * 2**-8, f"{rows} rows of {width}: {error:.4f}"


def large(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A model whose output layer is just large enough to be measured."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=MEASURED_FROM // 64, **sizes, tie_word_embeddings=True)).to(dtype)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Times of rows, call by call, in full precision and in the schemes; once they are out, measuring fails."""
    found = Mock(side_effect=AssertionError("nothing is measured"))

    def measure(names: Sequence[str], shape: tuple[int, int], dtype: torch.dtype) -> dict[str, float]:
        return dict(zip([dtype_name(dtype), *names], found(), strict=True))

    monkeypatch.setattr(checks, "measure_row", measure)
    return found


def test_the_slower_scheme_is_refused_with_what_was_measured(measured: Mock) -> None:
    """Less than a tenth is noise, and a scheme is refused only if it was slower both times: the machine may be busy."""
    said = "quantization='int4' is slower than bfloat16 .*32768 x 64 .* 0.75 ms, and 0.25 ms .*quantization_check=false"
    for found, refused in (([(1.0, 1.05)], False), ([(1.0, 2.0), (1.0, 0.9)], False), ([(0.25, 0.75)] * 2, True)):
        measured.side_effect = found
        with pytest.raises(ValueError, match=said) if refused else nullcontext():
            check_fast(large(), "int4")
        assert measured.call_count == len(found)
        measured.reset_mock()


def test_the_choice_changes_the_drafter_alone(tmp_path: Path, measured: Mock, monkeypatch) -> None:
    """Left to the machine, the drafter is the one of the format by name; None, a stored one and a target's stay."""
    monkeypatch.setattr(checks, "chosen", lambda what, measure, default: measure() or default)
    large(torch.float32).save_pretrained(tmp_path / "full")
    quantize(large(), "int8", check=False).save_pretrained(tmp_path / "stored")
    fixed: Any = {"quantization": None}
    for name, given, scheme in (("full", {}, "int4"), ("full", fixed, None), ("stored", {}, "int8")):
        measured.side_effect = [(4.0, 2.0, 1.0)] * 2
        drafter = ModelDrafter.from_pretrained(str(tmp_path / name), device="cpu", quantization_check=False, **given)
        assert quantization_of(drafter.model) == scheme
    assert quantization_of(load_model(str(tmp_path / "full"))) is None
    with pytest.raises(ValueError, match="quantization='auto': give one of int8, int4, fp8"):
        load_model(str(tmp_path / "full"), quantization=AUTO)


def test_the_check_stands_before_the_work_and_can_be_left_out(measured: Mock, tmp_path: Path) -> None:
    measured.side_effect = itertools.repeat((1.0, 2.0))
    model = large()
    with pytest.raises(ValueError, match="slower than bfloat16"):
        quantize(model, "int8")
    assert quantization_of(model) is None and not any(isinstance(each, QuantizedLinear) for each in model.modules())
    model.save_pretrained(tmp_path / "full")
    quantize(model, "int8", check=False).save_pretrained(tmp_path / "stored")
    for name, quantization in (("full", "int8"), ("stored", None)):
        for load in (load_model, ModelDrafter.from_pretrained):
            options = {"device": "cpu", "quantization": quantization}
            with pytest.raises(ValueError, match="quantization='int8' is slower"):
                load(str(tmp_path / name), **options)
            load(str(tmp_path / name), **options, quantization_check=False)


@pytest.mark.parametrize(
    ("found", "scheme"),
    [
        ([(4.0, 2.0, 1.0)] * 2, "int4"),
        ([(4.0, 2.0, 1.9)] * 2, "int8"),  # int4 by less than a tenth: its drafts are worse
        ([(4.0, 3.8, 3.7)] * 2, None),
        ([(4.0, 2.0, 1.0), (4.0, 9.0, 9.0)], None),  # other work on the machine
    ],
)
def test_a_drafting_model_gets_the_format_that_is_faster_by_a_tenth_twice(found, scheme, measured, monkeypatch) -> None:
    """Small ones, those that no kernel multiplies and those on a GPU stay as they are, and nothing is measured."""
    monkeypatch.setattr(checks, "chosen", lambda what, measure, default: measure() or default)
    for shape, dtype, device in (
        ((64, 64), torch.bfloat16, "cpu"),
        ((1 << 20, 64), torch.float16, "cpu"),
        ((1 << 20, 64), torch.bfloat16, "cuda"),
    ):
        assert fastest(shape, dtype, device) == (None, "") and not measured.called
    measured.side_effect = found
    chosen, said = fastest((100_000, 64), torch.bfloat16, "cpu")
    assert chosen == scheme and (said == "" if found[0] != found[1] else "4.00 ms in bfloat16" in said)


def test_what_the_hardware_has_and_lacks_and_what_is_measured() -> None:
    for name, dtype, device, lacks in (
        ("fp8", torch.bfloat16, "cpu", "GPU .* this is a cpu device"),
        ("int4", torch.float64, "cuda", "float64"),
        ("int8", torch.bfloat16, "mps", "mps"),
    ):
        assert re.search(lacks, obstacle(name, dtype, device) or "")
    with pytest.raises(ValueError, match=r"quantization='int4': .*float16"):
        check_fast(small(dtype=torch.float16), "int4")
    assert {name: obstacle(name, torch.bfloat16, "cuda") for name in METHODS} == dict.fromkeys(METHODS)
    for dtype in (torch.float32, torch.bfloat16):
        assert [name for name in METHODS if obstacle(name, dtype, "cpu")] == ["fp8"]
    found = measure_row(["int4", "int8"], (48, 64), torch.bfloat16)
    assert [*found] == ["bfloat16", "int4", "int8"] and min(found.values()) > 0
    assert torch.get_num_threads() == 1
