"""Models in GGUF files, written here by the package gguf: read by transformers into plain modules, or refused."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from drafters import ModelDrafter
from specdec import Engine, SamplingParams, Target, bundled, files, gguf_files
from specdec.target.loading import load, load_tokenizer
from tests.models import tiny_model
from verifiers.rejection import RejectionVerifier

gguf = pytest.importorskip("gguf")
Q8_0 = gguf.GGMLQuantizationType.Q8_0
TEMPLATE = "{{ messages[0]['content'] }} #"
VOCABULARY = json.loads(Path(bundled.resolve("bundled/target"), "tokenizer.json").read_text())["model"]


def model() -> PreTrainedModel:
    return tiny_model("qwen2", vocab_size=4096)


def write(
    path: Path, *, kind: str = "F32", arch: str = "qwen2", tokenizer: bool = True, told: Mapping[str, int] | None = None
) -> Path:
    """A file of ``model()``: matrices in a kind of ggml, all else in float32."""
    source = model()
    config, writer = source.config, gguf.GGUFWriter(path, arch)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}" if kind != "F32" else "ALL_F32"])
    sizes = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "vocab_size": config.vocab_size,
        "attention.head_count_kv": config.num_key_value_heads,
    }  # fmt: skip
    for name, size in sizes.items():
        writer.add_uint32(f"{arch}.{name}", size)
    for name, size in (told or {}).items():
        writer.add_uint16(name, size)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(sorted(VOCABULARY["vocab"], key=VOCABULARY["vocab"].get))
        writer.add_token_merges([" ".join(pair) for pair in VOCABULARY["merges"]])
        writer.add_eos_token_id(0)
        writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in source.state_dict().items():
        given = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if kind == "Q8_0" and in_blocks(tensor):
            writer.add_tensor(given, gguf.quants.quantize(tensor.numpy(), Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(given, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def in_blocks(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and tensor.shape[1] % 32 == 0


def test_weights_tokenizer_and_template_are_the_files(tmp_path: Path) -> None:
    """Numbers are the file's, in plain modules; a folder with one file is that file."""
    write(tmp_path / "tiny.gguf", kind="Q8_0")
    target = Target.from_pretrained(str(tmp_path / "tiny.gguf"), device="cpu", dtype="float32")
    assert re.fullmatch(r"Q8_0 file, (8|9)\.\d bits a weight, held as float32", target.dtype_reason)
    own = model()
    for name, tensor in own.state_dict().items():
        wanted = tensor
        if in_blocks(tensor):
            wanted = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), Q8_0), Q8_0))
        assert torch.equal(target.model.state_dict()[name], wanted), name
    assert {type(each) for each in target.model.modules()} == {type(each) for each in own.modules()}
    text = "def add(a, b):\n    return a + b"
    assert target.eos_token_ids == {0}
    assert target.tokenizer.decode(target.tokenizer(text)["input_ids"]) == text
    assert target.tokenizer.get_vocab() == load_tokenizer("bundled/target").get_vocab()
    assert target.tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False) == f"{text} #"
    again = load(str(tmp_path), device="cpu")  # bfloat16, or what this machine has in its place
    assert again.dtype_reason.endswith(f"held as {str(again.model.dtype).removeprefix('torch.')}")
    again.model.save_pretrained(tmp_path / "folder")  # nothing says any more that it was packed
    assert "quantization_config" not in json.loads((tmp_path / "folder" / "config.json").read_text())


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_blocks_are_the_numbers_of_their_own_package(kind: str) -> None:
    """Any bytes are blocks; Q5_0 is one of the kinds that are left to the package."""
    quant = gguf.GGMLQuantizationType[kind]
    size, stored = gguf.GGML_QUANT_SIZES[quant]
    data = np.random.default_rng(0).integers(0, 256, (3, 2000, 2 * stored), dtype=np.uint8)  # of three experts
    with np.errstate(all="ignore"):
        wanted, found = gguf.quants.dequantize(data, quant), gguf_files._dequantized(data, quant)
    assert wanted.shape == (3, 2000, 2 * size)
    np.testing.assert_array_equal(found, wanted)


def test_a_float32_file_is_a_drafter_and_requantized_its_own_target(tmp_path: Path) -> None:
    path, greedy = str(write(tmp_path / "tiny.gguf")), SamplingParams(max_new_tokens=12, ignore_eos=True)
    small = ModelDrafter.from_pretrained(path, device="cpu", dtype="float32")
    assert all(torch.equal(small.model.state_dict()[name], tensor) for name, tensor in model().state_dict().items())
    target = Target.from_pretrained(path, device="cpu", quantization="int8", quantization_check=False)
    assert target.dtype_reason.endswith("requantized to int8, computing in float32")
    with Engine(target, small, RejectionVerifier(), max_length=64) as engine:
        drafted, plain = (engine.generate([[5, 9, 2], [7] * 6], greedy, speculate=each) for each in (True, False))
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-64]), "no GGUF file, or is cut off"),
        (lambda path: write(path, arch="clip"), "architecture clip is not supported"),
        (lambda path: write(path, told={"split.count": 3}), "one of 3 parts"),
        (lambda path: write(path.with_name("other.gguf")) and path.parent, "2 GGUF files, give one, as other.gguf"),
        (lambda path: path.with_name("nothing.gguf"), "there is no such file"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_before_weights(change, words, tmp_path: Path, monkeypatch) -> None:
    path = write(tmp_path / "tiny.gguf")
    given = change(path)
    monkeypatch.setattr("specdec.target.loading._read", lambda *a, **k: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match=words) as caught:
        Target.from_pretrained(str(given if isinstance(given, Path) else path), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_or_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write(tmp_path / "tiny.gguf", tokenizer=False))
    assert Target.from_pretrained(path, device="cpu").tokenizer is None  # token ids alone, as from a folder
    assert Target.from_pretrained(path, device="cpu", tokenizer="bundled/target").tokenizer is not None
    with pytest.raises(ValueError, match=r"no tokenizer for .*: the file holds none; .* tokenizer=FOLDER"):
        load_tokenizer(path)
    monkeypatch.setattr(gguf_files, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'specdec-research\[gguf\]'"):
        load(path)


def test_names_on_the_hub_are_folders_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.MODELS, str(tmp_path))
    (tmp_path / "qwen-coder-0.5b").mkdir()
    model().save_pretrained(tmp_path / "a-model")
    assert bundled.resolve("Qwen/Qwen2.5-Coder-0.5B-Instruct") == str(tmp_path / "qwen-coder-0.5b")
    for name in ("Qwen/Other", "bundled/target", "gpt2", str(tmp_path / "a-model")):
        assert not bundled.resolve(name).startswith(str(tmp_path)) or name.startswith(str(tmp_path))
    assert Target.from_pretrained("owner/A-Model", device="cpu").name == "owner/A-Model"
