"""Quantized models that are saved, copied and changed: what is derived from the integers follows them everywhere."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from drafters.model import ModelDrafter
from specdec.engine.engine import Engine
from specdec.execution import frozen
from specdec.execution.packing import PackedWeight, can_pack, plain_weights
from specdec.quantization import METHODS, quantization_of, quantize
from specdec.quantization.base import QuantizedLinear
from specdec.quantization.dispatch import KERNEL_ROWS, KERNEL_ROWS_FLOAT32
from specdec.quantization.int8 import Int8Linear, from_int8
from specdec.requests import SamplingParams
from specdec.target.loading import load, load_model
from specdec.target.target import Target
from tests.components import perturbed
from tests.models import tiny_model
from tests.specdec.quantized import quantized, small
from tests.verifiers.cases import complete

ARCHITECTURES = ["llama", "llama_mqa_tied", "qwen2", "gemma3", "phi3", "gpt2"]

# Through the kernel and through the copies.
INPUTS = [torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)) for rows in (1, KERNEL_ROWS_FLOAT32 + 3)]


def filled(seed: int, *, dtype: torch.dtype = torch.bfloat16, keep_copy: bool = True) -> Int8Linear:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 32, generator=generator).to(dtype)
    return Int8Linear(weight, torch.randn(16, generator=generator).to(dtype), keep_copy=keep_copy)


def outputs(layer: Int8Linear) -> list[Tensor]:
    return [layer(inputs.to(layer.scale.dtype)) for inputs in INPUTS]


@torch.inference_mode()
def logits(model: PreTrainedModel) -> list[Tensor]:
    return [model(torch.arange(3, 3 + length)[None] % 64).logits for length in (2, KERNEL_ROWS + 5)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("keep_copy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("assign", [False, True])
def test_other_numbers_are_used_as_soon_as_they_are_loaded(dtype: torch.dtype, keep_copy: bool, assign: bool) -> None:
    layer, other = (filled(seed, dtype=dtype, keep_copy=keep_copy) for seed in (1, 2))
    before = outputs(layer)
    layer.load_state_dict(other.state_dict(), assign=assign)
    assert_same(outputs(layer), outputs(other))
    assert not any(torch.equal(a, b) for a, b in zip(before, outputs(layer), strict=True))


def test_numbers_loaded_in_inference_mode() -> None:
    """Inference tensors have no version to tell that they were changed."""
    with torch.inference_mode():
        layer, other = filled(1), filled(2)
        outputs(layer)
        layer.load_state_dict(other.state_dict())
        assert_same(outputs(layer), outputs(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_numbers_changed_in_place(dtype: torch.dtype) -> None:
    layer, other = (filled(seed, dtype=dtype) for seed in (1, 2))
    outputs(layer)
    for change in (
        lambda: layer.weight.copy_(other.weight),
        lambda: layer.scale.copy_(other.scale),
        lambda: setattr(layer, "weight", torch.nn.Parameter(-other.weight, requires_grad=False)),
    ):
        change()
        frozen.weights_changed()
        expected = INPUTS[1].double() @ (layer.weight.double() * layer.scale.double()[:, None]).t() + layer.bias
        torch.testing.assert_close(outputs(layer)[1].double(), expected, rtol=2e-2, atol=2e-1)


def test_other_dtypes_and_devices_get_copies_of_their_own() -> None:
    layer = filled(1)
    outputs(layer)
    layer.double()
    expected = INPUTS[1].double() @ from_int8(layer.weight, layer.scale).t() + layer.bias
    torch.testing.assert_close(outputs(layer)[1], expected)
    assert outputs(layer.bfloat16())[1].dtype is torch.bfloat16
    assert layer.to("meta")(torch.empty(9, 32, dtype=torch.bfloat16, device="meta")).is_meta


def test_only_numbers_are_stored() -> None:
    layer = filled(1)
    outputs(layer)
    assert list(layer.state_dict()) == ["weight", "bias", "scale"]
    # Three integers' worth of integers would be the packed copy beside them.
    assert len(pickle.dumps(layer)) < 2 * layer.weight.numel() + 4096


@pytest.mark.parametrize("name", METHODS)
def test_pickles_and_copies_compute_the_same(name: str, tmp_path: Path) -> None:
    model = quantized(small(tied=True), name)
    expected = logits(model)
    torch.save(model, tmp_path / "model.pt")
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        assert_same(logits(other), expected)
        assert quantization_of(other) == name


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        complete(
            architecture, name, strong=architecture == "llama_mqa_tied" or (architecture, name) == ("gpt2", "int8")
        )
        for architecture in ARCHITECTURES
        for name in METHODS
    ],
)
def test_a_saved_model_is_read_back_as_it_was(architecture: str, name: str, tmp_path: Path) -> None:
    model = quantized(tiny_model(architecture), name)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    # A configuration does not say which attention the model had.
    loaded = load_model(str(tmp_path), device="cpu", attn_implementation="eager", quantization_check=False)
    assert quantization_of(loaded) == name
    assert sum(isinstance(module, QuantizedLinear) for module in loaded.modules()) == sum(
        isinstance(module, QuantizedLinear) for module in model.modules()
    )
    assert_same(logits(loaded), expected)
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor) and loaded.state_dict()[key].dtype is tensor.dtype, key
    loaded.save_pretrained(tmp_path / "again")
    again = load_model(str(tmp_path / "again"), device="cpu", attn_implementation="eager", quantization_check=False)
    assert_same(logits(again), expected)


def test_a_saved_bfloat16_model_in_several_files(tmp_path: Path) -> None:
    small(tied=True).save_pretrained(tmp_path / "original")
    model = load_model(str(tmp_path / "original"), dtype="bfloat16", device="cpu", quantization="int8")
    expected = logits(model)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_model(str(tmp_path), dtype="bfloat16", device="cpu")
    assert loaded.dtype is torch.bfloat16
    assert_same(logits(loaded), expected)
    # A quantized model is a model: it may be cast, and drafts as it did.
    assert load_model(str(tmp_path), dtype="float32", device="cpu").dtype is torch.float32
    assert loaded.float().dtype is torch.float32
    drafter = ModelDrafter.from_pretrained(str(tmp_path), dtype="bfloat16", device="cpu", shape=2)
    assert_same(logits(drafter.model), expected)


def test_the_folder_says_how_it_is_stored(tmp_path: Path) -> None:
    quantize(small(tied=True), "int8_compact").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "specdec", "scheme": "int8_compact"}
    assert config["tie_word_embeddings"] is False, "the output layer has numbers of its own"
    # transformers itself reads it, now that it knows the scheme.
    assert quantization_of(AutoModelForCausalLM.from_pretrained(tmp_path)) == "int8_compact"


def test_a_target_says_how_it_is_stored(tmp_path: Path) -> None:
    quantize(small(), "int8").save_pretrained(tmp_path)
    Target.from_pretrained("bundled/target", device="cpu").tokenizer.save_pretrained(tmp_path)
    target = Target.from_pretrained(str(tmp_path), device="cpu")
    assert target.name == f"{tmp_path} in int8"
    assert isinstance(target.tokenizer, PreTrainedTokenizerFast)


def test_models_that_share_a_configuration() -> None:
    first = small(tied=True)
    second = LlamaForCausalLM(first.config)
    quantize(first, "int8")
    assert quantization_of(second) is None and second.config.tie_word_embeddings
    assert {id(module.config) for module in first.modules() if hasattr(module, "config")} == {id(first.config)}


def test_what_is_stored_is_quantized_once(tmp_path: Path) -> None:
    quantize(small(), "int8").save_pretrained(tmp_path)
    assert quantization_of(load_model(str(tmp_path), quantization="int8", device="cpu")) == "int8"
    with pytest.raises(ValueError, match="quantized already"):
        load_model(str(tmp_path), quantization="int8_compact", device="cpu")
    with pytest.raises(ValueError, match="is stored in int8; inflate what it was made of"):
        load_model(str(tmp_path), inflate="110m", device="cpu")


def test_a_scheme_of_another_version(tmp_path: Path) -> None:
    quantize(small(), "int8").save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"scheme": "int8"', '"scheme": "int2"'))
    known = "int8, int8_compact, int4, int4_compact, fp8"
    with pytest.raises(ValueError, match=f"stored in 'int2', and this version reads {known}"):
        load(str(tmp_path), device="cpu")


def test_packed_copies_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = filled(1)
    if not can_pack(layer.scale):
        pytest.skip("this processor has no packed bfloat16 kernel")
    # It takes few rows, and reads no packed copies.
    monkeypatch.setattr("specdec.execution.few_rows.native_library", lambda: None)
    calls: list[int] = []
    call = PackedWeight.__call__
    monkeypatch.setattr(PackedWeight, "__call__", lambda *arguments: calls.append(1) or call(*arguments))
    packed = outputs(layer)
    assert calls
    calls.clear()
    with plain_weights():
        plain = outputs(layer)
        assert_same(outputs(copy.deepcopy(layer)), plain)
    assert not calls
    torch.testing.assert_close(plain, packed, rtol=2e-2, atol=2e-2)
    outputs(layer)
    assert calls, "they are used again"


@pytest.mark.parametrize("keep_copy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_pass_through(dtype: torch.dtype, keep_copy: bool) -> None:
    """Heads may be trained on what a quantized model gives, after it has decoded."""
    layer = filled(1, dtype=dtype, keep_copy=keep_copy)
    with torch.inference_mode(), plain_weights():
        outputs(layer)
    for rows in INPUTS:
        inputs = rows.to(dtype, copy=True).requires_grad_()
        layer(inputs).sum().backward()
        torch.testing.assert_close(inputs.grad[0], from_int8(layer.weight, layer.scale).sum(0), rtol=2e-2, atol=5e-2)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers_logging.disable_progress_bar()


def test_an_engine_sees_that_a_quantized_model_was_loaded_anew() -> None:
    """Its captured forwards multiply by copies of the integers."""
    first, second = quantize(small(), "int8"), quantize(perturbed(small().float(), 1.0).bfloat16(), "int8")
    engine, sampling = Engine(Target(first), max_length=128), SamplingParams(max_new_tokens=48)
    for _ in range(2):
        before = engine.generate([[1, 2, 3]], sampling)[0].token_ids
    first.load_state_dict(second.state_dict())
    wanted = Engine(Target(second), max_length=128).generate([[1, 2, 3]], sampling)[0].token_ids
    with pytest.raises(ValueError, match="weights_changed"):
        engine.generate([[1, 2, 3]], sampling)
    engine.weights_changed()
    assert engine.generate([[1, 2, 3]], sampling)[0].token_ids == wanted != before
