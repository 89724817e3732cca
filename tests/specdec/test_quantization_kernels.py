"""The Triton kernel on quantized weights against float64, in the interpreter; and on a GPU where there is one."""

import pytest
import torch
from torch import Tensor

from specdec.quantization.dispatch import CUDA_ROWS
from specdec.quantization.fp8 import from_fp8, to_fp8
from specdec.quantization.int4 import GROUP, from_int4, to_int4
from specdec.quantization.int8 import from_int8, to_int8
from specdec.quantization.methods import METHODS

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("specdec.quantization.kernels.rows")

SHAPES = [(1, 40, 96), (3, 64, 512), (17, 33, 257), (20, 48, 1024), (64, 16, 130)]
"""Rows, output and input widths: no blocks are full, all are, and several programs share the inputs."""

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="triton was imported for a GPU")


def product(scheme: str, inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel returns, and the exact product with the same numbers."""
    if scheme == "int4":
        stored, scale = to_int4(weight)
        found = kernels.multiply(inputs, stored, scale, group=GROUP)
        numbers = from_int4(stored, scale, weight.shape[1])
    elif scheme == "int8":
        stored, scale = to_int8(weight)
        found, numbers = kernels.multiply(inputs, stored, scale), from_int8(stored, scale.double())
    else:
        stored, scale = to_fp8(weight)
        found = kernels.multiply(inputs, stored.view(torch.float8_e4m3fn), scale)
        numbers = from_fp8(stored, scale.double())
    return found, inputs.double() @ numbers.double().t()


def error(scheme: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> float:
    """The largest error of the kernel, relative to the largest output."""
    rows, out, width = shape
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, width, generator=generator).to(device, dtype)
    weight = torch.randn(out, width, generator=generator).to(device, dtype)
    found, expected = product(scheme, inputs, weight)
    assert found.dtype is dtype and found.shape == (rows, out)
    return float((found.double() - expected).abs().max() / expected.abs().max())


# In float16: the interpreter cannot multiply bfloat16 numbers.
@interpreted
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_the_kernel_is_the_product(scheme: str) -> None:
    for shape in SHAPES:
        # float16 rounds the output by 2^-11; sums are float32's.
        assert error(scheme, shape, torch.float16, "cpu") < 2**-10, shape


@interpreted
def test_a_row_does_not_depend_on_the_others() -> None:
    """Within one size of blocks: the products of another size may add in another order."""
    weight, inputs = torch.randn(40, 512).half(), torch.randn(16, 512).half()
    whole = product("int8", inputs, weight)[0]
    assert torch.equal(torch.cat([product("int8", row[None], weight)[0] for row in inputs[::5]]), whole[::5])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (1, 4096, 4096), (16, 1024, 4096), (64, 4096, 14336)], ids=str)
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_compiled_kernel_is_the_product(scheme: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    if scheme == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    assert error(scheme, shape, dtype, "cuda") < (2**-7 if dtype is torch.bfloat16 else 2**-10)


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 16, 17, CUDA_ROWS, CUDA_ROWS + 1])
def test_layers_on_a_gpu_are_the_product(name: str, dtype: torch.dtype, rows: int) -> None:
    """By tinygemm, the Triton kernel, and the product for many rows."""
    if name == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    layer = METHODS[name](torch.randn(256, 512, device="cuda").to(dtype), None)
    inputs = torch.randn(rows, 512, device="cuda").to(dtype)
    rounded = inputs.bfloat16() if dtype is torch.float32 else inputs
    expected = rounded.double() @ layer.double().dequantized().t()
    found = layer.to(dtype)(inputs)
    assert found.dtype is dtype
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 2**-7
