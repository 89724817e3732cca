"""The Triton kernel on quantized weights against float64, in the interpreter; and on a GPU where there is one."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.quantization import METHODS
from specdec.quantization.base import CUDA_ROWS

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("specdec.kernels.products")
interpreter = pytest.importorskip("triton.runtime.interpreter")
tl = triton.language

SHAPES = [(1, 40, 96), (3, 64, 512), (17, 33, 257), (20, 48, 1024), (64, 16, 130), (70, 130, 200), (130, 33, 64)]
"""Rows, output and input widths: no blocks are full, all are, several programs share the inputs, several share rows."""

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="triton was imported for a GPU")


def product(scheme: str, inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel returns, and the exact product with the same numbers."""
    stored, scale = METHODS[scheme].store(weight)
    numbers = METHODS[scheme].numbers(stored, scale.double())[:, : weight.shape[1]]
    found = kernels.multiply(inputs, kernels.words_of(stored), scale, scheme)
    return found, inputs.double() @ numbers.t()


def error(scheme: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> float:
    """The largest error of the kernel, relative to the largest output."""
    rows, out, width = shape
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, width, generator=generator).to(device, dtype)
    # Rows of very different sizes, so that some of e4m3's numbers are subnormal.
    sizes = torch.logspace(-2, 2, width)[torch.randperm(width, generator=generator)]
    weight = (torch.randn(out, width, generator=generator) * sizes).to(device, dtype)
    found, expected = product(scheme, inputs, weight)
    assert found.dtype is dtype and found.shape == (rows, out)
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.fixture
def bfloat16_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter computes with the bit patterns of bfloat16, and cuts off what it should round; not so here."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    binary, dot, cast = builder.binary_op, builder.create_dot, builder.cast_impl

    def is_bfloat16(operand: Any) -> bool:
        return operand.dtype.scalar == tl.bfloat16 and operand.data.dtype == np.uint16

    def wide(operand: Any) -> Any:
        if not is_bfloat16(operand):
            return operand
        return handle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(operand: Any) -> Any:
        numbers = torch.from_numpy(np.ascontiguousarray(operand.data)).bfloat16()
        return handle(numbers.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    def compute(self: Any, left: Any, right: Any, op: Any) -> Any:
        return (
            rounded(binary(self, wide(left), wide(right), op)) if is_bfloat16(left) else binary(self, left, right, op)
        )

    def convert(self: Any, operand: Any, to: Any) -> Any:
        rounds = operand.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16
        return rounded(operand) if rounds else cast(self, operand, to)

    monkeypatch.setattr(builder, "binary_op", compute)
    monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *more: dot(self, wide(a), wide(b), *more))
    monkeypatch.setattr(builder, "cast_impl", convert)


@interpreted
@pytest.mark.usefixtures("bfloat16_numbers")
@pytest.mark.parametrize("scheme", METHODS)
def test_the_kernel_is_the_product(scheme: str) -> None:
    for shape, dtype in itertools.product(SHAPES, (torch.float16, torch.bfloat16)):
        # The output is rounded by 2^-11 or 2^-8 of its size at most; sums are float32's.
        assert error(scheme, shape, dtype, "cpu") < torch.finfo(dtype).eps * 0.51, (shape, dtype)


@interpreted
@pytest.mark.parametrize("scheme", METHODS)
def test_all_stored_numbers_are_exact(scheme: str) -> None:
    """Times one, in float32: every byte but e4m3's two that are no numbers."""
    stored = torch.arange(256, dtype=torch.uint8)[:, None]
    if scheme == "fp8":
        stored = stored[(stored & 127) != 127][:, None]
    stored = stored.view(torch.int8) if scheme == "int8" else stored
    scale = torch.ones(stored.shape if scheme == "int4" else len(stored), dtype=torch.float16)
    numbers = METHODS[scheme].numbers(stored, scale)[:, :2]  # the rest of a group of int4 is padding
    found = [
        kernels.multiply(unit, kernels.words_of(stored), scale, scheme)[0]
        for unit in torch.eye(numbers.shape[1]).half()[:, None]
    ]
    assert torch.equal(torch.stack(found, dim=1), numbers)


@triton.jit
def _exchanged(words: Any, dtype: tl.constexpr) -> Any:
    upper = words.to(tl.int16).to(dtype, bitcast=True)
    lower = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(lower, upper), (words.shape[0], 2 * words.shape[1]))


@triton.jit
def _from_seven(words: Any, dtype: tl.constexpr, SCHEME: tl.constexpr) -> Any:  # noqa: N803
    return kernels._halves((words & 0x000F000F) | 0x64006400, dtype) - 1031.0


@triton.jit
def _but_the_last(sums: Any, outputs: Any, count: Any, SHARES: tl.constexpr, BLOCK: tl.constexpr) -> None:  # noqa: N803
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for share in tl.static_range(SHARES - 1):
        total += tl.load(sums + share * count + place, mask=place < count, other=0.0)
    tl.store(outputs + place, total.to(outputs.dtype.element_ty), mask=place < count)


@interpreted
@pytest.mark.parametrize(
    ("name", "mutant", "schemes"),
    [("_halves", _exchanged, [*METHODS]), ("_numbers", _from_seven, ["int4"]), ("_sum", _but_the_last, [*METHODS])],
)
def test_a_wrong_kernel_is_seen(name: str, mutant: Any, schemes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, name, mutant)
    for scheme in schemes:
        assert error(scheme, (3, 64, 512), torch.float16, "cpu") > 2**-6


@interpreted
def test_a_row_does_not_depend_on_the_others() -> None:
    """Within one size of blocks: the products of another size may add in another order."""
    weight, inputs = torch.randn(40, 512).half(), torch.randn(16, 512).half()
    whole = product("int8", inputs, weight)[0]
    assert torch.equal(torch.cat([product("int8", row[None], weight)[0] for row in inputs[::5]]), whole[::5])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 9, 24, 60, 72, 300])
@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 14336), (1000, 4100)], ids=str)
@pytest.mark.parametrize("scheme", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_compiled_kernel_is_the_product(scheme: str, shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    assert error(scheme, (rows, *shape), dtype, "cuda") < torch.finfo(dtype).eps * 0.55


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 60, 300, CUDA_ROWS + 1])
def test_layers_on_a_gpu_are_the_product(name: str, dtype: torch.dtype, rows: int) -> None:
    """Through the kernel, and dequantized; without another copy of the weights."""
    layer = METHODS[name](torch.randn(256, 512, device="cuda").to(dtype), None)
    inputs = torch.randn(rows, 512, device="cuda").to(dtype)
    rounded = inputs.bfloat16() if dtype is torch.float32 else inputs
    expected = rounded.double() @ layer.double().dequantized().t()
    layer.to(dtype)(inputs)
    before = torch.cuda.memory_allocated()
    found = layer(inputs)
    assert found.dtype is dtype
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 2**-7
    assert torch.cuda.memory_allocated() - before <= -(-found.nbytes // 512) * 512
