"""Loading: bundled models, checkpoints from anywhere, and those that other libraries have quantized."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from drafters import NGramDrafter
from specdec import Engine, SamplingParams, Target, bundled, dtypes, machine, memory
from specdec.machine import Cpu
from specdec.quantization import checkpoint, quantize
from specdec.quantization.base import weights_read
from specdec.target.loading import load, load_model, load_tokenizer
from tests.models import tiny_model
from verifiers.rejection import RejectionVerifier

FAST = Cpu(features=frozenset({"avx512_bf16"}))
SLOW = Cpu(features=frozenset({"avx2"}))
NORM, MORE = "model.norm.weight", "model.layers.1.input_layernorm.weight"


def test_files_are_those_that_were_installed_and_a_wrong_name_lists_the_right_ones() -> None:
    assert (bundled.FOLDER / bundled.SUMS).read_text() == bundled.checksums()
    assert sum(path.stat().st_size for path in bundled.files()) <= bundled.MOST_BYTES
    assert {path.parent.name for path in bundled.files()} == set(bundled.NAMES) >= {"target", "drafter", "medusa"}
    with pytest.raises(ValueError, match=r"'eagle'.* bundled/drafter, "):
        bundled.resolve("bundled/eagle")


def llama(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny_model(layers=1).to(dtype)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    llama(torch.bfloat16).save_pretrained(path)
    load_tokenizer("bundled/target").save_pretrained(path)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(saved, tmp_path, dirs_exist_ok=True))


def test_a_folder_without_a_tokenizer_takes_tokens_alone(folder: str) -> None:
    for name in ("tokenizer.json", "special_tokens_map.json"):
        (Path(folder) / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match="no tokenizer for"):  # some of its files are there, so it has one
        Target.from_pretrained(folder, dtype="float32", device="cpu")
    (Path(folder) / "tokenizer_config.json").unlink()
    bare = Target.from_pretrained(folder, dtype="float32", device="cpu")
    assert bare.tokenizer is None
    with Engine(bare, max_length=32) as engine:
        (done,) = engine.generate([[5, 9, 2]], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert len(done.token_ids) == 8 and done.text == ""


def test_where_files_come_from_is_told_to_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"revision": "v2", "token": "secret", "cache_dir": "elsewhere", "local_files_only": True}
    source |= {"trust_remote_code": True, "subfolder": "inner"}
    model, tokenizer = llama(), load_tokenizer("bundled/target")
    readers = {AutoConfig: model.config, AutoModelForCausalLM: (model, {}), AutoTokenizer: tokenizer}
    for reader, answer in readers.items():
        monkeypatch.setattr(reader, "from_pretrained", Mock(return_value=answer))
    target = Target.from_pretrained("some/model", device="cpu", attn_implementation="eager", **source)
    assert target.name == "some/model"
    for reader in readers:
        (path,), options = reader.from_pretrained.call_args
        assert path == "some/model" and source.items() <= options.items(), reader
        # The rest is for the model alone.
        assert ("attn_implementation" in options) is (reader is AutoModelForCausalLM)


def test_tensors_that_do_not_make_the_model(folder: str) -> None:
    """transformers draws what is missing at random and goes on."""
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    for changed, words in (
        ({name: tensor for name, tensor in tensors.items() if name != NORM}, f"missing: .*{NORM}"),
        (tensors | {NORM: tensors[NORM][1:].clone()}, rf"another shape: .*{NORM} \[31\] in place of \[32\]"),
        (tensors | {MORE: torch.ones(32)}, f"of another model: .*{MORE}"),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=words):
            Target.from_pretrained(folder, device="cpu")


def test_tensors_that_may_be_missing_or_superfluous(tmp_path: Path) -> None:
    """A tied output layer, a computed table, and the heads that are stored with their target."""
    tiny_model("llama_mqa_tied", layers=1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    besides = ["layers.0.self_attn.rotary_emb.inv_freq", "mtp_layers.0.input_proj.weight"]
    besides += ["layers.1.eh_proj.weight", "layers.1.mlp.up_proj.weight"]
    tensors |= {name: torch.ones(4) for name in ("medusa_head.0.1.weight", *(f"model.{name}" for name in besides))}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(tmp_path), device="cpu")
    assert torch.equal(loaded.get_input_embeddings().weight, tensors["model.embed_tokens.weight"])


def test_auto_fits_the_machine(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    expected = llama(torch.bfloat16).state_dict()
    for facts, library, dtype, reason in (
        (FAST, None, torch.bfloat16, "auto: bfloat16"),
        (SLOW, None, torch.float32, "auto: float32, because this CPU"),
        (SLOW, object(), torch.bfloat16, "auto: bfloat16"),
    ):
        monkeypatch.setattr(machine, "cpu", lambda facts=facts: facts)
        monkeypatch.setattr(dtypes, "native_library", lambda library=library: library)
        target = Target.from_pretrained(str(saved), device="cpu")
        assert target.dtype is target.model.config.dtype is dtype and target.dtype_reason.startswith(reason)
        for key, tensor in target.model.state_dict().items():
            assert tensor.dtype is dtype and torch.equal(tensor, expected[key].to(dtype)), key


def test_a_checkpoint_whose_configuration_names_no_dtype(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """The weights are looked at; tables that are kept in float32 must not have been rounded on the way."""
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("dtype") == "bfloat16"
    file.write_text(json.dumps(config))
    monkeypatch.setattr(machine, "cpu", lambda: FAST)
    loaded = load(folder, device="cpu")
    assert loaded.model.dtype is torch.bfloat16 and loaded.dtype_reason.startswith("auto: bfloat16")
    table = loaded.model.model.rotary_emb.inv_freq
    assert table.dtype is torch.float32 and torch.equal(table, llama().model.rotary_emb.inv_freq)


def test_other_libraries_checkpoints_need_them_and_are_not_quantized_again(folder: str, monkeypatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("the weights were read"))
    file = Path(folder) / "config.json"
    config, settings = json.loads(file.read_text()), {"quant_method": "gptq", "bits": 4}

    def refused(settings: dict[str, Any], message: str, **options: Any) -> None:
        file.write_text(json.dumps(config | {"quantization_config": settings}))
        with pytest.raises(ValueError, match=message) as caught:
            load(folder, **options)
        assert folder in str(caught.value) and "\n" not in str(caught.value)

    monkeypatch.setattr(checkpoint, "find_spec", lambda module: None)
    refused(settings, r"by gptq, and gptqmodel and optimum .*-research\[gptq\]'")
    refused({"load_in_8bit": True}, r"by bitsandbytes, and bitsandbytes")
    monkeypatch.setattr(checkpoint, "find_spec", lambda module: object())
    for option, value in (("quantization", "int8"), ("inflate", "110m")):
        refused(settings, f"quantized by gptq already; leave {option}='{value}' out", **{option: value})
    model = tiny_model()
    model.config.quantization_config = settings
    with pytest.raises(ValueError, match=r"quantization='int8': .* by gptq already"):
        quantize(model, "int8")


def _with_compressed_tensors(model: PreTrainedModel, folder: str) -> None:
    from compressed_tensors import compressors, quantization

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = quantization.QuantizationConfig(
        config_groups=groups, ignore=["lm_head"], format="pack-quantized", quantization_status="frozen"
    )
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            grouped: Any = module.weight.detach().view(module.weight.shape[0], -1, 16)
            module.weight_scale.data.copy_(grouped.abs().amax(-1) / 7)
    compressor = compressors.ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # what the library warns about is its own, and changes with its versions
def test_a_quantized_checkpoint_decodes_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = tiny_model("llama", vocab_size=64, layers=1)
    full = weights_read(model)
    _with_compressed_tensors(model, str(tmp_path))
    target = Target(load(str(tmp_path), device="cpu").model)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    tokens = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(target.model(tokens).logits, own(tokens).logits)
    prompts, greedy = [[1, 2, 3, 1, 2], [7], [9, 8] * 10], SamplingParams(max_new_tokens=12)
    with Engine(target, NGramDrafter(4), RejectionVerifier(), max_batch_size=2, max_length=64) as engine:
        plain = [done.token_ids for done in engine.generate(prompts, greedy, speculate=False)]
        assert [done.token_ids for done in engine.generate(prompts, greedy)] == plain
    assert weights_read(target.model).weights >= full.weights * 0.99


@pytest.mark.parametrize("room", [True, False])
def test_weights_of_a_cast_wait_in_files_without_a_name(saved, room, tmp_path, monkeypatch) -> None:
    """So panels may take their place in memory; they can be written to. Without room on the disk nothing changes."""
    monkeypatch.setattr(memory, "_LEAST_ON_DISK", 1)
    monkeypatch.setattr(memory, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(memory, "native_library", object)
    if not room:
        monkeypatch.setattr(memory, "save_file", Mock(side_effect=OSError(28, "No space left on device")))
    model, clean = load(str(saved), dtype="float32", device="cpu").model, memory.clean_files()
    weights = [each.weight for each in model.modules() if isinstance(each, torch.nn.Linear)]
    assert weights and {any(first <= each.data_ptr() < last for first, last in clean) for each in weights} == {room}
    own = llama(torch.bfloat16).float().state_dict()
    assert all(torch.equal(each, own[name]) for name, each in model.state_dict().items())
    with torch.no_grad():
        weights[0].add_(1)
    assert not list(tmp_path.iterdir())
