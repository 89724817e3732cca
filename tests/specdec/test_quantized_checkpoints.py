"""Quantized models that are saved, copied and changed: what is derived from the integers follows them everywhere."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from drafters.model import ModelDrafter
from specdec.execution import frozen
from specdec.execution.packing import plain_weights
from specdec.quantization import METHODS, quantization_of, quantize
from specdec.quantization.base import QuantizedLinear
from specdec.quantization.dispatch import KERNEL_ROWS, KERNEL_ROWS_FLOAT32
from specdec.quantization.int8 import Int8Linear, from_int8
from specdec.target.loading import load_model, load_tokenizer
from specdec.target.target import Target
from tests.models import tiny_model
from tests.specdec.quantized import quantized, small
from tests.verifiers.cases import complete

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


@pytest.mark.parametrize(
    ("dtype", "keep_copy", "assign"),
    [(torch.float32, True, False), (torch.bfloat16, True, True), (torch.bfloat16, False, False)],
)
def test_other_numbers_are_used_as_soon_as_they_are_loaded(dtype: torch.dtype, keep_copy: bool, assign: bool) -> None:
    """In inference mode, too: its tensors have no version to tell that they were changed."""
    for inference in (False, True):
        with torch.inference_mode(inference):
            layer, other = (filled(seed, dtype=dtype, keep_copy=keep_copy) for seed in (1, 2))
            before = outputs(layer)
            layer.load_state_dict(other.state_dict(), assign=assign)
            assert_same(outputs(layer), outputs(other))
            assert not any(torch.equal(a, b) for a, b in zip(before, outputs(layer), strict=True))


@torch.no_grad()
def test_numbers_changed_in_place() -> None:
    layer, other = filled(1), filled(2)
    outputs(layer)
    for change in (
        lambda: layer.weight.copy_(other.weight),
        lambda: layer.scale.copy_(other.scale),
        lambda: setattr(layer, "weight", torch.nn.Parameter(-other.weight, requires_grad=False)),
    ):
        change()
        frozen.weights_changed()
        expected = INPUTS[1].double() @ from_int8(layer.weight, layer.scale.double()).t() + layer.bias
        torch.testing.assert_close(outputs(layer)[1].double(), expected, rtol=2e-2, atol=2e-1)


def test_other_dtypes_and_devices_get_copies_of_their_own() -> None:
    layer = filled(1)
    outputs(layer)
    layer.double()
    expected = INPUTS[1].double() @ from_int8(layer.weight, layer.scale).t() + layer.bias
    torch.testing.assert_close(outputs(layer)[1], expected)
    assert outputs(layer.bfloat16())[1].dtype is torch.bfloat16
    assert layer.to("meta")(torch.empty(9, 32, dtype=torch.bfloat16, device="meta")).is_meta


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_pickles_and_copies_have_the_numbers_alone_and_compute_the_same(name: str) -> None:
    model = quantized(small(tied=True), name)
    expected, numbers = logits(model), sum(tensor.nbytes for tensor in model.state_dict().values())
    stored = pickle.dumps(model)
    assert len(stored) < 1.5 * numbers + 40_000, "what was derived from the integers is not stored"
    for other in (copy.deepcopy(model), pickle.loads(stored)):
        assert_same(logits(other), expected)
        assert quantization_of(other) == name


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(("llama_mqa_tied", name) for name in ("int8", "int4_compact", "fp8")),
        ("gpt2", "int8"),
        *(complete(name, "int4", strong=False) for name in ("llama", "qwen2", "gemma3", "phi3")),
    ],
)
def test_a_saved_model_is_read_back_as_it_was(architecture: str, name: str, tmp_path: Path) -> None:
    """From several files, and a second time."""
    model = quantized(tiny_model(architecture), name)
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
    model = quantize(small(tied=True), "int8_compact")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "specdec", "scheme": "int8_compact"}
    assert config["tie_word_embeddings"] is False, "the output layer has numbers of its own"
    # transformers itself reads it, now that it knows the scheme.
    assert quantization_of(AutoModelForCausalLM.from_pretrained(tmp_path)) == "int8_compact"
    load_tokenizer("bundled/target").save_pretrained(tmp_path)
    target = Target.from_pretrained(str(tmp_path), dtype="bfloat16", device="cpu")
    assert target.name == f"{tmp_path} in int8_compact" and target.dtype is torch.bfloat16
    assert isinstance(target.tokenizer, PreTrainedTokenizerFast)
    drafter = ModelDrafter.from_pretrained(str(tmp_path), dtype="bfloat16", device="cpu", shape=2)
    assert_same(logits(drafter.model), logits(target.model))
    assert load_model(str(tmp_path), dtype="float32", device="cpu").dtype is torch.float32


def test_what_is_stored_is_quantized_once(tmp_path: Path) -> None:
    quantize(small(), "int8").save_pretrained(tmp_path)
    assert quantization_of(load_model(str(tmp_path), quantization="int8", device="cpu")) == "int8"
    with pytest.raises(ValueError, match="quantized already"):
        load_model(str(tmp_path), quantization="int8_compact", device="cpu")
    with pytest.raises(ValueError, match="stored in int8; inflate"):
        load_model(str(tmp_path), inflate="110m", device="cpu")
    # A scheme of another version.
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"scheme": "int8"', '"scheme": "int2"'))
    with pytest.raises(ValueError, match=f"stored in 'int2', and this version reads {', '.join(METHODS)}"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize(("dtype", "keep_copy"), [(torch.float32, True), (torch.bfloat16, False)])
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
