"""Medusa heads: the checkpoint format."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.medusa import MedusaDrafter, MedusaHeads
from tests.drafters.medusa_heads import HIDDEN, VOCAB, random_heads


@pytest.mark.parametrize(("num_heads", "num_layers"), [(1, 1), (5, 1), (3, 2), (2, 0)])
def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path, num_heads: int, num_layers: int) -> None:
    heads = random_heads(num_heads, num_layers=num_layers)
    heads.save_pretrained(tmp_path)
    loaded = MedusaHeads.from_pretrained(tmp_path)
    assert (loaded.num_heads, loaded.num_layers, loaded.hidden_size, loaded.vocab_size) == (
        num_heads, num_layers, HIDDEN, VOCAB,
    )  # fmt: skip
    assert loaded.base_model == "some/base"
    hidden = torch.randn(4, HIDDEN)
    assert torch.equal(loaded(hidden), heads(hidden))
    assert torch.equal(loaded(hidden, 1), heads(hidden)[:1])


def test_the_tensors_have_the_published_names_and_shapes(tmp_path: Path) -> None:
    random_heads(2, num_layers=2).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    per_head = {
        "0.linear.weight": (HIDDEN, HIDDEN), "0.linear.bias": (HIDDEN,),
        "1.linear.weight": (HIDDEN, HIDDEN), "1.linear.bias": (HIDDEN,), "2.weight": (VOCAB, HIDDEN),
    }  # fmt: skip
    assert shapes == {f"{head}.{key}": shape for head in range(2) for key, shape in per_head.items()}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["medusa_num_heads"] == 2 and config["medusa_num_layers"] == 2


def test_layers_of_a_head_share_their_block(tmp_path: Path) -> None:
    random_heads(1, num_layers=2).save_pretrained(tmp_path)
    head = MedusaHeads.from_pretrained(tmp_path).heads[0]
    assert head[0] is head[1]
    hidden = torch.randn(3, HIDDEN)
    block, output = head[0].linear, head[2]
    once = hidden + torch.nn.functional.silu(hidden @ block.weight.T + block.bias)
    twice = once + torch.nn.functional.silu(once @ block.weight.T + block.bias)
    torch.testing.assert_close(head(hidden), twice @ output.weight.T)


def test_where_files_come_from_is_told_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_heads().save_pretrained(tmp_path / "inner")
    asked = []

    def download(repository: str, name: str, *, subfolder: str | None, **options: object) -> str:
        asked.append((repository, name, subfolder, options["revision"], options["token"], options["local_files_only"]))
        return str(tmp_path / "inner" / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    drafter = MedusaDrafter.from_pretrained(
        "some/heads", revision="v2", token="secret", subfolder="inner", local_files_only=True
    )
    assert drafter.heads.num_heads == 3
    given = ("inner", "v2", "secret", True)
    files = ("config.json", "medusa_lm_head.safetensors", "medusa_lm_head.safetensors", "config.json", "training.json")
    assert asked == [("some/heads", name, *given) for name in files]


def test_a_subfolder_of_a_folder(tmp_path: Path) -> None:
    random_heads(2).save_pretrained(tmp_path / "inner")
    assert MedusaHeads.from_pretrained(tmp_path, subfolder="inner").num_heads == 2
    with pytest.raises(ValueError, match=r"has no weights: there is neither medusa_lm_head\.safetensors nor"):
        MedusaHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_both_file_types_and_the_prefix_of_whole_models(tmp_path: Path, prefix: str, suffix: str) -> None:
    heads = random_heads()
    tensors = {prefix + key: tensor.clone().half() for key, tensor in heads.heads.state_dict().items()}
    if prefix:
        tensors["model.embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    file = tmp_path / f"medusa_lm_head.{suffix}"
    torch.save(tensors, file) if suffix == "pt" else save_file(tensors, file)
    # As an uploaded config says it, wrongly.
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 4}))
    for path in (tmp_path, file):
        loaded = MedusaHeads.from_pretrained(path)
        assert (loaded.num_heads, loaded.num_layers) == (3, 1)
        assert loaded.heads[0][1].weight.dtype == torch.float16, "the checkpoint's own dtype"
        assert torch.equal(loaded.heads[2][1].weight, heads.heads[2][1].weight.half())
    assert MedusaHeads.from_pretrained(tmp_path, dtype=torch.float32).heads[0][1].weight.dtype == torch.float32
