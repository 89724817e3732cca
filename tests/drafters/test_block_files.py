"""Folders of block drafters: every public layout comes back as the head that it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from drafters import BlockHead
from drafters.heads.block_files import load_block, save_block
from drafters.heads.files import ServedFor
from specdec.target.target import Target
from tests.drafters import folders
from tests.drafters.test_block import HIDDEN, VOCAB, head_for

LAYERS = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "vocab_size": VOCAB,
    "hidden_act": "silu",
}  # fmt: skip
MARKOV = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
ROPE = {"rope_theta": 10000.0}  # as transformers 4 wrote it
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}

# The heads have blocks of five, and hold layers 1 and 3 (inputs), which are outputs 0 and 2.
INNER = {"mask_token_id": 63, "target_layer_ids": [0, 2]}
ZLAB = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **LAYERS, **ROPE, "num_target_layers": 4,
    "block_size": 5, "dflash_config": INNER,
}  # fmt: skip
DEEPSPEC = {"model_type": "qwen3", **LAYERS, **ROPE, "block_size": 5, **INNER}
SPECULATORS = {
    "transformer_layer_config": {"model_type": "qwen3", **LAYERS, **ROPE}, "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": 63, "block_size": 5, "sample_from_anchor": False,
}  # fmt: skip
WINDOWS = SPECULATORS | {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
    "transformer_layer_config": {"model_type": "qwen3", **LAYERS, **ROPE, **TYPES},
}  # fmt: skip
FROM_ROOT = TYPES | {"sliding_window": 5, "window_from_root": True}
SECOND = {"selector_rank": 6, "selector_top_k": 9, "conv_kernel_size": 2, "conv_group_size": 8}
CAPPED = {"output_multiplier": 0.2, "final_logit_softcapping": 20.0}
SCALED = {"input_embedding_scale": 2.0, "final_logit_softcapping": 3.0}
DOMINO = {"gru_hidden_dim": 5, "emb_dim": 6, "pure_draft_prefix_len": 1}
XPRESS = {"xpress_rank": 6, "xpress_mlp_ratio": 3, "num_jacobi_passes": 4}
OWN = {"shifted": True, "owns_embeddings": True, "owns_output": True}

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "z-lab": ({}, ZLAB | {"layer_types": ["full_attention", "full_attention"]}),
    "z-lab, new": (
        {**SCALED, "causal": True},
        {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **LAYERS, "num_target_layers": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "is_causal": True,
            "dflash_config": {**INNER, "block_size": 5, **SCALED},
        },
    ),
    "SpecForge's DSpark": (
        {"shifted": True, "markov_rank": 6, "confidence": True},
        {
            "architectures": ["DFlashDraftModel"], **LAYERS, **ROPE, "num_target_layers": 4,
            "dflash_config": {"projector_type": "dspark", "block_size": 5, **INNER, **MARKOV},
        },
    ),
    "DeepSpec's DSpark": (
        {**OWN, "markov_rank": 6, "markov_head_type": "gated", "confidence": True, "confidence_with_markov": False},
        {
            "architectures": ["Qwen3DSparkModel"], **DEEPSPEC, **MARKOV, "markov_head_type": "gated",
            "confidence_head_with_markov": False,
        },
    ),
    "DeepSpec's DFlash": (OWN, {"architectures": ["Qwen3DFlashModel"], **DEEPSPEC, "markov_rank": 0}),
    "speculators' DFlash": (
        {"draft_ids": torch.tensor([0, 2, 3, 10, 11, 40, 62])},
        {
            "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_version": "0.9.0",
            **SPECULATORS, "transformer_layer_config": {"model_type": "qwen3", **LAYERS, "rope_parameters": ROPE},
            "draft_vocab_size": 7, "target_hidden_size": HIDDEN,
        },
    ),
    "speculators' DSpark": (
        {"shifted": True, "markov_rank": 6, "markov_head_type": "rnn", "layer_kind": "llama"},
        {
            "architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark", **SPECULATORS,
            "transformer_layer_config": {"model_type": "llama", **LAYERS, **ROPE}, "sample_from_anchor": True,
        },
    ),
    "z-lab, mixed layers": ({**TYPES, "causal_in_windows": True}, ZLAB | TYPES),
    "speculators, mixed layers": ({**FROM_ROOT, "causal_in_windows": True}, WINDOWS),
    "z-lab's DFlash 2": (  # as in tests/fixtures of z-lab/dflash, but for the sizes
        {**SECOND, **SLIDING, "sliding_window": 7, **CAPPED},
        {
            "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "is_causal": False, **LAYERS, **SLIDING,
            "dflash_config": {"block_size": 5, **INNER, **SECOND, **CAPPED}, "num_target_layers": 4,
            "sliding_window": 7, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    ),
    "SpecForge's Domino": (
        {"shifted": True, **DOMINO},
        {
            **ZLAB, "emb_dim": 6, "architectures": ["DominoDraftModel"], "layer_types": ["full_attention"] * 2,
            "dflash_config": {**INNER, **DOMINO, "projector_type": "domino", "shift_label": True},
        },
    ),
    "speculators' xPress": (
        XPRESS,
        {
            "architectures": ["XPressSpeculator"], "speculators_model_type": "xpress", "draft_vocab_size": VOCAB,
            **XPRESS, **SPECULATORS,
        },
    ),
}  # fmt: skip
"""What a head is, and the ``config.json`` of its folder."""


def tensors_of(head: BlockHead) -> dict[str, Tensor]:
    public = {
        "prefix_head.gru_input.weight": "prefix_gru.weight_ih_l0",
        "prefix_head.gru_state.weight": "prefix_gru.weight_hh_l0",
        "prefix_head.joined.weight": "embed_proj.0.weight",
        "prefix_head.columns.weight": "embed_proj.2.weight",
    }
    tensors = {public.get(name, name): tensor.detach().clone() for name, tensor in head.state_dict().items()}
    ids = tensors.pop("draft_ids", None)
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter_(0, ids, True)
    return tensors


@torch.no_grad()
def block_logits(head: BlockHead, target: Target) -> Tensor:
    bound, cache, generator = head.bound(target.model), DynamicCache(), torch.Generator().manual_seed(1)
    bound(features=torch.randn(1, 7, head.feature_width, generator=generator), past_key_values=cache)
    tokens = torch.tensor([[5, *[VOCAB - 1] * 4]])
    return bound(input_ids=tokens, attention_mask=torch.zeros(1, 1, 5, 12), past_key_values=cache).logits


def assert_same(found: BlockHead, wanted: BlockHead, target: Target) -> None:
    for name in ("sliding_window", "window_from_root", "causal_in_windows", "selector_top_k", "num_jacobi_passes"):
        assert getattr(found.config, name) == getattr(wanted.config, name), name
    for name in ("shifted", "causal", "block_size", "mask_token_id", "layer_kind", "columns", "tokens"):
        assert getattr(found.config, name) == getattr(wanted.config, name), name
    assert found.hidden_layers == wanted.hidden_layers
    folders.assert_same(found, wanted)
    assert torch.equal(block_logits(found, target), block_logits(wanted, target))


def read(folder: Path, target: Target, settings: dict, config: dict, *, name: Callable = str, change: Callable = dict):
    """A head with some settings, which a folder of others, with this configuration, gives back."""
    head = head_for(target, **settings)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(change({name(key): tensor for key, tensor in tensors_of(head).items()}), folder / "model.safetensors")
    assert_same(load_block(folder), head, target)
    return head


DECIDING = (
    "speculators_model_type", "target_layer_ids", "aux_hidden_state_layer_ids", "mask_token_id", "block_size",
    "sample_from_anchor", "draft_vocab_size", "num_target_layers", "markov_rank",
)  # fmt: skip
"""What decides how others read a folder; sizes are in the tensors."""
WRITTEN_AS = {"z-lab": "z-lab", "SpecForge": "z-lab", "DeepSpec": "deepspec", "speculators": "speculators"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_public_layout_is_read_and_written(tmp_path: Path, target: Target, layout: str) -> None:
    settings, config = LAYOUTS[layout]
    head = read(tmp_path, target, settings, config)
    form = next(form for begin, form in WRITTEN_AS.items() if layout.startswith(begin))
    save_block(head, tmp_path / "ours", layout=form, served=ServedFor(target="some/target"))
    assert_same(load_block(tmp_path / "ours"), head, target)
    found = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == tensors_of(head).keys()
    for key in DECIDING:
        if key in config:
            assert found[key] == config[key], key
    assert ("DFlash2" in layout.replace(" ", "")) == ("DFlash2DraftModel" in found["architectures"])
    for key, value in config.get("dflash_config", {}).items():
        assert found["dflash_config"][key] == value, key
    if "speculators_config" in found:
        method = found["speculators_config"]["proposal_methods"][0]
        assert method["speculative_tokens"] == head.config.tokens
        assert found["speculators_config"]["verifier"]["name_or_path"] == "some/target"


def test_what_a_layout_cannot_say_is_not_written(tmp_path: Path, target: Target) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "gguf", "layout='gguf'"),
        ({"markov_rank": 4}, "z-lab", "no heads with markov_rank and nothing else"),
        ({"causal": True}, "speculators", "see a block both ways"),
    ]
    for settings, layout, words in cases:
        with pytest.raises(ValueError, match=words):
            save_block(head_for(target, **settings), tmp_path / "out", layout=layout)
        assert not (tmp_path / "out").exists()


def test_more_layouts_are_read_than_written(tmp_path: Path, target: Target) -> None:
    """speculators' DFlash 2, whose windows are both ways unless it says so; Domino's old names; our own layout."""
    settings, config = LAYOUTS["speculators, mixed layers"]
    config = config | SECOND | {"speculators_model_type": "dflash2"}
    read(tmp_path, target, settings | SECOND | {"causal_in_windows": None}, config)
    settings, config = LAYOUTS["SpecForge's Domino"]

    def old(name: str) -> str:
        return f"logit_head.{name}" if "gru" in name or "proj.2" in name else name

    def new(name: str) -> str:
        return f"domino_head.{name}" if name.startswith(("prefix_gru.", "embed_proj.")) else name

    read(tmp_path, target, settings, config, name=old)
    config = LAYOUTS["speculators' DFlash"][1] | config["dflash_config"]
    config.pop("sample_from_anchor")
    for shift in (None, True, False):  # speculators' Domino, of the type "dflash"; shifted unless it says otherwise
        read(tmp_path, target, settings | {"shifted": shift is not False}, config | {"shift_label": shift}, name=new)
    for layout in ("SpecForge's Domino", "speculators' DFlash"):
        head = head_for(target, **LAYOUTS[layout][0])
        head.save_pretrained(tmp_path / "own")
        assert_same(load_block(tmp_path / "own"), head, target)


def test_modelopts_folders_are_read(tmp_path: Path, target: Target) -> None:
    """NVIDIA/Model-Optimizer's export: names without a prefix, `causal` for all layers, and windows of all layers."""
    settings, config = LAYOUTS["SpecForge's DSpark"]
    inner = config["dflash_config"] | {"use_confidence_head": True, "shift_label": True, "causal": False}

    def flat(name: str) -> str:
        return name.removeprefix("markov_head.").replace("confidence_head.proj.", "confidence_proj.")

    for kind in ("vanilla", "rnn"):
        given = settings | {"markov_head_type": kind, "markov_biases": kind != "vanilla"}
        read(tmp_path, target, given, config | {"dflash_config": inner | {"markov_head_type": kind}}, name=flat)
    settings, config = LAYOUTS["z-lab"]
    inner = config["dflash_config"] | {"use_swa": True, "swa_window_size": 6}
    for causal in (False, True):
        given = settings | SLIDING | {"sliding_window": 6, "causal": causal}
        read(tmp_path, target, given, config | {"sliding_window": 6, "dflash_config": inner | {"causal": causal}})
    settings, config = LAYOUTS["z-lab's DFlash 2"]
    inner = config["dflash_config"] | {"projector_type": "dflash2"}
    read(tmp_path, target, settings, config | {"dflash_config": inner})


def test_what_published_files_have_otherwise(tmp_path: Path, target: Target) -> None:
    """Columns out of order, embeddings of NaN, and layer ids that nobody wrote."""
    order, nan = torch.tensor([3, 0, 6, 1, 2, 5, 4]), torch.full((VOCAB, HIDDEN), torch.nan)

    def shuffled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        output, ids = tensors["lm_head.weight"][order], tensors["d2t"][order] + order
        return tensors | {"lm_head.weight": output, "d2t": ids - torch.arange(7)}

    read(tmp_path, target, *LAYOUTS["speculators' DFlash"], change=shuffled)
    settings, config = LAYOUTS["z-lab"]
    read(tmp_path, target, settings, config, change=lambda tensors: tensors | {"embed_tokens.weight": nan})
    config = config | {"num_target_layers": 12, "dflash_config": {"mask_token_id": 63}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_block(tmp_path).hidden_layers == (2, 10), "z-lab's own: the outputs of layers 1 and 9"
