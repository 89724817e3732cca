"""Weights that do not fit, each other or the target: one sentence each, which names the tensor as the files do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from drafters.block import BlockDrafter
from drafters.eagle import EagleDrafter
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.eagle_files import save_eagle
from drafters.heads.mtp import MTPHead
from drafters.heads.mtp_files import save_mtp
from drafters.medusa_heads import MedusaHeads
from drafters.mtp import MTPDrafter
from specdec.modeling.target import Target
from tests.components import block_head, eagle_head, markov_head, medusa_heads
from tests.models import tiny_model
from tests.shapes import shapes_unchecked

VOCAB = 64
IDS = range(0, VOCAB, 2)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(vocab_size=VOCAB)


def saved_eagle3(model: PreTrainedModel, folder: Path) -> None:
    save_eagle(Eagle3Head.for_target(model, hidden_layers=(0, 1, 2), draft_ids=IDS), folder)


def saved_block(model: PreTrainedModel, folder: Path) -> None:
    block_head(model, draft_ids=torch.tensor(list(IDS))).save_pretrained(folder)


SAVED: dict[str, tuple[Callable[[PreTrainedModel, Path], object], Callable[[Path], object]]] = {
    "eagle": (lambda model, folder: save_eagle(eagle_head(model), folder), EagleDrafter.from_pretrained),
    "eagle3": (saved_eagle3, EagleDrafter.from_pretrained),
    "block": (saved_block, BlockDrafter.from_pretrained),
    "medusa": (lambda model, folder: medusa_heads(model).save_pretrained(folder), MedusaHeads.from_pretrained),
}


def cut(name: str) -> Callable[[dict[str, Tensor]], None]:
    """Leaves out a tensor's last row."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:-1].clone()

    return change


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def absolute(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def as_deepspec(tensors: dict[str, Tensor]) -> None:
    """The names without midlayer, and the norm missing that tells EAGLE-3 from EAGLE-1."""
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors["layers.0." + name.removeprefix("midlayer.")] = tensors.pop(name)
    del tensors["layers.0.hidden_norm.weight"]


def with_public_map(tensors: dict[str, Tensor]) -> None:
    """A block head's map as published heads have it, with tokens in place of differences."""
    ids = tensors.pop("draft_ids")
    tensors["d2t"] = ids
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("eagle", without("layers.0.mlp.up_proj.weight"), r"incomplete: the tensor layers\.0\.mlp\.up_proj\.weight is"),
        (
            "eagle",
            cut("layers.0.self_attn.o_proj.weight"),
            r"o_proj\.weight is for hidden states of width 31, and layers\.0\.mlp\.gate_proj\.weight reads 32 channels",
        ),
        ("eagle3", without("midlayer.hidden_norm.weight"), r"the tensor midlayer\.hidden_norm\.weight is missing$"),
        ("eagle3", as_deepspec, r"incomplete: the tensor layers\.0\.hidden_norm\.weight is missing$"),
        ("eagle3", cut("lm_head.weight"), "its output layer has 31 columns, and d2t or t2d names 32 tokens"),
        (
            "eagle3",
            absolute,
            r"its d2t holds tokens, and must hold differences.*store d2t - torch\.arange\(len\(d2t\)\)",
        ),
        ("block", with_public_map, r"its d2t holds tokens, and must hold differences.*store d2t - torch\.arange"),
        ("medusa", cut("1.1.weight"), r"unequal widths: 1\.1\.weight has the shape \[63, 32\] and .* \[64, 32\]$"),
    ],
)
def test_files_that_contradict_themselves(
    model: PreTrainedModel, kind: str, change: Callable[[dict[str, Tensor]], object], words: str, tmp_path: Path
) -> None:
    save, load = SAVED[kind]
    save(model, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=words) as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask_token_id": "x"}, r"mask_token_id='x' is no whole number: give the number of a token"),
        ({"hidden_layers": ("a",)}, r"\['a'\] are no numbers of hidden states: give hidden_layers="),
    ],
)
def test_options_that_are_no_numbers(
    model: PreTrainedModel, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    saved_block(model, tmp_path)
    with shapes_unchecked(), pytest.raises(ValueError, match=words):
        BlockDrafter.from_pretrained(tmp_path, **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "[]", r"config\.json holds no settings by name, but a list"),
        (
            lambda text: text.replace('"rope_type": "default"', '"rope_type": "odd"'),
            "rope_type .odd., which is unknown",
        ),
    ],
)
def test_a_config_that_describes_nothing(
    model: PreTrainedModel, change: Callable[[str], str], words: str, tmp_path: Path
) -> None:
    saved_eagle3(model, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(change(file.read_text()))
    with pytest.raises(ValueError, match=words):
        EagleDrafter.from_pretrained(tmp_path)


def test_a_markov_head_of_another_vocabulary(model: PreTrainedModel) -> None:
    """Its own table and the target's output layer, which it borrows, have different columns."""
    drafter = BlockDrafter(markov_head(model))
    for vocabulary in (VOCAB + 8, VOCAB + 2000):
        other = Target(tiny_model(vocab_size=vocabulary), name="other")
        words = rf"drafts 64 tokens and the target other has {vocabulary}: give a head that was trained on this target"
        with pytest.raises(ValueError, match=words):
            drafter.bind(other, max_batch_size=1, max_length=32)


def test_a_module_of_another_width(model: PreTrainedModel, tmp_path: Path) -> None:
    narrow: dict[str, Any] = model.config.to_dict() | {"hidden_size": 16, "head_dim": 4}
    save_mtp(MTPHead.for_target(type(model)(type(model.config)(**narrow))), tmp_path)
    drafter = MTPDrafter.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is 16 wide and the target's hidden states are 32 wide: give a module that"):
        drafter.bind(Target(model, name="target"), max_batch_size=1, max_length=32)
