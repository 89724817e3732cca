"""Folders of block drafters: every public layout comes back as the head that it was, and mistakes have one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.block import BlockDrafter
from drafters.heads.block import BlockHead
from drafters.heads.block_files import load_block, save_block
from drafters.heads.files import ServedFor
from specdec.target.target import Target
from tests.drafters.blocks import HIDDEN, VOCAB, context_of, head_for
from tests.models import tiny_model

WEIGHTS = "model.safetensors"
LAYERS = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "vocab_size": VOCAB,
    "hidden_act": "silu",
}  # fmt: skip
MARKOV = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
ROPE = {"rope_theta": 10000.0}  # as transformers 4 wrote it

# The heads hold layers 1 and 3 (inputs), which are outputs 0 and 2.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "z-lab": (
        {"block_size": 5},
        {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **LAYERS, **ROPE, "num_target_layers": 4,
            "block_size": 5, "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 2]},
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    "z-lab, new": (
        {"block_size": 5, "input_embedding_scale": 2.0, "final_logit_softcapping": 3.0, "causal": True},
        {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **LAYERS, "num_target_layers": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "is_causal": True,
            "dflash_config": {
                "mask_token_id": 63, "target_layer_ids": [0, 2], "block_size": 5, "input_embedding_scale": 2.0,
                "final_logit_softcapping": 3.0,
            },
        },
    ),
    "SpecForge's DSpark": (
        {"block_size": 5, "shifted": True, "markov_rank": 6, "confidence": True},
        {
            "architectures": ["DFlashDraftModel"], **LAYERS, **ROPE, "num_target_layers": 4,
            "dflash_config": {
                "projector_type": "dspark", "block_size": 5, "mask_token_id": 63, "target_layer_ids": [0, 2], **MARKOV,
            },
        },
    ),
    "DeepSpec's DSpark": (
        {
            "block_size": 5, "shifted": True, "markov_rank": 6, "markov_head_type": "gated", "confidence": True,
            "confidence_with_markov": False, "owns_embeddings": True, "owns_output": True,
        },
        {
            "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", **LAYERS, **ROPE, "block_size": 5,
            "mask_token_id": 63, "target_layer_ids": [0, 2], **MARKOV, "markov_head_type": "gated",
            "confidence_head_with_markov": False,
        },
    ),
    "DeepSpec's DFlash": (
        {"block_size": 5, "shifted": True, "owns_embeddings": True, "owns_output": True},
        {
            "architectures": ["Qwen3DFlashModel"], "model_type": "qwen3", **LAYERS, **ROPE, "block_size": 5,
            "mask_token_id": 63, "target_layer_ids": [0, 2], "markov_rank": 0,
        },
    ),
    "speculators' DFlash": (
        {"block_size": 5, "draft_ids": torch.tensor([0, 2, 3, 10, 11, 40, 62])},
        {
            "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_version": "0.9.0",
            "transformer_layer_config": {"model_type": "qwen3", **LAYERS, "rope_parameters": ROPE},
            "aux_hidden_state_layer_ids": [1, 3], "mask_token_id": 63, "block_size": 5, "draft_vocab_size": 7,
            "target_hidden_size": HIDDEN, "sample_from_anchor": False,
        },
    ),
    "speculators' DSpark": (
        {"block_size": 5, "shifted": True, "markov_rank": 6, "markov_head_type": "rnn", "layer_kind": "llama"},
        {
            "architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark",
            "transformer_layer_config": {"model_type": "llama", **LAYERS, **ROPE},
            "aux_hidden_state_layer_ids": [1, 3], "mask_token_id": 63, "block_size": 5, "sample_from_anchor": True,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=VOCAB))


def tensors_of(head: BlockHead) -> dict[str, Tensor]:
    """A head's tensors as the public folders have them."""
    tensors = {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
    ids = tensors.pop("draft_ids", None)
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter_(0, ids, True)
    return tensors


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def block_logits(head: BlockHead, target: Target) -> Tensor:
    bound = head.bound(target.model)
    with torch.no_grad():
        cache = bound(features=context_of(head)[:1]).past_key_values
        tokens = torch.tensor([[5, *[VOCAB - 1] * 4]])
        return bound(input_ids=tokens, attention_mask=torch.zeros(1, 1, 5, 12), past_key_values=cache).logits


def assert_same(found: BlockHead, wanted: BlockHead, target: Target) -> None:
    for name in ("shifted", "causal", "block_size", "mask_token_id", "layer_kind", "columns", "tokens"):
        assert getattr(found.config, name) == getattr(wanted.config, name), name
    assert found.hidden_layers == wanted.hidden_layers
    mine, other = found.state_dict(), wanted.state_dict()
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert torch.equal(block_logits(found, target), block_logits(wanted, target))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_in_a_public_layout_is_the_head_it_was(tmp_path: Path, target: Target, layout: str) -> None:
    settings, config = LAYOUTS[layout]
    head = head_for(target, **settings)
    assert_same(load_block(written(tmp_path, config, tensors_of(head))), head, target)


def test_our_own_layout_is_the_head_it_was(tmp_path: Path, target: Target) -> None:
    head = head_for(target, **LAYOUTS["speculators' DFlash"][0])
    head.save_pretrained(tmp_path)
    assert_same(load_block(tmp_path), head, target)


DECIDING = (
    "speculators_model_type", "target_layer_ids", "aux_hidden_state_layer_ids", "mask_token_id", "block_size",
    "sample_from_anchor", "draft_vocab_size", "num_target_layers", "markov_rank",
)  # fmt: skip
"""What decides how others read a folder; sizes are in the tensors."""
WRITTEN_AS = {
    "z-lab": "z-lab", "z-lab, new": "z-lab", "SpecForge's DSpark": "z-lab", "DeepSpec's DSpark": "deepspec",
    "DeepSpec's DFlash": "deepspec", "speculators' DFlash": "speculators", "speculators' DSpark": "speculators",
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_in_a_public_layout_says_what_its_own_files_do(
    tmp_path: Path, target: Target, layout: str
) -> None:
    settings, config = LAYOUTS[layout]
    head = head_for(target, **settings)
    save_block(head, tmp_path, layout=WRITTEN_AS[layout], served=ServedFor(target="some/target"))
    assert_same(load_block(tmp_path), head, target)
    found = json.loads((tmp_path / "config.json").read_text())
    assert load_file(tmp_path / WEIGHTS).keys() == tensors_of(head).keys()
    for key in DECIDING:
        if key in config:
            assert found[key] == config[key], key
    for key, value in config.get("dflash_config", {}).items():
        assert found["dflash_config"][key] == value, key
    if "speculators_config" in found:
        method = found["speculators_config"]["proposal_methods"][0]
        assert method["speculative_tokens"] == head.config.tokens
        assert found["speculators_config"]["verifier"]["name_or_path"] == "some/target"


@pytest.mark.parametrize(
    ("settings", "layout", "message"),
    [
        ({}, "gguf", "layout='gguf': give one of own, z-lab, deepspec, speculators, sglang"),
        ({}, "deepspec", "is for heads whose places predict the next one's token"),
        ({"markov_rank": 4}, "z-lab", "no Markov head in place"),
        ({"markov_rank": 4}, "speculators", "no Markov head in place"),
        ({"causal": True}, "speculators", "no full layers that see a block one way"),
    ],
)
def test_what_a_layout_cannot_say_is_not_written(
    tmp_path: Path, target: Target, settings: dict[str, Any], layout: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        save_block(head_for(target, **settings), tmp_path / "out", layout=layout)
    assert not (tmp_path / "out").exists()


def test_a_drafter_of_a_folder_drafts_as_the_folder_says(tmp_path: Path, target: Target) -> None:
    settings, config = LAYOUTS["DeepSpec's DSpark"]
    folder = written(tmp_path, config, tensors_of(head_for(target, **settings)))
    drafter = BlockDrafter.from_pretrained(folder)
    assert (drafter.max_nodes, drafter.is_chain, drafter.hidden_layers) == (5, True, (1, 3))
    other = BlockDrafter.from_pretrained(folder, shape=[2, 1], sampling="without_replacement", hidden_layers=[0, 2])
    assert (other.max_nodes, other.hidden_layers, other.head.hidden_layers) == (4, (0, 2), (0, 2))
    assert BlockDrafter.from_pretrained(folder, mask_token_id=7).mask_token_id == 7


def test_layer_ids_that_nobody_wrote_are_z_lab_s_own(tmp_path: Path, target: Target) -> None:
    settings, config = LAYOUTS["z-lab"]
    config = config | {"num_target_layers": 12, "dflash_config": {"mask_token_id": 63}}
    folder = written(tmp_path, config, tensors_of(head_for(target, **settings)))
    assert load_block(folder).hidden_layers == (2, 10)  # the outputs of layers 1 and 9


def test_columns_out_of_order_are_put_in_order(tmp_path: Path, target: Target) -> None:
    settings, config = LAYOUTS["speculators' DFlash"]
    head = head_for(target, **settings)
    tensors = tensors_of(head)
    shuffled = torch.tensor([3, 0, 6, 1, 2, 5, 4])
    tensors["lm_head.weight"] = tensors["lm_head.weight"][shuffled]
    tensors["d2t"] = head.draft_ids[shuffled] - torch.arange(7)
    assert_same(load_block(written(tmp_path, config, tensors)), head, target)


def test_embeddings_of_nan_are_the_target_s(tmp_path: Path, target: Target) -> None:
    settings, config = LAYOUTS["z-lab"]
    head = head_for(target, **settings)
    tensors = tensors_of(head) | {"embed_tokens.weight": torch.full((VOCAB, HIDDEN), torch.nan)}
    assert_same(load_block(written(tmp_path, config, tensors)), head, target)


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (
            "z-lab",
            lambda c, t: c["dflash_config"].update(mask_token_id=64),
            "its mask token 64 is outside of the vocabulary of 64 tokens: give mask_token_id",
        ),
        (
            "z-lab",
            lambda c, t: c["dflash_config"].update(target_layer_ids=[0, 1, 2]),
            "fc.weight reads 64 channels, and 3 hidden states of width 32 have 96",
        ),
        (
            "z-lab",
            lambda c, t: c["dflash_config"].update(target_layer_ids=[-2, 1]),
            r"reads the hidden states \[-1, 2\], and there are none before 0",
        ),
        ("z-lab", lambda c, t: c.pop("block_size"), "its config.json has no block_size"),
        (
            "z-lab",
            lambda c, t: c.update(layer_types=["full_attention", "sliding_attention"], sliding_window=8),
            "see a block one way and its full layers both ways, which is not supported",
        ),
        (
            "z-lab",
            lambda c, t: t.update({"layers.0.attention_conv.base_kernel": torch.zeros(2, 2, 32)}),
            "is a DFlash 2 head",
        ),
        ("z-lab", lambda c, t: c["dflash_config"].update(projector_type="domino"), "projector_type 'domino'"),
        ("z-lab", lambda c, t: [c.pop("dflash_config"), c.update(architectures=["Llama"])], "is no block drafter"),
        (
            "speculators' DFlash",
            lambda c, t: c.update(speculators_model_type="peagle"),
            "speculators folder of the type 'peagle': BlockDrafter takes dflash and dspark",
        ),
        (
            "speculators' DFlash",
            lambda c, t: c.pop("aux_hidden_state_layer_ids"),
            "does not say which hidden states of the target it reads: give hidden_layers",
        ),
        ("speculators' DFlash", lambda c, t: [t.pop("d2t"), t.pop("t2d")], "and d2t, which says whose they are, is"),
        ("speculators' DFlash", lambda c, t: t["t2d"].logical_not_(), "d2t and t2d name different tokens"),
        ("speculators' DFlash", lambda c, t: t["d2t"].zero_().sub_(1), "does not lead to distinct tokens"),
        (
            "DeepSpec's DSpark",
            lambda c, t: t.update({"confidence_head.proj.weight": torch.zeros(1, 33)}),
            "its confidence head reads 33 channels, and a hidden state has 32, with the Markov head's 38",
        ),
    ],
)
def test_folders_that_are_damaged_or_of_another_kind(
    tmp_path: Path, target: Target, layout: str, change: Change, message: str
) -> None:
    settings, config = LAYOUTS[layout]
    config = json.loads(json.dumps(config))
    tensors = tensors_of(head_for(target, **settings))
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        load_block(written(tmp_path, config, tensors))
