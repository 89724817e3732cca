"""Loading: where files come from is told to all three readers, and which dtype ``auto`` means."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from drafters.model import ModelDrafter
from specdec import machine
from specdec.machine import Cpu
from specdec.target.loading import load, load_model, load_tokenizer
from specdec.target.target import Target

SOURCE = {
    "revision": "v2",
    "token": "secret",
    "cache_dir": "elsewhere",
    "local_files_only": True,
    "trust_remote_code": True,
    "subfolder": "inner",
}

FAST = Cpu(features=frozenset({"avx512_bf16"}))
SLOW = Cpu(features=frozenset({"avx2"}))


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    return LlamaForCausalLM(config).to(dtype)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint with a tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint")
    llama(torch.bfloat16).save_pretrained(path)
    load_tokenizer("bundled/target").save_pretrained(path)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> str:
    """A copy to change."""
    return str(shutil.copytree(saved, tmp_path, dirs_exist_ok=True))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What each of the three was given; they answer as if the hub had."""
    given: dict[str, dict[str, Any]] = {}
    answers = {
        AutoConfig: llama().config,
        AutoModelForCausalLM: llama(),
        AutoTokenizer: load_tokenizer("bundled/target"),
    }
    for reader, answer in answers.items():

        def read(path: str, name: str = reader.__name__, answer: object = answer, **options: Any) -> object:
            given[name] = options | {"path": path}
            return (answer, {}) if options.get("output_loading_info") else answer

        monkeypatch.setattr(reader, "from_pretrained", read)
    return given


def test_where_files_come_from_is_told_to_all_readers(calls: dict[str, dict[str, Any]]) -> None:
    target = Target.from_pretrained("some/model", device="cpu", attn_implementation="eager", **SOURCE)
    assert target.name == "some/model"
    assert set(calls) == {"AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"}
    for reader, options in calls.items():
        assert SOURCE.items() <= options.items(), reader
        assert options["path"] == "some/model"
        # The rest is for the model alone.
        assert ("attn_implementation" in options) is (reader == "AutoModelForCausalLM")


NORM, MORE = "model.norm.weight", "model.layers.1.input_layernorm.weight"


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
    model = llama()
    model.config.tie_word_embeddings = True
    type(model)(model.config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    besides = (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "medusa_head.0.1.weight",
        "model.mtp_layers.0.input_proj.weight",
        "model.layers.1.eh_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    )
    tensors |= {name: torch.ones(4) for name in besides}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(tmp_path), device="cpu")
    assert torch.equal(loaded.get_input_embeddings().weight, tensors["model.embed_tokens.weight"])


def test_a_head_in_place_of_a_model() -> None:
    with pytest.raises(ValueError, match=r"missing: .*embed_tokens.*of another model: .*fc\.weight.*its own drafter"):
        ModelDrafter.from_pretrained("bundled/eagle3")


@pytest.mark.parametrize(
    ("facts", "asked", "dtype", "reason"),
    [
        (FAST, "auto", torch.bfloat16, "auto: bfloat16"),
        (SLOW, "auto", torch.float32, "auto: float32, because this CPU"),
        (SLOW, "bfloat16", torch.bfloat16, "bfloat16, as asked for"),
        (FAST, torch.float32, torch.float32, "float32, as asked for"),
    ],
)
def test_auto_fits_the_machine(
    monkeypatch: pytest.MonkeyPatch, saved: Path, facts: Cpu, asked: str | torch.dtype, dtype: torch.dtype, reason: str
) -> None:
    monkeypatch.setattr(machine, "cpu", lambda: facts)
    target = Target.from_pretrained(str(saved), dtype=asked, device="cpu")
    assert target.dtype is target.model.config.dtype is dtype and target.dtype_reason.startswith(reason)
    # Whatever the dtype, the numbers are the checkpoint's.
    expected = llama(torch.bfloat16).state_dict()
    for key, tensor in target.model.state_dict().items():
        assert tensor.dtype is dtype and torch.equal(tensor, expected[key].to(dtype)), key


def test_a_checkpoint_whose_configuration_names_no_dtype(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """The weights are looked at; tables that are kept in float32 must not have been rounded on the way."""
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("dtype") == "bfloat16"
    file.write_text(json.dumps(config))
    for facts, dtype in ((SLOW, torch.float32), (FAST, torch.bfloat16)):
        monkeypatch.setattr(machine, "cpu", lambda facts=facts: facts)
        loaded = load(folder, device="cpu")
        assert loaded.model.dtype is dtype
        assert loaded.dtype_reason.startswith(f"auto: {machine.dtype_name(dtype)}")
        table = loaded.model.model.rotary_emb.inv_freq
        assert table.dtype is torch.float32
        assert torch.equal(table, llama().model.rotary_emb.inv_freq)


def test_a_model_that_does_not_fit_into_memory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "CUDA out of memory. Tried to allocate 112.00 MiB. GPU 1 has a total capacity of 79.11 GiB of which "
    error = torch.OutOfMemoryError(message + "64.00 MiB is free.")

    def to(self: Any, *args: Any) -> Any:
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "to", to)
    with pytest.raises(ValueError, match=r"cuda:1: 112 MiB asked for, 64 MiB free; give device_map='auto'"):
        load(str(saved), device="cpu")
