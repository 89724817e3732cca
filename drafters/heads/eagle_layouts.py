"""What EAGLE's public folder layouts call things, and what we do: tensors, tokens, hidden states, settings."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafters.heads.assemble import section
from drafters.heads.eagle import EagleHead
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.files import OURS
from specdec.arguments import wholes

_LAYER_NUMBER = re.compile(r"layers\.(\d+)\.")


_NAMES = {
    "model.fusion.norm.norms.": "fc_norm.",
    "model.fusion.norm.": "input_norm.",
    "model.fusion.linear.": "fc.",
    "model.layers.0.": "midlayer.",
    "model.": "",
}
"""Prefixes of our names, and of a checkpoint's. The first that fits counts."""


def our_name(key: str) -> str:
    """Returns our name of a tensor of an EAGLE-3 checkpoint."""
    ours = next(ours for ours, theirs in _NAMES.items() if key.startswith(theirs))
    return key if key == "lm_head.weight" else ours + key.removeprefix(_NAMES[ours])


def public_name(key: str, first: str) -> str:
    """Returns a checkpoint's name of one of our tensors; ``first`` is what those of its first layer begin with."""
    ours = next((ours for ours in _NAMES if key.startswith(ours)), "")
    theirs = first if ours == "model.layers.0." else _NAMES.get(ours, "")
    return theirs + key.removeprefix(ours)


def count_layers(tensors: Mapping[str, Tensor]) -> int:
    """Returns the number of decoder layers, whatever the configuration says."""
    numbers = {int(match[1]) for match in map(_LAYER_NUMBER.match, tensors) if match}
    return 1 + max(numbers, default=0)


def draft_ids_of(name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Returns the target's id of every column of a reduced vocabulary; None if there is none.

    ``d2t`` holds differences: column i is token ``i + d2t[i]``. ``t2d`` marks the same tokens.

    Raises:
        ValueError: They do not name distinct tokens, or the two name different ones.
    """
    offsets, marks = tensors.get("d2t"), tensors.get("t2d")
    ids = None
    if offsets is not None:
        ids = torch.arange(len(offsets)) + offsets.long()
        if len(ids.unique()) < len(ids) or int(ids.min()) < 0:
            raise ValueError(
                f"{name}: d2t does not lead to distinct tokens: it must hold differences, token - column, not tokens"
            )
    if marks is not None:
        marked = marks.bool().nonzero()[:, 0]
        if ids is not None and not torch.equal(ids.sort().values, marked):
            if offsets is not None and torch.equal(offsets.long().sort().values, marked):
                raise ValueError(
                    f"{name}: its d2t holds tokens, and must hold differences, token - column: store "
                    f"d2t - torch.arange(len(d2t))"
                )
            raise ValueError(f"{name}: d2t and t2d name different tokens: one of the two belongs to another checkpoint")
        ids = marked if ids is None else ids
    return ids


def layers_of(
    stored: Mapping[str, Any], ours: Mapping[str, Any], *, name: str = "the checkpoint"
) -> tuple[int, ...] | None:
    """Returns the hidden states of the target that a checkpoint names, numbered as inputs of layers; None if none.

    The key's name decides what a number means. ``target_layer_ids`` are outputs of layers. With
    ``eagle_aux_hidden_state_layer_ids``, published checkpoints mean inputs (2, N/2, N-3) or outputs (1, N/2-1, N-4); a
    first number of 1 tells.

    Raises:
        ValueError: What it names are no numbers.
    """
    remedy = "correct it to a list of whole numbers, or give hidden_layers=[…]"
    if ours.get("hidden_layers") is not None:
        return wholes(f"{name}: its {OURS} has hidden_layers", ours["hidden_layers"], remedy)
    said = f"{name}: its config.json has"
    if stored.get("target_layer_ids") is not None:
        return tuple(layer + 1 for layer in wholes(f"{said} target_layer_ids", stored["target_layer_ids"], remedy))
    key = "eagle_aux_hidden_state_layer_ids"
    ids = section(name, stored, "eagle_config").get(key) or stored.get(key)
    if not ids:
        return None
    ids = wholes(f"{said} {key}", ids, remedy)
    return tuple(layer + (ids[0] == 1) for layer in ids)


def flag_of(stored: Mapping[str, Any], ours: Mapping[str, Any], key: str) -> bool:
    """Returns whether our notes say yes to a setting, or else ``config.json``, or else its EAGLE section."""
    inner = stored.get("eagle_config") or {}
    return bool(ours.get(key, stored.get(key, inner.get(key, False))))


def public_config(head: EagleHead | Eagle3Head) -> dict[str, Any]:
    """Returns ``config.json`` with the keys that EAGLE's, SGLang's and vLLM's loaders read."""
    config: Any = head.config
    public = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_parameters": dict(config.rope_parameters),
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    if not isinstance(head, Eagle3Head):
        return public | {"bias": head.fusion_bias}
    columns = config.vocab_size if head.draft_ids is None else len(head.draft_ids)
    return public | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": columns,
        "target_hidden_size": head.captured_width,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_joined,
        "fc_norm": head.norm_each,
        "norm_output": head.feeds_normed,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": None if head.hidden_layers is None else list(head.hidden_layers),
        },
    }
