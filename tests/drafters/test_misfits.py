"""Weights that do not fit, each other or the target: one sentence each, which names the tensor as the files do."""

import json
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
from drafters.heads.eagle import Eagle3Head
from drafters.heads.eagle_files import save_eagle
from drafters.heads.mtp import MTPHead
from drafters.heads.mtp_files import load_mtp, save_mtp
from drafters.medusa import MedusaHeads
from drafters.mtp import MTPDrafter
from specdec.drafting.builders import ExpansionTree
from specdec.engine import Engine
from specdec.interfaces import Sizes
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.components import block_head, eagle_head, markov_head, medusa_heads
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from verifiers.rejection import RejectionVerifier

VOCAB = 64
IDS = range(0, VOCAB, 2)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(vocab_size=VOCAB)


def saved_eagle3(model: PreTrainedModel, folder: Path) -> None:
    save_eagle(Eagle3Head.for_target(model, hidden_layers=(0, 1, 2), draft_ids=IDS), folder)


def saved_mtp(model: PreTrainedModel, folder: Path) -> None:
    save_mtp(MTPHead.for_target(model), folder)


def saved_block(model: PreTrainedModel, folder: Path) -> None:
    block_head(model, draft_ids=torch.tensor(list(IDS))).save_pretrained(folder)


SAVED: dict[str, tuple[Callable[[PreTrainedModel, Path], object], Callable[[Path], object]]] = {
    "eagle": (lambda model, folder: save_eagle(eagle_head(model), folder), EagleDrafter.from_pretrained),
    "eagle3": (saved_eagle3, EagleDrafter.from_pretrained),
    "block": (saved_block, BlockDrafter.from_pretrained),
    "eagle3_fc_norm": (
        lambda model, folder: save_eagle(Eagle3Head.for_target(model, hidden_layers=(0, 1, 2), norm_each=True), folder),
        EagleDrafter.from_pretrained,
    ),
    "medusa": (lambda model, folder: medusa_heads(model).save_pretrained(folder), MedusaHeads.from_pretrained),
}


def spoilt(name: str) -> Callable[[dict[str, Tensor]], object]:
    """Makes one of a tensor's weights NaN."""
    return lambda tensors: tensors[name].view(-1)[-1:].fill_(torch.nan)


def infinite(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"][0, 0] = -torch.inf


def longer_marks(tensors: dict[str, Tensor]) -> None:
    """The marks of a larger vocabulary, and the same tokens marked."""
    tensors["t2d"] = torch.cat([tensors["t2d"], torch.zeros(2000, dtype=torch.bool)])


def cut(name: str) -> Callable[[dict[str, Tensor]], None]:
    """Leaves out a tensor's last row."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:-1].clone()

    return change


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def with_one_more(tensors: dict[str, Tensor]) -> None:
    tensors["odd.weight"] = torch.ones(2)


def absolute(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def as_deepspec(tensors: dict[str, Tensor]) -> None:
    """The names without midlayer, and the norm missing that tells EAGLE-3 from EAGLE-1."""
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors["layers.0." + name.removeprefix("midlayer.")] = tensors.pop(name)
    del tensors["layers.0.hidden_norm.weight"]


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("eagle", without("layers.0.mlp.up_proj.weight"), r"incomplete: the tensor layers\.0\.mlp\.up_proj\.weight is"),
        (
            "eagle",
            cut("layers.0.self_attn.o_proj.weight"),
            r"o_proj\.weight is for hidden states of width 31, and layers\.0\.mlp\.gate_proj\.weight reads 32 channels",
        ),
        ("eagle3_fc_norm", without("fc_norm.1.weight"), r"the tensor fc_norm\.1\.weight is missing$"),
        ("block", with_one_more, r"holds the tensor odd\.weight, which"),
        ("medusa", without("1.0.linear.bias"), r"the tensor 1\.0\.linear\.bias is missing"),
        (
            "mtp",
            without("mtp.layers.0.mlp.up_proj.weight"),
            r"the tensor mtp\.layers\.0\.mlp\.up_proj\.weight is missing$",
        ),
        ("mtp", spoilt("mtp.fc.weight"), r"the tensor mtp\.fc\.weight holds NaN or infinity"),
        ("mtp", cut("mtp.norm.weight"), r"mtp\.norm\.weight has the shape \[31\]"),
        ("eagle3", as_deepspec, r"incomplete: the tensor layers\.0\.hidden_norm\.weight is missing$"),
        ("eagle3", cut("lm_head.weight"), "its output layer has 31 columns, and d2t or t2d names 32 tokens"),
        (
            "eagle3",
            absolute,
            r"its d2t holds tokens, and must hold differences.*store d2t - torch\.arange\(len\(d2t\)\)",
        ),
        ("eagle3", infinite, r"the tensor fc\.weight holds NaN or infinity"),
        ("block", spoilt("layers.0.mlp.up_proj.weight"), r"the tensor layers\.0\.mlp\.up_proj\.weight holds NaN"),
        ("medusa", spoilt("0.0.linear.bias"), r"the tensor 0\.0\.linear\.bias holds NaN or infinity"),
    ],
)
def test_files_that_contradict_themselves(
    model: PreTrainedModel, kind: str, change: Callable[[dict[str, Tensor]], object], words: str, tmp_path: Path
) -> None:
    save, load = SAVED[kind] if kind != "mtp" else (saved_mtp, lambda folder: load_mtp(folder, model))
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
        ({"hidden_layers": ("a",)}, r"^hidden_layers=\('a',\): give the numbers of hidden states"),
        ({"hidden_layers": 3}, "^hidden_layers=3: give the numbers of hidden states"),
    ],
)
def test_options_that_are_no_numbers(
    model: PreTrainedModel, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    saved_block(model, tmp_path / "block")
    saved_eagle3(model, tmp_path / "eagle3")
    with shapes_unchecked():  # the annotations' check would refuse them, too
        with pytest.raises(ValueError, match=words):
            BlockDrafter.from_pretrained(tmp_path / "block", **options)
        if "hidden_layers" in options:
            with pytest.raises(ValueError, match=words):
                EagleDrafter.from_pretrained(tmp_path / "eagle3", **options)
            with pytest.raises(ValueError, match=words):
                EagleDrafter(eagle_head(model), **options)


@pytest.mark.parametrize(
    ("kind", "file", "changes", "words"),
    [
        (
            "eagle3",
            "specdec.json",
            {"hidden_layers": "abc"},
            r"its specdec\.json has hidden_layers='abc': correct it to a",
        ),
        (
            "deepspec",
            "config.json",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "2, 16, 29"}},
            r"config\.json has eagle_aux_hidden_state_layer_ids='2, 16, 29': correct it",
        ),
        ("deepspec", "config.json", {"eagle_config": "x"}, r"eagle_config='x': it must hold settings by name"),
        (
            "eagle3",
            "config.json",
            {"num_attention_heads": "x", "head_dim": None},
            "num_attention_heads='x': give a whole",
        ),
        ("eagle3", "config.json", {"rms_norm_eps": "x"}, r"cannot be used: Validation error for field 'rms_norm_eps'"),
        ("block", "config.json", {"block_size": "x"}, r"config\.json has block_size='x': give a whole number"),
    ],
)
def test_settings_of_the_wrong_type(
    model: PreTrainedModel, kind: str, file: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save, load = SAVED["eagle3" if kind == "deepspec" else kind]
    save(model, tmp_path)
    if kind == "deepspec":  # without our own file, which comes first
        (tmp_path / "specdec.json").unlink()
    stored = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(stored | changes))
    with shapes_unchecked(), pytest.raises(ValueError, match=words) as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)


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
            drafter.bind(other, Sizes(max_batch_size=1, max_length=32))


def test_a_module_of_another_width(model: PreTrainedModel, tmp_path: Path) -> None:
    narrow: dict[str, Any] = model.config.to_dict() | {"hidden_size": 16, "head_dim": 4}
    save_mtp(MTPHead.for_target(type(model)(type(model.config)(**narrow))), tmp_path)
    drafter = MTPDrafter.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is 16 wide and the target's hidden states are 32 wide: give a module that"):
        drafter.bind(Target(model, name="target"), Sizes(max_batch_size=1, max_length=32))


@pytest.fixture(scope="module")
def larger() -> Target:
    return Target(tiny_model(vocab_size=VOCAB + 2000), name="larger")


@pytest.mark.parametrize(
    ("kind", "options"), [("eagle", {}), ("eagle3", {"embeddings": "target"}), ("block", {"mask_token_id": 1})]
)
def test_heads_that_borrow_from_a_target_of_another_vocabulary(
    model: PreTrainedModel, larger: Target, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """No tensor contradicts the target: only what the files say of the vocabulary, or the length of t2d."""
    SAVED[kind][0](model, tmp_path)
    drafter = (BlockDrafter if kind == "block" else EagleDrafter).from_pretrained(tmp_path, **options)
    with pytest.raises(ValueError, match="64 tokens and the target larger has 2064: give a head that was trained"):
        drafter.bind(larger, Sizes(max_batch_size=1, max_length=32))


def test_a_module_of_another_vocabulary(model: PreTrainedModel, larger: Target, tmp_path: Path) -> None:
    saved_mtp(model, tmp_path)
    with pytest.raises(
        ValueError, match="is for a vocabulary of 64 tokens and the target's has 2064: give a module that"
    ):
        MTPDrafter.from_pretrained(tmp_path).bind(larger, Sizes(max_batch_size=1, max_length=32))


def test_marks_of_another_vocabulary(model: PreTrainedModel, tmp_path: Path) -> None:
    """The length of t2d is the only thing that tells; the tokens that it marks all exist."""
    saved_eagle3(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    longer_marks(tensors)
    own = tensors | {"embed_tokens.weight": torch.ones(VOCAB, model.config.hidden_size)}
    for stored, there in ((tensors, False), (own, True)):
        save_file(
            {key: each for key, each in stored.items() if there or key != "embed_tokens.weight"},
            tmp_path / "model.safetensors",
        )
        with pytest.raises(ValueError, match="2064"):
            EagleDrafter.from_pretrained(tmp_path).bind(Target(model, name="t"), Sizes(max_batch_size=1, max_length=32))


def test_a_module_that_is_not_there(model: PreTrainedModel, tmp_path: Path) -> None:
    """Qwen's names share a prefix among modules: layers of others are left out, and one that is missing is named."""
    saved_mtp(model, tmp_path)
    file = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="has no MTP module 1: it has 0, give module=0 or another checkpoint"):
        load_mtp(tmp_path, model, module=1)
    tensors = load_file(file)
    second = {key.replace("layers.0", "layers.1"): each + 1 for key, each in tensors.items() if "layers.0" in key}
    save_file(tensors | second, file)
    first, other = (load_mtp(tmp_path, model, module=module).state_dict() for module in (0, 1))
    assert first.keys() == other.keys()
    for key, value in first.items():
        torch.testing.assert_close(other[key], value + 1 if ".layers.0." in key else value, rtol=0, atol=0)


def test_a_tree_larger_than_the_room_that_is_left(model: PreTrainedModel) -> None:
    """Nothing to refuse: a slot has positions for all nodes of a tree beyond ``max_length``, until its last token."""
    target, prompt, sampling = Target(model, name="t"), [1, 2, 3], SamplingParams(max_new_tokens=5, ignore_eos=True)
    drafter = EagleDrafter(eagle_head(model), ExpansionTree(nodes=59, depth=8))
    engine = Engine(target, drafter, RejectionVerifier(), max_length=8)
    plain = Engine(target, max_length=8).generate([prompt], sampling)
    assert engine.generate([prompt], sampling)[0].token_ids == plain[0].token_ids
