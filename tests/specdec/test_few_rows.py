"""Products of a few rows in C: the same function on every processor, and nothing without a compiler."""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import LlamaConfig, LlamaForCausalLM

import specdec.execution.native as native
from specdec.engine.engine import Engine
from specdec.execution import few_rows as module
from specdec.execution.counting import counted
from specdec.execution.few_rows import few_rows, int4_rows, int8_rows
from specdec.execution.native import native_library
from specdec.execution.packing import PackedLinears, packed_linears
from specdec.machine import cpu
from specdec.quantization import METHODS, quantize
from specdec.quantization.dispatch import DispatchedLinear
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.models import COMMON

needs_compiler = pytest.mark.skipif(native_library() is None, reason="no C compiler, or no AVX2")
DTYPES = (torch.float32, torch.bfloat16)


def machines() -> Iterator[object]:
    """The instruction sets that the code has a way of its own for, as far as this processor has them."""
    yield "native"
    yield pytest.param("x86-64-v3", marks=pytest.mark.full)  # AVX2
    if {"avx512f", "avx512bw", "avx512vl"} <= cpu().features:
        yield pytest.param("x86-64-v4", marks=pytest.mark.full)  # AVX512 without products of bfloat16


@pytest.fixture(params=machines(), scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The C as it is compiled for one of these."""
    flags = tuple(each.replace("native", request.param) for each in native._FLAGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_FLAGS", flags)
        return native.library_in(tmp_path_factory.mktemp("native"))


@pytest.fixture
def on(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.setattr(module, "native_library", lambda: library)
    return library


def made_by(scheme: str, weight: Tensor, bias: Tensor | None) -> DispatchedLinear:
    """A layer with these weights in a scheme."""
    layer = METHODS[scheme](weight, bias)
    assert isinstance(layer, DispatchedLinear)
    return layer


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_multiplied(on: ctypes.CDLL, dtype: torch.dtype) -> None:
    for width in (1, 63, 64, 2049):
        parts = [noise(40, width, dtype=dtype), noise(33, width, dtype=dtype)]
        inputs, bias = noise(1, 1, width, dtype=dtype), noise(73, dtype=dtype)
        product = few_rows(parts)
        assert product is not None
        for added in (None, bias):
            exact = inputs.double() @ torch.cat(parts).double().T + (0 if added is None else added.double())
            outputs = product(inputs, added)
            assert outputs.dtype is dtype and outputs.shape == (1, 1, 73)
            # Half a step of bfloat16 is 2 ** -8 of a number at most; float32's sums are better than 1e-5 here.
            bound = 2**-8 * exact.abs() + 1e-5 if dtype is torch.bfloat16 else 1e-5 * exact.abs() + 2e-5
            assert ((outputs.double() - exact).abs() <= bound).all()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_row_is_multiplied_by_quantized_weights(on: ctypes.CDLL, scheme: str, dtype: torch.dtype) -> None:
    width = 192
    layer = made_by(scheme, noise(48, width, dtype=dtype), noise(48, dtype=dtype))
    inputs = noise(1, width, dtype=dtype)
    made = int8_rows(layer.weight, layer.scale) if scheme == "int8" else int4_rows(layer.weight, layer.scale, width)
    assert made is not None
    outputs = made(inputs, None)
    # The stored numbers themselves: bfloat16 would round int8's products with their scales.
    wide = made_by(scheme, noise(48, width, dtype=dtype), None).to(torch.float64)
    numbers = wide.dequantized().double()
    exact = inputs.bfloat16().double() @ numbers.T
    assert outputs.dtype is dtype
    assert ((outputs.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()
    assert layer.bias is not None and torch.equal(made(inputs, layer.bias), outputs + layer.bias)
    assert torch.equal(outputs, outputs.bfloat16().to(dtype)), "rounded to bfloat16 in float32, too"


@needs_compiler
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4 in float32"])
def test_a_row_has_the_same_bits_among_any_number(on: ctypes.CDLL, kind: str) -> None:
    """Plain decoding multiplies one row, verification several: they must not part here."""
    dtype = torch.float32 if "float32" in kind else torch.bfloat16
    for out, width in ((70, 192),) if "int" in kind else ((70, 192), (37, 67)):
        weight = noise(out, width, dtype=dtype)
        product: Callable[[Tensor, None], Tensor] | None = None
        if "int" not in kind:
            product = few_rows([weight[:30], weight[30:]])
        else:
            layer = made_by(kind[:4], weight, None)
            made = int8_rows if kind[:4] == "int8" else partial(int4_rows, width=width)
            product = made(layer.weight, layer.scale)
        assert product is not None
        inputs = noise(33, width, dtype=dtype)
        alone = torch.cat([product(row, None) for row in inputs.split(1)])
        exact = inputs.double() @ weight.double().T
        assert (alone.double() - exact).norm() < 0.2 * exact.norm(), "the right product, up to int4's rounding"
        for rows in (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33):
            assert torch.equal(product(inputs[:rows], None), alone[:rows]), (out, width, rows)


class Wrapped(Tensor):
    """A tensor without numbers of its own at its address, as subclasses of libraries are."""

    @staticmethod
    def __new__(cls, inner: Tensor):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Wrapped, lambda each: each.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


@needs_compiler
@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@torch.inference_mode()
def test_a_tensor_of_another_class_is_not_read_by_its_address(
    scheme: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end the process: there is nothing at the address. Inputs, biases and weights are left to torch."""
    monkeypatch.setattr("specdec.execution.packing._LEAST_FLOAT32", 0)
    weight, inputs, bias = noise(16, 64), noise(1, 64), noise(16)
    assert few_rows([Wrapped(weight)]) is None and int8_rows(Wrapped(weight.to(torch.int8)), noise(16)) is None
    layer = nn.Linear(64, 16) if scheme is None else made_by(scheme, weight, bias)
    layer.bias = nn.Parameter(bias)
    with PackedLinears(layer).in_use():
        wanted = layer(inputs)
        torch.testing.assert_close(layer(Wrapped(inputs)), wanted, atol=0.03, rtol=2**-6)
        layer._parameters["bias"] = Wrapped(bias)  # type: ignore[assignment]
        torch.testing.assert_close(layer(inputs), wanted, atol=0.03, rtol=2**-6)


@needs_compiler
def test_threads_do_not_matter() -> None:
    """A layer that is large enough to be divided among threads."""
    weight, inputs, before = noise(1501, 768), noise(1, 768), torch.get_num_threads()
    product = few_rows([weight])
    assert product is not None
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(product(inputs, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@needs_compiler
@pytest.mark.parametrize("scheme", [None, "int4"])
def test_decoding_replays_it(scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured forwards and recorded rounds know the products, which are no operations of torch."""
    monkeypatch.setattr("specdec.execution.replay.CAPTURE_AFTER", 3)
    monkeypatch.setattr("specdec.execution.packing._LEAST_FLOAT32", 0)
    torch.manual_seed(0)
    wide: dict[str, Any] = COMMON | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **wide)).eval()
    target = Target(model if scheme is None else quantize(model, scheme))
    linears = sum(isinstance(each, nn.Linear) or hasattr(each, "few_rows") for each in model.modules())
    sampling = SamplingParams(max_new_tokens=14, ignore_eos=True)
    found = {}
    for way in ("off", "decisions", "rounds"):
        engine = Engine(target, max_length=64, recording=way)
        found[way] = engine.generate([[1, 2, 3]], sampling)[0].token_ids
        engine.submit([4, 5, 6], sampling)
        for _ in range(10):
            engine.step()
        with counted() as work:
            engine.step()
        # In a captured forward: queries, keys and values at once, and gate and up, in two layers.
        joined = {linears, linears - 2 * (2 + 1)} if scheme is None else {linears}
        assert work.operations["few_rows"] in joined, way
    assert found["decisions"] == found["rounds"] == found["off"]
    assert len(packed_linears(model)) == (0 if scheme else linears)
