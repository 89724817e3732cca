"""Quantized layers and models: numbers, products, schemes that would not be faster; bytes, and what is saved."""

import copy
import itertools
import json
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from drafters.model import ModelDrafter
from drafters.reduced import cut
from specdec import ModelRunner, Target
from specdec.execution import frozen
from specdec.execution.packing import plain_weights
from specdec.machine import dtype_name
from specdec.native import native_library
from specdec.quantization import METHODS, quantization_of, quantize
from specdec.quantization import speed as checks
from specdec.quantization.base import QuantizedLinear, num_weights, rounded_to, weights_read
from specdec.quantization.fp8 import to_fp8
from specdec.quantization.int4 import GROUP, Int4Linear, from_int4, to_int4
from specdec.quantization.int8 import Int8Linear, to_int8
from specdec.quantization.speed import AUTO, MEASURED_FROM, check_fast, fastest, measure_row, obstacle
from specdec.target.loading import load_model, load_tokenizer
from tests.models import tiny_model
from tests.verifiers.cases import complete


def small(*, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return tiny_model("llama_mqa_tied" if tied else "llama", layers=2).to(dtype)


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
        numbers = layer.numbers(layer.weight, layer.scale.double())[:, :width]
        # In float32, inputs are rounded; weights are not, in any scheme.
        expected = inputs.bfloat16().double() @ numbers.T
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
    monkeypatch.setattr(checks, "chosen", lambda what, measure, default: measure() or default)
    return found


def test_a_slower_scheme_is_refused_before_the_work_unless_it_is_not_checked(measured: Mock, tmp_path: Path) -> None:
    """Less than a tenth is noise, and a scheme is refused only if it was slower both times: the machine may be busy."""
    said = "quantization='int4' is slower than bfloat16 .*32768 x 64 .* 0.75 ms, and 0.25 ms .*quantization_check=false"
    model = large()
    for found, refused in (([(1.0, 1.05)], False), ([(1.0, 2.0), (1.0, 0.9)], False), ([(0.25, 0.75)] * 2, True)):
        measured.side_effect = found
        with pytest.raises(ValueError, match=said) if refused else nullcontext():
            check_fast(model, "int4")
        assert measured.call_count == len(found)
        measured.reset_mock()
    measured.side_effect = itertools.repeat((1.0, 2.0))
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


def test_the_choice_changes_the_drafter_alone(tmp_path: Path, measured: Mock) -> None:
    """Left to the machine, the drafter is the one of the format by name; None, a stored one and a target's stay."""
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


def test_a_drafting_model_gets_the_format_that_is_faster_by_a_tenth_twice(measured: Mock) -> None:
    """Small ones, those that no kernel multiplies and those on a GPU stay as they are, and nothing is measured."""
    for shape, dtype, device in (
        ((64, 64), torch.bfloat16, "cpu"),
        ((1 << 20, 64), torch.float16, "cpu"),
        ((1 << 20, 64), torch.bfloat16, "cuda"),
    ):
        assert fastest(shape, dtype, device) == (None, "") and not measured.called
    for found, scheme in (
        ([(4.0, 2.0, 1.0)] * 2, "int4"),
        ([(4.0, 2.0, 1.9)] * 2, "int8"),  # int4 by less than a tenth: its drafts are worse
        ([(4.0, 3.8, 3.7)] * 2, None),
        ([(4.0, 2.0, 1.0), (4.0, 2.0, 1.9)], "int8"),
        ([(4.0, 2.0, 1.0), (4.0, 9.0, 9.0)], None),  # other work on the machine
    ):
        measured.side_effect = found
        chosen, said = fastest((100_000, 64), torch.bfloat16, "cpu")
        assert chosen == scheme and (said == "" if 9.0 in found[1] else "4.00 ms in bfloat16" in said)


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


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        *((name, "llama_mqa_tied") for name in METHODS),
        ("int4", "gpt2"),
        *(complete("int8", name, strong=False) for name in ("qwen3", "gemma3", "phi3")),
    ],
)
@torch.inference_mode()
def test_models_compute_with_the_numbers_that_they_store(architecture: str, name: str) -> None:
    """Inputs and outputs are rounded, by torch's products, too: logits come as near to those without any rounding."""
    tokens = torch.randint(64, (2, 10), generator=torch.Generator().manual_seed(0))
    model = quantize(tiny_model(architecture), name, check=False)
    assert not any(isinstance(module, nn.Linear) for module in model.modules()), "a tied output layer is one, too"
    found, original = model(tokens).logits, tiny_model(architecture)(tokens).logits
    assert not torch.equal(found, original)
    assert (found.argmax(-1) == original.argmax(-1)).float().mean() > (0.3 if "int4" in name else 0.7)
    assert rounded_to(model) is torch.bfloat16 and rounded_to(tiny_model(architecture)) is None
    with plain_weights():
        rounded, exact = model(tokens).logits, model.double()(tokens).logits
    least = (rounded - exact).square().mean().sqrt()
    assert least < 2**-7 * exact.std() and (found - exact).square().mean().sqrt() < 1.1 * least


def test_bytes_are_counted() -> None:
    model = small()
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    norms = 5 * 32
    before = weights_read(model)
    assert (before.weights, before.bytes) == (linear + norms, 2 * (linear + norms))
    assert Target(model).bytes_per_weight == 2.0
    outputs = sum(module.weight.shape[0] for module in model.modules() if isinstance(module, nn.Linear))
    target = Target(quantize(model, "int8"))
    runner = ModelRunner(target.model, max_batch_size=1, max_length=16)
    few = linear + 2 * outputs + 2 * norms
    assert runner.weights_read().bytes == few
    assert target.bytes_per_weight == pytest.approx(few / (linear + norms))
    # Layers x (K and V) x kv heads x head_dim x bfloat16.
    assert runner.cache.bytes_per_position == 2 * 2 * 2 * 8 * 2
    # Two int4 weights are in a byte; the C reads their scales in float32.
    model = quantize(small(), "int4")
    assert num_weights(model) == Target(model).num_parameters == small().num_parameters()
    layers = [module for module in model.modules() if isinstance(module, Int4Linear)]
    scales = sum(2 * 2 * layer.scale.numel() for layer in layers)
    read = weights_read(model)
    assert (read.weights, read.bytes) == (before.weights, linear / 2 + scales + 2 * norms)


def test_unknown_names_and_twice_are_refused(tmp_path: Path) -> None:
    for call in (quantize, lambda model, name: load_model("no/model", quantization=name)):
        with pytest.raises(ValueError, match=rf"quantization='int3': give one of {', '.join(METHODS)}"):
            call(small(), "int3")
    with pytest.raises(ValueError, match=r"quantization='int8': .* already"):
        quantize(quantize(small(), "int8"), "int8")
    quantize(small(), "int8").save_pretrained(tmp_path)
    assert quantization_of(load_model(str(tmp_path), quantization="int8", device="cpu")) == "int8"
    with pytest.raises(ValueError, match="quantized already"):
        load_model(str(tmp_path), quantization="int4", device="cpu")
    # A scheme of another version.
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"scheme": "int8"', '"scheme": "int2"'))
    with pytest.raises(ValueError, match=f"stored in 'int2', and this version reads {', '.join(METHODS)}"):
        load_model(str(tmp_path), device="cpu")


INPUTS = [torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)) for rows in (1, 11)]


def filled(seed: int, *, dtype: torch.dtype = torch.bfloat16) -> Int8Linear:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 32, generator=generator).to(dtype)
    return Int8Linear(weight, torch.randn(16, generator=generator).to(dtype))


def outputs(layer: Int8Linear) -> list[Tensor]:
    return [layer(inputs.to(layer.scale.dtype)) for inputs in INPUTS]


@torch.inference_mode()
def logits(model: PreTrainedModel) -> list[Tensor]:
    return [model(torch.arange(3, 3 + length)[None] % 64).logits for length in (2, 9)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.no_grad()
def write(layer: Int8Linear, other: Int8Linear) -> None:
    for name, tensor in other.state_dict().items():
        getattr(layer, name).copy_(tensor)
    frozen.weights_changed()


@pytest.mark.parametrize("inference", [False, True])
def test_other_numbers_are_used_at_once(inference: bool) -> None:
    """In inference mode, too: its tensors have no version to tell that they were changed."""
    loads = [
        lambda layer, other, assign=assign: layer.load_state_dict(other.state_dict(), assign=assign)
        for assign in (False, True)
    ]
    for change, dtype in itertools.product((*loads, write), (torch.float32, torch.bfloat16)):
        with torch.inference_mode(inference):
            layer, other = (filled(seed, dtype=dtype) for seed in (1, 2))
            before = outputs(layer)
            change(layer, other)
            assert_same(outputs(layer), outputs(other))
            assert not any(torch.equal(a, b) for a, b in zip(before, outputs(layer), strict=True))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors' memory, each once."""
    return sum({each.data_ptr(): each.nbytes() for each in (tensor.untyped_storage() for tensor in tensors)}.values())


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.skipif(native_library() is None, reason="no C compiler, or no AVX2")
def test_weights_are_in_memory_once_and_are_what_they_were_to_whoever_reads_them(name: str) -> None:
    """Panels take the place of the stored numbers until somebody reads, copies, saves, cuts, loads or moves these."""
    sizes: Any = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = quantize(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).bfloat16().eval(), name, check=False)
    layers: list[Any] = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    given = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    stored, size = [layer.weight.clone() for layer in layers], sum(tensor.nbytes for tensor in given.values())
    expected, few = logits(model), torch.tensor([3, 1])

    def same(state: dict[str, Tensor]) -> bool:
        return all(torch.equal(state[key], tensor) for key, tensor in given.items())

    readers: dict[str, Callable[[], bool]] = {
        "attribute": lambda: all(torch.equal(layer.weight, each) for layer, each in zip(layers, stored, strict=True)),
        "state": lambda: same(model.state_dict()),
        "deep copy": lambda: same(copy.deepcopy(model).state_dict()),
        "shallow copy": lambda: torch.equal(copy.copy(layers[0]).weight, stored[0]),
        "pickle": lambda: (
            len(data := pickle.dumps(model)) < 1.5 * size + 40_000 and same(pickle.loads(data).state_dict())
        ),
        "cut": lambda: torch.equal(cut(layers[0], few).weight, stored[0][few]),
        "loaded": lambda: not model.load_state_dict(given).missing_keys and same(model.state_dict()),
        "moved": lambda: same(model.float().bfloat16().state_dict()),
    }
    for reader, finds in readers.items():
        panels, _ = [layer.panels() for layer in layers], weights_read(model)  # which looks at sizes alone
        whole = bytes_of([*(each.panels for each in panels), *(layer._parameters["weight"] for layer in layers)])
        assert whole == sum(each.nbytes for each in stored), f"held twice before {reader}"
        assert finds(), reader
        assert_same(logits(model), expected)
        frozen.weights_changed()  # else panels stay a copy once somebody has looked


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(("llama_mqa_tied", name) for name in METHODS),
        ("gpt2", "int8"),
        *(complete(name, "int4", strong=False) for name in ("gemma3", "phi3")),
    ],
)
def test_a_saved_model_is_read_back_as_it_was(architecture: str, name: str, tmp_path: Path) -> None:
    """From several files, and a second time."""
    model = quantize(tiny_model(architecture), name, check=False)
    expected, state = logits(model), model.state_dict()
    for folder in (tmp_path, tmp_path / "again"):
        model.save_pretrained(folder, max_shard_size="10KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        # A configuration does not say which attention the model had.
        model = load_model(str(folder), device="cpu", attn_implementation="eager", quantization_check=False)
        assert quantization_of(model) == name and isinstance(model.get_output_embeddings(), QuantizedLinear)
        assert_same(logits(model), expected)
        for key, tensor in model.state_dict().items():
            assert torch.equal(state[key], tensor) and state[key].dtype is tensor.dtype, key


def test_a_stored_model_says_so_and_is_a_model(tmp_path: Path) -> None:
    """It has a name, may be cast, and drafts."""
    model = quantize(small(tied=True), "int8")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "specdec", "scheme": "int8"}
    assert config["tie_word_embeddings"] is False, "the output layer has numbers of its own"
    path = tmp_path / "config.json"  # as earlier versions called layers without copies
    path.write_text(path.read_text().replace('"scheme": "int8"', '"scheme": "int8_compact"'))
    # transformers itself reads it, now that it knows the scheme.
    assert quantization_of(AutoModelForCausalLM.from_pretrained(tmp_path)) == "int8"
    load_tokenizer("bundled/target").save_pretrained(tmp_path)
    target = Target.from_pretrained(str(tmp_path), dtype="bfloat16", device="cpu")
    assert target.name == f"{tmp_path} in int8" and target.dtype is torch.bfloat16
    assert isinstance(target.tokenizer, PreTrainedTokenizerFast)
    drafter = ModelDrafter.from_pretrained(str(tmp_path), dtype="bfloat16", device="cpu", shape=2)
    assert_same(logits(drafter.model), logits(target.model))
    assert load_model(str(tmp_path), dtype="float32", device="cpu").dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_pass_through(dtype: torch.dtype) -> None:
    """Heads may be trained on what a quantized model gives, after it has decoded."""
    layer = filled(1, dtype=dtype)
    with torch.inference_mode(), plain_weights():
        outputs(layer)
    for rows in INPUTS:
        inputs = rows.to(dtype, copy=True).requires_grad_()
        layer(inputs).sum().backward()
        torch.testing.assert_close(inputs.grad[0], layer.dequantized().sum(0), rtol=2e-2, atol=5e-2)
