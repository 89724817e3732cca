"""The folder layouts of block drafters' heads: z-lab's, DeepSpec's and SpecForge's, speculators', and our own.

All of them name the tensors alike; what differs is ``config.json``. Sizes are read off the tensors, because uploaded
configurations are often wrong about them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.heads.assemble import count_of, fill, finite, heads_of, made, needed, norms_queries, rope_of, section
from drafters.heads.block import BlockConfig, BlockHead, default_layers
from drafters.heads.bound import move
from drafters.heads.eagle_layouts import draft_ids_of
from drafters.heads.files import Checkpoint
from drafters.heads.markov import KINDS
from specdec.arguments import whole, wholes
from specdec.target.loading import resolve_device, resolve_dtype

_IGNORED = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq|verifier_(?:lm_head|norm)\.weight")
_LAYER = re.compile(r"layers\.(\d+)\.")
_COPIED = ("hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "sliding_window", "layer_types")


def load_block(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    hidden_layers: tuple[int, ...] | None = None,
    mask_token_id: int | None = None,
    **where: Any,
) -> BlockHead:
    """Load a block drafter's head in any of the known layouts.

    Args:
        path: A folder, a name on the hub, or ``bundled/…``.
        dtype: What to load it in; None for the checkpoint's own.
        device: Where to put it.
        hidden_layers: The target's hidden states that it reads, numbered as in ``Drafter.hidden_layers``, in place of
            those that its files name.
        mask_token_id: In place of the one that its files name.
        **where: See ``Checkpoint``.

    Raises:
        ValueError: There is no such checkpoint, it is of another kind, it is incomplete, or its numbers contradict each
            other.
    """
    resolved = None if dtype is None else resolve_dtype(dtype)
    place = resolve_device(device)
    checkpoint = Checkpoint(path, **where)
    name = checkpoint.name
    tensors = {
        key.removeprefix("model."): tensor
        for key, tensor in checkpoint.tensors().items()
        if not _IGNORED.fullmatch(key)
    }
    layers, block = _described(name, checkpoint.config, tensors)
    if hidden_layers is not None:
        block["hidden_layers"] = list(hidden_layers)
    if mask_token_id is not None:
        block["mask_token_id"] = mask_token_id
    ids = _ordered(name, tensors)
    settings = block | _sizes(name, layers, tensors, ids)
    _check(name, settings, tensors)
    if settings["draft_vocab_size"] is not None and ids is None:
        raise ValueError(
            f"{name} is incomplete: its logits have {settings['draft_vocab_size']} columns of a vocabulary of "
            f"{settings['vocab_size']}, and d2t, which says whose they are, is missing"
        )
    reduced = {} if ids is None or settings["draft_vocab_size"] is None else {"draft_ids": ids}
    with torch.device("meta"):
        head = BlockHead(made(name, BlockConfig, **settings))
    head = _filled(name, head, tensors | reduced)
    move(head, place, resolved if isinstance(resolved, torch.dtype) else None)
    return head


def _described(
    name: str, stored: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Returns what a ``config.json`` says of the layers, and what of the block, as fields of ``BlockConfig``."""
    kind = stored.get("speculators_model_type")
    inner = section(name, stored, "dflash_config")
    architecture = (stored.get("architectures") or [""])[0]
    if any("_conv." in key or key.startswith("candidate_selector.") for key in tensors):
        raise ValueError(
            f"{name} is a DFlash 2 head, with convolutions or a candidate selector, which are not supported: give a "
            f"DFlash or DSpark head"
        )
    if stored.get("model_type") == BlockConfig.model_type:
        own = BlockConfig.__annotations__
        return stored, {key: value for key, value in stored.items() if key in own and value is not None}
    if kind is not None:
        if kind not in ("dflash", "dspark"):
            raise ValueError(
                f"{name} is a speculators folder of the type {kind!r}: BlockDrafter takes dflash and dspark"
            )
        layers = section(name, stored, "transformer_layer_config")
        shifted = bool(stored.get("sample_from_anchor", kind == "dspark"))
        ids = _first(name, stored, "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
        block = _block(name, stored, stored, shifted=shifted)
        sliding = not stored.get("sliding_window_non_causal", False)
        return layers, block | {"hidden_layers": ids, "causal": _causal(name, layers, full=False, sliding=sliding)}
    if "target_layer_ids" in stored and not inner:  # DeepSpec's, whatever its name: "DFlash", too, is shifted there
        block = _block(name, stored, stored, shifted=True)
        ids = _first(name, stored, "target_layer_ids")
        ids = None if ids is None else [layer + 1 for layer in ids]
        return stored, block | {"hidden_layers": ids, "causal": _one_way(name, stored, stored.get("is_causal"))}
    if inner or architecture.startswith("DFlash"):
        projector = inner.get("projector_type") or "dflash"
        if projector not in ("dflash", "dspark"):
            raise ValueError(f"{name} has the projector_type {projector!r}: BlockDrafter takes dflash and dspark")
        block = _block(name, inner, stored, shifted=projector == "dspark")
        ids = _first(name, inner, "target_layer_ids") or _first(name, stored, "target_layer_ids")
        total = count_of(name, stored, "num_target_layers")
        if ids is None and total is not None:
            ids = default_layers(total, 1 + max((int(m[1]) for m in map(_LAYER.match, tensors) if m), default=0))
        causal = _one_way(name, stored, inner.get("is_causal", stored.get("is_causal")))
        ids = None if ids is None else [layer + 1 for layer in ids]
        return stored, block | {"hidden_layers": ids, "target_layers": total, "causal": causal}
    raise ValueError(
        f"{name} is no block drafter: its config.json has neither dflash_config (z-lab, SpecForge), nor "
        f"target_layer_ids (DeepSpec), nor speculators_model_type (speculators), nor the model_type "
        f"{BlockConfig.model_type!r}"
    )


def _block(name: str, inner: Mapping[str, Any], outer: Mapping[str, Any], *, shifted: bool) -> dict[str, Any]:
    """Returns the fields of a block that all published layouts call alike, in an inner dict or at the top."""
    both = {**outer, **inner}
    size = both.get("block_size")
    if size is None:
        raise ValueError(f"{name}: its config.json has no block_size: add it, as the head was trained")
    found: dict[str, Any] = {"block_size": size, "mask_token_id": both.get("mask_token_id"), "shifted": shifted}
    found["target_hidden_size"] = both.get("target_hidden_size")
    for key in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
        if both.get(key) is not None:
            found[key] = both[key]
    if both.get("markov_head_type"):
        found["markov_head_type"] = both["markov_head_type"]
    return found


def _causal(name: str, layers: Mapping[str, Any], *, full: bool, sliding: bool) -> bool:
    """Returns whether places see only those before them, in all layers of the types that there are.

    Raises:
        ValueError: It differs between layers, which one mask for all of a block cannot say.
    """
    of_type = {"full_attention": full, "sliding_attention": sliding}
    types = set(layers.get("layer_types") or ["full_attention"])
    found = {of_type.get(each, full) for each in types}
    if len(found) > 1:
        raise ValueError(
            f"{name}: its sliding layers see a block one way and its full layers both ways, which is not supported: "
            f"set is_causal in its config.json if it was trained otherwise"
        )
    return found.pop()


def _one_way(name: str, layers: Mapping[str, Any], causal: bool | None) -> bool:
    """Returns ``_causal`` of layouts with ``is_causal``: without it, only sliding layers are causal."""
    return _causal(name, layers, full=bool(causal), sliding=causal is None or causal)


def _first(name: str, stored: Mapping[str, Any], *keys: str) -> list[int] | None:
    """Returns the layer ids under the first of some keys that a ``config.json`` has; None if it has none.

    Raises:
        ValueError: They are no numbers.
    """
    key = next((key for key in keys if stored.get(key) is not None), None)
    remedy = "correct it to a list of whole numbers"
    return None if key is None else list(wholes(f"{name}: its config.json has {key}", stored[key], remedy))


def _sizes(name: str, layers: Mapping[str, Any], tensors: Mapping[str, Tensor], ids: Tensor | None) -> dict[str, Any]:
    """Returns the fields of ``BlockConfig`` that the tensors tell, or else what ``config.json`` says of the layers.

    Raises:
        ValueError: A tensor that is needed is missing, or widths do not fit each other.
    """
    first = "layers.0."
    width = needed(name, tensors, "fc.weight").shape[0]
    heads = heads_of(name, layers, tensors, first, width)
    found: dict[str, Any] = {key: layers[key] for key in _COPIED if layers.get(key) is not None}
    embeddings, output = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    owns_embeddings = embeddings is not None and finite(embeddings)
    if embeddings is not None and owns_embeddings:
        found["vocab_size"] = embeddings.shape[0]
    markov = tensors.get("markov_head.markov_w1.weight")
    if markov is not None:
        found |= {"markov_rank": markov.shape[1], "markov_head_type": _markov_kind(tensors)}
        found["markov_biases"] = any(key in tensors for key in _MARKOV_BIASES)
        found.setdefault("vocab_size", markov.shape[0])
    if output is not None and ids is None:
        found.setdefault("vocab_size", output.shape[0])
    if "vocab_size" not in found:
        raise ValueError(f"{name}: its config.json has no vocab_size: add that of its target")
    columns = next((tensors[key].shape[0] for key in _COLUMNS if key in tensors), found["vocab_size"])
    judge = tensors.get("confidence_head.proj.weight")
    return found | {
        "layer_kind": "qwen3" if norms_queries(tensors, first) else "llama",
        "hidden_size": width,
        "intermediate_size": needed(name, tensors, f"{first}mlp.gate_proj.weight").shape[0],
        "num_hidden_layers": 1 + max(int(m[1]) for m in map(_LAYER.match, tensors) if m),
        **heads,
        "attention_bias": f"{first}self_attn.q_proj.bias" in tensors,
        "mlp_bias": f"{first}mlp.gate_proj.bias" in tensors,
        "use_sliding_window": "sliding_attention" in (layers.get("layer_types") or ()),
        "rope_parameters": rope_of(name, layers),
        "draft_vocab_size": None if columns == found["vocab_size"] else columns,
        "owns_embeddings": owns_embeddings,
        "owns_output": output is not None,
        "confidence": judge is not None,
        "confidence_with_markov": judge is not None and judge.shape[1] > width,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


_COLUMNS = ("lm_head.weight", "markov_head.markov_w2.weight")
_MARKOV_BIASES = ("markov_head.gate_proj.bias", "markov_head.joint_proj.bias")


def _markov_kind(tensors: Mapping[str, Tensor]) -> str:
    """Returns which of ``markov.KINDS`` a Markov head is."""
    vanilla, gated, rnn = KINDS
    if "markov_head.gate_proj.weight" in tensors:
        return gated
    return rnn if "markov_head.joint_proj.weight" in tensors else vanilla


def _check(name: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse numbers that contradict each other.

    Raises:
        ValueError: Says which, and what to give.
    """
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
    if not isinstance(ids, list | tuple) or any(type(layer) is not int for layer in ids):
        raise ValueError(f"{name}: {ids!r} are no numbers of hidden states: give hidden_layers=[…]")
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


def _ordered(name: str, tensors: dict[str, Tensor]) -> Tensor | None:
    """Returns the target's id of every column of a reduced vocabulary, ascending; None for a full one.

    Takes ``d2t``, ``t2d`` or our ``draft_ids`` out of the tensors, and puts the rows of the output layers in order.

    Raises:
        ValueError: The two tables contradict each other, or the head has no output layer of its own.
    """
    ids = draft_ids_of(name, tensors)
    for key in ("d2t", "t2d"):
        tensors.pop(key, None)
    own = tensors.pop("draft_ids", None)
    ids = own if ids is None else ids
    if ids is None:
        return None
    ordered, order = ids.sort()
    if "lm_head.weight" not in tensors:
        raise ValueError(
            f"{name} is incomplete: it has a vocabulary of {len(ids)} tokens of its own (d2t) and no lm_head.weight, "
            f"which cannot be the target's"
        )
    for key in _COLUMNS:
        if key in tensors and tensors[key].shape[0] == len(ids):
            tensors[key] = tensors[key][order]
    return ordered


def _filled(name: str, head: BlockHead, tensors: Mapping[str, Tensor]) -> BlockHead:
    """Put tensors into a head that was made on the ``meta`` device. Embeddings that it borrows are left out.

    Raises:
        ValueError: Tensors are missing, or superfluous, or of another shape.
    """
    wanted = head.state_dict()
    kept = {key: tensor for key, tensor in tensors.items() if key in wanted or key != "embed_tokens.weight"}
    unknown = [key for key in kept if key not in wanted]
    if unknown:
        raise ValueError(f"{name} holds {', '.join(unknown[:4])}, which a block drafter does not have")
    return fill(name, head, kept, {})
