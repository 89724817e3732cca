"""The folders of block drafters' heads, read in all layouts: z-lab's, DeepSpec's, SpecForge's, speculators', and ours.

All of them name the tensors as we do; what differs is ``config.json``. Sizes are read off the tensors, because uploaded
configurations are often wrong about them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from drafters.heads.assemble import (
    count_layers,
    count_of,
    fill,
    finite,
    made,
    named,
    needed,
    norms_queries,
    section,
    sizes_of,
    take_draft_ids,
)
from drafters.heads.block import BlockHead, default_layers
from drafters.heads.block_config import BlockConfig
from drafters.heads.block_domino import NAMES
from drafters.heads.bound import move
from drafters.heads.files import Checkpoint, Where
from specdec.arguments import whole, wholes
from specdec.target.loading import resolve_device, resolve_dtype

KINDS = ("dflash", "dspark", "dflash2", "xpress")
"""speculators' names of what is loaded."""
PROJECTORS = ("dflash", "dspark", "domino", "dflash2")
"""SpecForge's and modelopt's."""

_PREFIX = re.compile(r"(?:model|logit_head|domino_head)\.")
_FLAT = re.compile(r"(?=(?:markov_w[12]|gate_proj|joint_proj)\.)")
"""Where the names of modelopt's Markov heads lack what stands before those of all others."""
_IGNORED = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq|verifier_(?:lm_head|norm)\.weight")
_COPIED = ("hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "sliding_window", "layer_types")


def load_block(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    hidden_layers: tuple[int, ...] | None = None,
    mask_token_id: int | None = None,
    **where: Unpack[Where],
) -> BlockHead:
    """Load a block drafter's head in any of the known layouts.

    Args:
        path: A folder, a name on the hub, or ``bundled/…``.
        dtype: What to load it in; None for the checkpoint's own.
        device: Where to put it; None for the CPU.
        hidden_layers: The target's hidden states that it reads, numbered as in ``Drafter.hidden_layers``, in place of
            those that its files name.
        mask_token_id: In place of the one that its files name.

    Raises:
        ValueError: There is no such checkpoint, it is of another kind, it is incomplete, or its numbers contradict each
            other.
    """
    resolved, place = None if dtype is None else resolve_dtype(dtype), resolve_device(device or "cpu")
    checkpoint = Checkpoint(path, **where)
    name, tensors = checkpoint.name, {}
    for key, tensor in checkpoint.tensors().items():
        if not _IGNORED.fullmatch(key):
            key = _PREFIX.sub("", key).replace("confidence_proj.", "confidence_head.proj.")
            tensors["markov_head." + key if _FLAT.match(key) else key] = tensor
    tensors = named(tensors, NAMES)
    layers, block = _described(name, checkpoint.config, tensors)
    if hidden_layers is not None:
        block["hidden_layers"] = list(hidden_layers)
    if mask_token_id is not None:
        block["mask_token_id"] = mask_token_id
    ids = take_draft_ids(name, tensors, _COLUMNS)
    settings = block | _sizes(name, layers, tensors, reduced=ids is not None)
    _check(name, settings, tensors)
    if not settings["owns_embeddings"]:
        tensors.pop("embed_tokens.weight", None)
    if settings["draft_vocab_size"] is not None:
        if ids is None:
            raise ValueError(
                f"{name} is incomplete: its logits have {settings['draft_vocab_size']} columns of a vocabulary of "
                f"{settings['vocab_size']}, and d2t, which says whose they are, is missing"
            )
        tensors["draft_ids"] = ids
    with torch.device("meta"):
        head = BlockHead(made(name, BlockConfig, **settings))
    return move(fill(name, head, tensors, NAMES), place, resolved if isinstance(resolved, torch.dtype) else None)


def _described(
    name: str, stored: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Returns what a ``config.json`` says of the layers, and what of the block, as fields of ``BlockConfig``."""
    kind = stored.get("speculators_model_type")
    inner = section(name, stored, "dflash_config")
    architecture = (stored.get("architectures") or [""])[0]
    if stored.get("model_type") == BlockConfig.model_type:
        own = BlockConfig.__annotations__
        return stored, {key: value for key, value in stored.items() if key in own and value is not None}
    if kind is not None:
        if kind not in KINDS:
            raise ValueError(
                f"{name} is a speculators folder of the type {kind!r}: BlockDrafter takes {', '.join(KINDS)}"
            )
        layers, key = dict(section(name, stored, "transformer_layer_config")), "aux_hidden_state_layer_ids"
        if layers.get("sliding_window") is not None:  # positions before the root, whatever the place
            layers["sliding_window"] = whole(f"{name}: its sliding_window", layers["sliding_window"], least=1) + 1
        key = key if stored.get(key) is not None else f"eagle_{key}"
        sliding = not stored.get("sliding_window_non_causal", kind == "dflash2")
        anchored = stored.get("sample_from_anchor", kind == "dspark" or stored.get("projector_type") == "domino")
        anchored = anchored if stored.get("shift_label") is None else stored["shift_label"]
        return layers, {
            **_stored_block(name, stored, shifted=bool(anchored)),
            "hidden_layers": _ids(name, stored, key),
            **_sight(layers, full=False, sliding=sliding, from_root=True),
        }
    if "target_layer_ids" in stored and not inner:  # DeepSpec's, whatever its name: "DFlash", too, is shifted there
        given, projector = stored, "dspark"
    elif inner or architecture.startswith("DFlash"):
        given, projector = {**stored, **inner}, inner.get("projector_type") or "dflash"
        if projector not in PROJECTORS:
            raise ValueError(f"{name} has the projector_type {projector!r}: BlockDrafter takes {', '.join(PROJECTORS)}")
    else:
        raise ValueError(
            f"{name} is no block drafter: its config.json has neither dflash_config (z-lab, SpecForge), nor "
            f"target_layer_ids (DeepSpec), nor speculators_model_type (speculators), nor the model_type "
            f"{BlockConfig.model_type!r}"
        )
    outputs, total = _ids(name, given, "target_layer_ids"), count_of(name, stored, "num_target_layers")
    if outputs is None and total is not None:
        outputs = default_layers(total, count_layers(tensors))
    causal = given.get("causal", given.get("is_causal"))  # without it, only sliding layers are causal
    if given.get("use_swa"):  # modelopt's and vLLM's: all layers have a window, and are no more causal for it
        window = stored.get("sliding_window") or given.get("swa_window_size")
        kinds, causal = ["sliding_attention"] * count_layers(tensors), bool(causal)
        stored = {**stored, "layer_types": kinds, "sliding_window": window}
    return stored, {
        **_stored_block(name, given, shifted=projector == "dspark" or bool(given.get("shift_label"))),
        "hidden_layers": None if outputs is None else [layer + 1 for layer in outputs],
        "target_layers": total,
        **_sight(stored, full=bool(causal), sliding=causal is None or bool(causal)),
    }


def _stored_block(name: str, given: Mapping[str, Any], *, shifted: bool) -> dict[str, Any]:
    """The fields of a block that all published layouts call alike."""
    if given.get("block_size") is None:
        raise ValueError(f"{name}: its config.json has no block_size: add it, as the head was trained")
    always = {key: given.get(key) for key in ("block_size", "mask_token_id", "target_hidden_size")}
    return always | {"shifted": shifted} | {key: given[key] for key in _OPTIONAL if given.get(key)}


_OPTIONAL = (
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping", "markov_head_type", "selector_top_k",
    "pure_draft_prefix_len", "num_jacobi_passes",
)  # fmt: skip


def _sight(layers: Mapping[str, Any], *, full: bool, sliding: bool, from_root: bool = False) -> dict[str, Any]:
    """The directions in which places see each other, as fields of ``BlockConfig``, for each type of layers there is."""
    types = set(layers.get("layer_types") or ())
    if "sliding_attention" not in types:
        return {"causal": full}
    found: dict[str, Any] = {"causal": full if len(types) > 1 else sliding}
    if sliding is not found["causal"]:
        found["causal_in_windows"] = sliding
    return found | ({"window_from_root": True} if from_root else {})


def _ids(name: str, stored: Mapping[str, Any], key: str) -> list[int] | None:
    """The layer ids that a ``config.json`` has under a key; None if it has none."""
    remedy = "correct it to a list of whole numbers"
    said = f"{name}: its config.json has {key}"
    return None if stored.get(key) is None else list(wholes(said, stored[key], remedy))


def _sizes(name: str, layers: Mapping[str, Any], tensors: Mapping[str, Tensor], *, reduced: bool) -> dict[str, Any]:
    """The fields of ``BlockConfig`` that the tensors tell, or else what ``config.json`` says of the layers."""
    first = "layers.0."
    width = needed(name, tensors, "fc.weight").shape[0]
    sizes = sizes_of(name, layers, tensors, first, width)
    found: dict[str, Any] = {key: layers[key] for key in _COPIED if layers.get(key) is not None}
    embeddings, output = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    owns_embeddings = embeddings is not None and finite(embeddings)
    if embeddings is not None and owns_embeddings:
        found["vocab_size"] = embeddings.shape[0]
    markov = tensors.get("markov_head.markov_w1.weight")
    if markov is not None:
        kinds = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
        kind = next((kind for key, kind in kinds.items() if key in tensors), "vanilla")
        found |= {"markov_rank": markov.shape[1], "markov_head_type": kind}
        found["markov_biases"] = any(key in tensors for key in _MARKOV_BIASES)
        found.setdefault("vocab_size", markov.shape[0])
    found |= _further_sizes(name, tensors, width)
    if output is not None and not reduced:
        found.setdefault("vocab_size", output.shape[0])
    if "vocab_size" not in found:
        raise ValueError(f"{name}: its config.json has no vocab_size: add that of its target")
    columns = next((tensors[key].shape[0] for key in _COLUMNS if key in tensors), found["vocab_size"])
    judge = tensors.get("confidence_head.proj.weight")
    return found | {
        "layer_kind": "qwen3" if norms_queries(tensors, first) else "llama",
        **sizes,
        "mlp_bias": f"{first}mlp.gate_proj.bias" in tensors,
        "use_sliding_window": "sliding_attention" in (layers.get("layer_types") or ()),
        "draft_vocab_size": None if columns == found["vocab_size"] else columns,
        "owns_embeddings": owns_embeddings,
        "owns_output": output is not None,
        "confidence": judge is not None,
        "confidence_with_markov": judge is not None and judge.shape[1] > width,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }


def _further_sizes(name: str, tensors: Mapping[str, Tensor], width: int) -> dict[str, Any]:
    """The fields that the tensors of DFlash 2, Domino and xPress tell."""
    found: dict[str, Any] = {}
    base, codes = tensors.get("layers.0.attention_conv.base_kernel"), tensors.get(_CODES)
    recurrent, refined = tensors.get("prefix_gru.weight_hh_l0"), tensors.get("refiner_head.down_h.weight")
    if recurrent is not None:
        rank = needed(name, tensors, "embed_proj.0.weight").shape[0]
        found |= {"gru_hidden_dim": recurrent.shape[1], "emb_dim": rank}
    if refined is not None:
        rank, rows = len(refined), len(needed(name, tensors, "refiner_head.token_embed.weight"))
        wide = len(needed(name, tensors, "refiner_head.mlp_gate.weight"))
        found |= {"xpress_rank": rank, "xpress_mlp_ratio": wide // rank, "vocab_size": rows}
    if base is not None:
        rows = needed(name, tensors, "layers.0.attention_conv.kernel_projection.weight").shape[0]
        found["conv_kernel_size"] = base.shape[1]
        found["conv_group_size"] = width * 2 * base.shape[1] // rows
    if codes is not None:
        found |= {"selector_rank": codes.shape[1], "vocab_size": codes.shape[0]}
    return found


_CODES = "candidate_selector.predecessor_codebook"
_COLUMNS = (
    "lm_head.weight", "markov_head.markov_w2.weight", "embed_proj.2.weight", "refiner_head.readout.weight"
)  # fmt: skip
_MARKOV_BIASES = ("markov_head.gate_proj.bias", "markov_head.joint_proj.bias")


def _check(name: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse numbers that contradict each other."""
    places = settings.get("block_size", 2)
    whole(f"{name}: its config.json has block_size", places, least=1 if settings.get("shifted") else 2)
    mask, vocabulary = settings.get("mask_token_id"), settings["vocab_size"]
    if mask is None:
        raise ValueError(f"{name}: its config.json has no mask_token_id: give mask_token_id=…, as in training")
    if type(mask) is not int:
        raise ValueError(f"{name}: mask_token_id={mask!r} is no whole number: give the number of a token")
    if not 0 <= mask < vocabulary:
        raise ValueError(
            f"{name}: its mask token {mask} is outside of the vocabulary of {vocabulary} tokens: give mask_token_id=…, "
            f"as in training"
        )
    ids, joined = settings.get("hidden_layers"), tensors["fc.weight"].shape[1]
    if not ids:
        raise ValueError(
            f"{name}: its config.json does not say which hidden states of the target it reads: give hidden_layers=…"
        )
    wholes(f"{name}: hidden_layers", ids, "give hidden_layers=[…]")
    if min(ids) < 0:
        raise ValueError(f"{name} reads the hidden states {ids}, and there are none before 0: give hidden_layers=…")
    width = count_of(name, settings, "target_hidden_size") or settings["hidden_size"]
    if joined != len(ids) * width:
        raise ValueError(
            f"{name}: fc.weight reads {joined} channels, and {len(ids)} hidden states of width {width} have "
            f"{len(ids) * width}: correct the layer ids in its config.json, or give hidden_layers=…"
        )
    confidence = tensors.get("confidence_head.proj.weight")
    rank = settings.get("markov_rank", 0)
    if confidence is not None and confidence.shape[1] not in (settings["hidden_size"], settings["hidden_size"] + rank):
        raise ValueError(
            f"{name}: its confidence head reads {confidence.shape[1]} channels, and a hidden state has "
            f"{settings['hidden_size']}, with the Markov head's {settings['hidden_size'] + rank}: it is of another kind"
        )
