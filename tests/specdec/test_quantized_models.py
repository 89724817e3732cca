"""Quantized models: what they compute, speculation with them, their bytes, and what is saved and changed."""

import copy
import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from drafters.model import ModelDrafter
from drafters.reduced import cut
from specdec import ModelRunner, Target
from specdec.execution import frozen
from specdec.execution.packing import plain_weights
from specdec.native import native_library
from specdec.quantization import METHODS, quantization_of, quantize
from specdec.quantization.base import QuantizedLinear, num_weights, rounded_to, weights_read
from specdec.quantization.int4 import Int4Linear
from specdec.quantization.int8 import Int8Linear, from_int8
from specdec.target.loading import load_model, load_tokenizer
from tests.models import tiny_model
from tests.specdec.test_quantization import dequantized, quantized, small
from tests.verifiers.cases import complete


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        *((name, "llama_mqa_tied") for name in METHODS),
        ("int4", "gpt2"),
        *(complete("int8", name, strong=False) for name in ("qwen3", "gemma3", "phi3")),
    ],
)
@torch.inference_mode()
def test_models_are_their_dequantized_selves(architecture: str, name: str) -> None:
    tokens = torch.randint(64, (2, 10), generator=torch.Generator().manual_seed(0))
    model = quantized(tiny_model(architecture).double(), name)
    assert not any(isinstance(module, nn.Linear) for module in model.modules()), "a tied output layer is one, too"
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


@pytest.mark.parametrize(("dtype", "assign"), [(torch.float32, False), (torch.bfloat16, True)])
def test_other_numbers_are_used_as_soon_as_they_are_loaded(dtype: torch.dtype, assign: bool) -> None:
    """In inference mode, too: its tensors have no version to tell that they were changed."""
    for inference in (False, True):
        with torch.inference_mode(inference):
            layer, other = (filled(seed, dtype=dtype) for seed in (1, 2))
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


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors' memory, each once."""
    return sum({each.data_ptr(): each.nbytes() for each in (tensor.untyped_storage() for tensor in tensors)}.values())


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.skipif(native_library() is None, reason="no C compiler, or no AVX2")
def test_weights_are_in_memory_once_and_are_what_they_were_to_whoever_reads_them(name: str) -> None:
    """Panels take the place of the stored numbers until somebody reads, copies, saves, cuts, loads or moves these."""
    sizes: Any = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = quantized(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).bfloat16().eval(), name)
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
        torch.testing.assert_close(inputs.grad[0], from_int8(layer.weight, layer.scale).sum(0), rtol=2e-2, atol=5e-2)
