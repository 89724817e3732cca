"""Products in C: the same function on every processor, the same bits for any number of rows."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import specdec.native.library as native
from specdec import Engine, SamplingParams, Target
from specdec.execution import products as module
from specdec.execution.packing import PackedLinears
from specdec.execution.products import PanelWeight, panels
from specdec.machine import cpu
from specdec.native import native_library
from specdec.quantization import METHODS, quantize
from tests.architectures import tiny
from tests.launches import counted

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C compiler, or no AVX2")
DTYPES = (torch.float32, torch.bfloat16)
ROWS = (1, 2, 5, 6, 7, 13, 61, 130)
"""In tiles of any number of rows, and beyond the rows for which a block of weights is used again."""
AMX = Path(__file__).with_name("amx.h")
needs_pairs = pytest.mark.skipif(not {"avx512_bf16", "avx512vl"} <= cpu().features, reason="no AVX512 with bfloat16")


def machines() -> Iterator[object]:
    """The instruction sets that the code has a way of its own for, as far as this processor has them."""
    yield "native"
    yield pytest.param("tiles", marks=needs_pairs)  # AMX, emulated
    for intel in (0, 1):  # products of bfloat16 in pairs, and widened
        yield pytest.param(f"native -D__builtin_cpu_is(NAME)={intel}", marks=[needs_pairs, pytest.mark.full])
    yield pytest.param("x86-64-v3", marks=pytest.mark.full)  # AVX2
    if {"avx512f", "avx512bw", "avx512vl"} <= cpu().features:
        yield pytest.param("x86-64-v4", marks=pytest.mark.full)  # AVX512 without products of bfloat16


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C, with tile instructions in plain C."""
    file = tmp_path_factory.mktemp("native") / "tiles.so"
    command = [*native._compiler(), *native._FLAGS, "-include", str(AMX), "-shared"]
    subprocess.run([*command, *map(str, native.FOLDER.glob("*.c")), "-lm", "-o", str(file)], check=True)
    return file


@pytest.fixture(params=machines(), scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if request.param == "native" and (kept := native_library()) is not None:
        return kept
    if request.param == "tiles":
        return native._load(request.getfixturevalue("tiles"))
    flags = tuple(" ".join(native._FLAGS).replace("native", request.param).split())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_FLAGS", flags)
        return native.library_in(tmp_path_factory.mktemp("native"))


@pytest.fixture
def on(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    for each in (module, native):
        monkeypatch.setattr(each, "native_library", lambda: library)
    return library


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("digits", ["all", "bfloat16", "float16", 1.0 + 2.0**-12, 2.0**-40 * (1 + 2.0**-9)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_is_multiplied(on: ctypes.CDLL, dtype: torch.dtype, digits: str | float) -> None:
    """A number for each dtype of 16 bits has to fit, or all have 32, also if it is the last number that does not."""
    for out, width in ((1, 1), (73, 63), (130, 64), (64, 2049)):
        weight = noise(out, width)
        if isinstance(digits, float):
            weight = weight.bfloat16().float()
            weight[-1, -1] = digits
        elif digits != "all":
            weight = weight.to(getattr(torch, digits)).float()
        weight, bias = weight.to(dtype), noise(out, dtype=dtype)
        product = panels(weight)
        filled = -(-out // module.panel_channels()) * module.panel_channels() * (width + width % 2)
        assert product.bytes == filled * (2 if dtype is torch.bfloat16 or digits in ("bfloat16", "float16") else 4)
        for rows, added in ((1, None), (1, bias), (7, None), (70, bias)):
            inputs = noise(1, rows, width, dtype=dtype)
            exact = inputs.double() @ weight.double().T + (0 if added is None else added.double())
            outputs = product(inputs, added)
            assert outputs.dtype is dtype and outputs.shape == (1, rows, out)
            # Half a step of bfloat16 is 2 ** -8 of a number at most; float32's sums are better than 2e-5 here.
            bound = 2**-8 * exact.abs() + 3e-5 if dtype is torch.bfloat16 else 1e-5 * exact.abs() + 1e-4
            assert ((outputs.double() - exact).abs() <= bound).all()
        assert torch.equal(product(inputs[0].T.contiguous().T, bias), outputs[0]), "inputs may lie as they like"


def as_integers(inputs: Tensor) -> Tensor:
    """Inputs of quantized weights where there are no tiles: 64 together in 16 bits, in steps of a power of two."""
    groups = F.pad(inputs.bfloat16().double(), (0, -inputs.shape[-1] % 64)).unflatten(-1, (-1, 64))
    step = torch.ldexp(torch.ones(()).double(), groups.abs().amax(-1, keepdim=True).frexp().exponent.double() - 15)
    return ((groups / step).round() * step).flatten(-2)[:, : inputs.shape[-1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantized_weights_are_multiplied(on: ctypes.CDLL, scheme: str, dtype: torch.dtype) -> None:
    for out, width in ((48, 192), (70, 90)):  # the last group of int4 may be smaller
        layer = METHODS[scheme](noise(out, width, dtype=dtype), noise(out, dtype=dtype))
        made = layer.panels()
        # The stored numbers themselves: bfloat16 would round int8's products with their scales.
        wide = METHODS[scheme](noise(out, width, dtype=dtype), None).to(torch.float64)
        numbers = wide.dequantized().double()
        for rows in (1, 7, 70):
            inputs = noise(rows, width, dtype=dtype)
            outputs = made(inputs, None)
            exact = (inputs.bfloat16().double() if on.tiles_from(0) else as_integers(inputs)) @ numbers.T
            assert outputs.dtype is dtype
            assert ((outputs.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()
            assert layer.bias is not None and torch.equal(made(inputs, layer.bias), outputs + layer.bias)
            assert torch.equal(outputs, outputs.bfloat16().to(dtype)), "rounded to bfloat16 in float32, too"
            inputs[0, 3], inputs[-1, 5] = torch.nan, inputs[-1, 5] * 2.0**100
            found = made(inputs, None)
            assert found[0].isnan().all() and torch.equal(found[1:-1], outputs[1:-1])
            assert rows == 1 or (found[-1].isfinite().all() and (found[-1].abs() > 2.0**80).any())


@pytest.mark.parametrize("rows", [1, 7, 30], ids=str)
def test_every_integer_is_multiplied_as_what_it_is(on: ctypes.CDLL, rows: int) -> None:
    """By the identity; in tiles that unpack in registers, and in those that find the weights unpacked."""
    for scheme, count, least, groups in (("int8", 255, -127, ()), ("int4", 16, -8, (2,))):
        weight = (torch.arange(70 * 128).view(70, 128) % count + least).to(torch.int8)
        layer, pairs = METHODS[scheme](weight.bfloat16(), None), (weight + 8).to(torch.uint8).view(70, 64, 2)
        layer.weight = nn.Parameter((pairs[..., 0] << 4 | pairs[..., 1]) if groups else weight, requires_grad=False)
        layer.scale = torch.ones(70, *groups).bfloat16()
        made = layer.panels()
        inputs = torch.eye(128, dtype=torch.bfloat16)
        found = torch.cat([made(part.contiguous(), None) for part in inputs.split(rows)])
        assert torch.equal(found.T, weight.bfloat16())
    assert module.int8_panels(torch.tensor([[-128, 3]], dtype=torch.int8), torch.ones(1)) is None


@pytest.mark.parametrize("kind", ["float32", "float32 of 16 bits", "bfloat16", "int8", "int4 in float32"])
def test_a_row_has_the_same_bits_among_any_number(on: ctypes.CDLL, kind: str) -> None:
    """Plain decoding multiplies one row, verification several, prefill many: they must not part here."""
    dtype = torch.float32 if "float32" in kind else torch.bfloat16
    for out, width in ((70, 192), (37, 67)):
        weight = noise(out, width, dtype=dtype)
        weight = weight.bfloat16().to(dtype) if "16" in kind else weight
        product = METHODS[kind[:4]](weight, None).panels() if kind.startswith("int") else panels(weight)
        inputs = noise(130, width, dtype=dtype)
        alone = torch.cat([product(row, None) for row in inputs.split(1)])
        for rows in ROWS:
            assert torch.equal(product(inputs[:rows], None), alone[:rows]), (out, width, rows)


def by_the_manual(inputs: Tensor, weight: Tensor) -> Tensor:
    """The sums of tiles: of 32 inputs the even and the odd ones apart, then both. Products of bfloat16 are exact."""
    sums = torch.zeros(len(inputs), len(weight))
    for x, w in zip(inputs.float().split(32, 1), weight.float().split(32, 1), strict=True):
        apart = torch.zeros(2, *sums.shape)
        for k in range(32):
            apart[k % 2] += torch.outer(x[:, k], w[:, k])
        sums += apart[0] + apart[1]
    return sums.bfloat16()


@needs_pairs
@pytest.mark.parametrize("mutant", [False, True], ids=["as it is", "mutant"])
def test_tiles_sum_as_the_manual_says(mutant: bool, tiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact sums are 0, so the outputs are the order's roundings. The mutant exchanges the two inputs of each pair."""
    library = native._load(tiles)
    for each in (module, native):
        monkeypatch.setattr(each, "native_library", lambda: library)
    half, x = noise(130, 304, dtype=torch.bfloat16), noise(65, 304, dtype=torch.bfloat16)
    inputs, weight = torch.cat([x, x], dim=1), torch.cat([half, -half], dim=1)
    product, wanted = panels(weight), by_the_manual(inputs, weight)
    assert product is not None and library.tiles_from(0) == 1
    if mutant:
        product.panels = product.panels.flip(-1).contiguous()
    for rows in range(1, 66):
        assert torch.equal(product(inputs[:rows], None), wanted[:rows]) is not mutant, rows
    assert library.tiles_from(66) == 66
    vectors = product(inputs, None)
    assert library.tiles_from(1) == 1
    assert 0 < (vectors.float() - wanted.float()).abs().max() < 1e-4


def test_tiles_are_compiled_for_a_processor_that_has_them(tmp_path: Path) -> None:
    made_file = tmp_path / "made.s"
    for_it = ("-O1", "-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-S", "-o", str(made_file))
    flags = [each for each in native._FLAGS if not each.startswith(("-O", "-march"))]
    subprocess.run([*native._compiler(), *flags, *for_it, str(native.FOLDER / "products.c")], check=True)
    made = made_file.read_text()
    assert all(name in made for name in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"))


@needs_pairs
def test_a_system_that_refuses_tiles_has_the_products_of_vectors(tiles: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("AMX_REFUSED", "1")
    library = ctypes.CDLL(str(shutil.copy(tiles, tmp_path / "refused.so")))
    assert library.tiles_from(0) == 0 and library.tiles_from(5) == 0


def test_weights_are_joined_without_a_copy_and_threads_do_not_matter() -> None:
    channels = module.panel_channels()
    weights = [noise(size, 40) for size in (2 * channels, channels, 30)]
    parts = [part for part in map(panels, weights) if part is not None]
    inputs = noise(5, 40)
    before = torch.cat([part(inputs, None) for part in parts], dim=-1)
    joined = PanelWeight.joined(parts)
    assert joined is not None and torch.equal(joined(inputs, None), before)
    assert torch.equal(torch.cat([part(inputs, None) for part in parts], dim=-1), before)
    whole = joined.panels.untyped_storage().data_ptr()
    assert all(part.panels.untyped_storage().data_ptr() == whole for part in parts)
    assert PanelWeight.joined(parts[::-1]) is None, "the first one would end within a panel"
    product, inputs, found = panels(noise(1501, 768)), noise(1, 768), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(product(inputs, None))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


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


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@torch.inference_mode()
def test_a_tensor_of_another_class_is_not_read_by_its_address(scheme: str | None) -> None:
    """It would end the process: there is nothing at the address. Inputs, biases and weights are left to torch."""
    weight, inputs, bias = noise(16, 64), noise(1, 64), noise(16)
    assert panels(Wrapped(weight)) is None and module.int8_panels(Wrapped(weight.to(torch.int8)), noise(16)) is None
    layer = nn.Linear(64, 16) if scheme is None else METHODS[scheme](weight, bias)
    layer.bias = nn.Parameter(bias)
    with PackedLinears(layer).in_use():
        wanted = layer(inputs)
        torch.testing.assert_close(layer(Wrapped(inputs)), wanted, atol=0.03, rtol=2**-6)
        layer._parameters["bias"] = Wrapped(bias)  # type: ignore[assignment]
        torch.testing.assert_close(layer(inputs), wanted, atol=0.03, rtol=2**-6)


@pytest.mark.parametrize("scheme", [None, "int4"])
def test_decoding_replays_it(scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured forwards and recorded rounds know the products, which are no operations of torch."""
    monkeypatch.setattr("specdec.execution.forwards.CAPTURE_AFTER", 3)
    model = tiny("llama", hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16)
    target = Target(model if scheme is None else quantize(model, scheme))
    linears = sum(isinstance(each, nn.Linear) or hasattr(each, "panels") for each in model.modules())
    for way in ("off", "rounds"):
        engine = Engine(target, max_length=64, recording=way)
        engine.submit([4, 5, 6], SamplingParams(max_new_tokens=20, ignore_eos=True))
        for _ in range(14):
            engine.step()
        with counted() as work:
            engine.step()
        # In a captured forward, gate and up are one product in each of two layers; so are query, key and value, where
        # keys fill whole panels.
        fewer = 2 * (1 if model.model.layers[0].self_attn.k_proj.out_features % module.panel_channels() else 3)
        joined = {linears, linears - fewer} if scheme is None else {linears}
        assert work.operations["panels"] in joined, way
