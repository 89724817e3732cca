"""Quantized layers: their numbers by hand, and their kernels against plain products."""

import itertools

import pytest
import torch
from torch import nn

from specdec.quantization import METHODS
from specdec.quantization.dispatch import COMPACT_ROWS, KERNEL_ROWS, KERNEL_ROWS_FLOAT32
from specdec.quantization.fp8 import to_fp8
from specdec.quantization.int4 import GROUP, from_int4, to_int4
from specdec.quantization.int8 import Int8Linear, to_int8
from tests.specdec.quantized import by_hand


def test_examples_of_int8_and_int4() -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_of_an_int8_weight_is_half_a_step(dtype: torch.dtype) -> None:
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


def test_fp8_keeps_small_weights() -> None:
    weight = torch.tensor([[1.0, -0.5, 1e-3, 0.0]])
    bits, scale = to_fp8(weight)
    numbers = bits.view(torch.float8_e4m3fn).float() * scale[:, None]
    torch.testing.assert_close(numbers, weight, rtol=2**-4, atol=0.0)
    assert numbers[0, 0] == 1.0


@pytest.fixture
def torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are multiplied as without a C compiler."""
    monkeypatch.setattr("specdec.execution.few_rows.native_library", lambda: None)


ROWS = [1, 2, KERNEL_ROWS, KERNEL_ROWS + 1, KERNEL_ROWS_FLOAT32, KERNEL_ROWS_FLOAT32 + 1, COMPACT_ROWS + 1]
CASES = [(name, dtype) for name in METHODS for dtype in (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_path_is_the_same_function(name: str, dtype: torch.dtype) -> None:
    for (out, width), rows in itertools.product([(48, 64), (5, 16), (20, 97)], ROWS):
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
        assert error < 2 * 2**-8, f"{rows} rows of {width}: {error:.4f}"


@pytest.mark.usefixtures("torchs_kernels")
def test_integers_at_addresses_the_kernel_cannot_read() -> None:
    """A mapped file has them at any address. torch's kernel crashes on some, with AVX512."""
    layer, inputs = Int8Linear(torch.randn(32, 64).bfloat16(), None), torch.randn(KERNEL_ROWS, 64).bfloat16()
    expected, integers = layer(inputs), layer.weight
    for offset in (0, 1, 2, 8, 16):
        store = torch.empty(integers.numel() + 64, dtype=torch.int8)
        start = -store.data_ptr() % 64 + offset
        elsewhere = store[start : start + integers.numel()].view_as(integers).copy_(integers)
        layer.weight = nn.Parameter(elsewhere, requires_grad=False)
        assert torch.equal(layer(inputs), expected)


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
