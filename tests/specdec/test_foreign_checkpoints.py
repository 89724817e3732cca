"""Checkpoints that other libraries have quantized: loaded as transformers loads them, or refused in one sentence."""

import importlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from drafters.ngram import NGramDrafter
from specdec.engine.engine import Engine
from specdec.quantization import checkpoint, quantize
from specdec.quantization.base import weights_read
from specdec.requests import SamplingParams
from specdec.target.loading import load
from specdec.target.target import Target
from tests.models import tiny_model
from verifiers.rejection import RejectionVerifier

PROMPTS = [[1, 2, 3, 1, 2], [7], [9, 8] * 10]


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[dict[str, Any]], str]:
    """Makes a checkpoint whose configuration says that it is quantized; its weights are not."""
    tiny_model().save_pretrained(tmp_path)

    def make(settings: dict[str, Any]) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
        return str(tmp_path)

    return make


def test_a_missing_package_is_named_before_weights_are_read(
    stored: Callable[[dict[str, Any]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "find_spec", lambda module: None)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("the weights were read"))
    for settings, message in (
        ({"quant_method": "gptq", "bits": 4}, r"by gptq, and gptqmodel and optimum .*-research\[gptq\]'"),
        ({"load_in_8bit": True}, r"by bitsandbytes, and bitsandbytes"),
        ({"quant_method": "torchao"}, r"torchao.*-research\[torchao\]'"),
    ):
        folder = stored(settings)
        with pytest.raises(ValueError, match=message) as caught:
            load(folder)
        assert folder in str(caught.value) and "\n" not in str(caught.value)


def test_our_own_changes_of_weights_are_refused(
    stored: Callable[[dict[str, Any]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "find_spec", lambda module: object())
    settings = {"quant_method": "gptq", "bits": 4}
    for option, value in (("quantization", "int8"), ("inflate", "110m")):
        with pytest.raises(ValueError, match=f"quantized by gptq already; leave {option}='{value}' out"):
            load(stored(settings), **{option: value})
    model = tiny_model()
    model.config.quantization_config = settings
    with pytest.raises(ValueError, match=r"quantization='int8': .* by gptq already"):
        quantize(model, "int8")


class PackedLinear(nn.Module):
    """As GPTQ's layers are: four bits per weight in integers that are buffers, with a scale per group of 16."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.register_buffer("qweight", torch.zeros(inputs // 8, outputs, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(inputs // 16, outputs, dtype=torch.float16))


def test_packed_buffers_count_as_weights() -> None:
    model = tiny_model()
    before = weights_read(model)
    model.model.layers[0].mlp.up_proj = PackedLinear(32, 48)
    after = weights_read(model)
    assert after.weights == before.weights
    assert before.bytes - after.bytes == 32 * 48 * 4 - (32 * 48 // 2 + 2 * 48 * 2)


def wide_model() -> PreTrainedModel:
    """As ``tiny_model``, with layers wide enough for groups of 64 weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=64, **sizes, bos_token_id=None, eos_token_id=None)
    return AutoModelForCausalLM.from_config(config).float().eval()


def _with_compressed_tensors(model: PreTrainedModel, folder: str) -> None:
    quantization = importlib.import_module("compressed_tensors.quantization")
    compressors = importlib.import_module("compressed_tensors.compressors")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config = quantization.QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status="frozen",
    )
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            grouped: Any = module.weight.detach().view(module.weight.shape[0], -1, 32)
            module.weight_scale.data.copy_(grouped.abs().amax(-1) / 7)
    compressor = compressors.ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def _with_torchao(model: PreTrainedModel, folder: str) -> None:
    torchao = importlib.import_module("torchao.quantization")
    config = importlib.import_module("transformers").TorchAoConfig(torchao.Int8WeightOnlyConfig(version=2))
    _quantized_on_loading(model, folder, config)


def _with_bitsandbytes(model: PreTrainedModel, folder: str) -> None:
    config = importlib.import_module("transformers").BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32
    )
    _quantized_on_loading(model, folder, config)


def _quantized_on_loading(model: PreTrainedModel, folder: str, config: Any) -> None:
    whole = f"{folder}/whole"
    model.save_pretrained(whole)
    options = {"dtype": torch.float32, "device_map": {"": "cpu"}, "quantization_config": config}
    AutoModelForCausalLM.from_pretrained(whole, **options).save_pretrained(folder)


LIBRARIES = {
    "compressed_tensors": _with_compressed_tensors,
    "torchao": _with_torchao,
    "bitsandbytes": _with_bitsandbytes,
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # what these libraries warn about is theirs, and changes with their versions
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_quantized_checkpoint_decodes_as_it_is(library: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(library)
    model = wide_model()
    full = weights_read(model)
    LIBRARIES[library](model, str(tmp_path))

    target = Target(load(str(tmp_path), device="cpu").model)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    tokens = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(target.model(tokens).logits, own(tokens).logits)
    greedy = SamplingParams(max_new_tokens=12)
    with Engine(target, NGramDrafter(4), RejectionVerifier(), max_batch_size=2, max_length=64) as engine:
        plain = [done.token_ids for done in engine.generate(PROMPTS, greedy, speculate=False)]
        assert [done.token_ids for done in engine.generate(PROMPTS, greedy)] == plain
    read = weights_read(target.model)
    assert read.weights >= full.weights * 0.99
    if library != "compressed_tensors":  # on a CPU it unpacks the weights when they are first used
        assert read.bytes < full.bytes / 2
