"""The folder layouts of EAGLE heads, read and written: EAGLE-1/2, EAGLE-3 and 3.1, in several dialects.

What a checkpoint is, is read off its tensors; its ``config.json`` is asked only for what they cannot tell.
"""

import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.heads.assemble import (
    Names,
    config_of,
    count_of,
    draft_id_tensors,
    fill,
    finite,
    layers_said,
    loader,
    named,
    needed,
    section,
    take_draft_ids,
)
from drafters.heads.eagle import Eagle3Head, EagleHead
from drafters.heads.files import OURS, Checkpoint, ServedFor, check_layout, check_limits, write
from specdec.arguments import wholes
from specdec.drafting.vocabulary import MOST_PADDING
from specdec.machine import dtype_name

LAYOUTS = ("native", "speculators", "sglang")
"""EAGLE's own; speculators' (vLLM); EAGLE's with what SGLang reads otherwise."""
TOKENS = 5
EMBEDDINGS = ("auto", "own", "target")
IDS = "eagle_aux_hidden_state_layer_ids"
KEYS = {
    "captured_width": "target_hidden_size", "norm_before_residual": "norm_before_residual", "norm_each": "fc_norm",
    "norm_joined": "norm_before_fc", "feeds_normed": "norm_output", "columns": "draft_vocab_size",
}  # fmt: skip
"""Attributes of an EAGLE-3 head, and their public keys. No tensor tells the ``FLAGS``; those of ``NORMS`` do."""
FLAGS = ("norm_before_residual", "feeds_normed")
NORMS = {"norm_joined": "input_norm.weight", "norm_each": "fc_norm.0.weight"}
_LAYER = re.compile(r"(?:midlayer|layers\.0)\.")
_IGNORED = re.compile(r".*rotary_emb\.inv_freq|(?:model\.)?verifier_(?:lm_head|norm)\.weight")

SPECULATORS = {"fusion_bias": False, "owns_output": True}
SGLANG = {"config.model_type": "llama", "owns_embeddings": False}
SGLANG_3 = {"norm_before_residual": False, "norm_joined": False, "at_once": False}
SGLANG_3 |= {"owns_output": True, "config.num_hidden_layers": 1}
"""Limits of heads in these layouts, by attribute: their readers would leave the rest out."""


def names_of(first: str) -> Names:
    """The table of names; ``first`` is what the names of the first layer's tensors begin with."""
    return (
        ("model.fusion.norm.norms.", "fc_norm."),
        ("model.fusion.norm.", "input_norm."),
        ("model.fusion.linear.", "fc."),
        ("model.layers.0.", first),
        ("model.", ""),
    )


@loader
def load_eagle(
    checkpoint: Checkpoint,
    *,
    kind: type[Eagle3Head] = Eagle3Head,
    hidden_layers: tuple[int, ...] | None = None,
    embeddings: str = "auto",
) -> EagleHead | Eagle3Head:
    """Load a head of EAGLE-1, 2, 3 or 3.1.

    Args:
        kind: The class of heads that fuse hidden states.
        hidden_layers: The target's hidden states that an EAGLE-3 head fuses, in place of those that its files name.
        embeddings: ``"own"`` takes the checkpoint's, ``"target"`` the target's; ``"auto"`` the checkpoint's if it has
            some and they are finite.
    """
    check_layout(embeddings, EMBEDDINGS, "embeddings")
    name, stored = checkpoint.name, checkpoint.tensors(lambda key: not _IGNORED.fullmatch(key))
    tensors = {key.removeprefix("model."): tensor for key, tensor in stored.items()}
    own = finite(tensors.get("embed_tokens.weight"))
    if embeddings == "own" and not own:
        raise ValueError(f"embeddings='own' and {name} has none that are finite: give 'target'")
    if embeddings == "target" or not own:
        tensors.pop("embed_tokens.weight", None)
    # EAGLE-3's first layer reads two widths side by side, whatever may be missing.
    queries, output = (tensors.get(f"layers.0.self_attn.{part}_proj.weight") for part in "qo")
    wide = queries is not None and output is not None and queries.shape[1] == 2 * output.shape[0]
    if wide or any(key.startswith("midlayer.") or key == "layers.0.hidden_norm.weight" for key in tensors):
        return _eagle3(checkpoint, tensors, hidden_layers, kind)
    if "fc.weight" not in tensors or not any(_LAYER.match(key) for key in tensors):
        raise ValueError(
            f"{name} is no EAGLE head: it has no tensors fc.weight and midlayer.* (or layers.0.*); its tensors are "
            f"{', '.join(sorted(tensors)[:3]) or 'none'} …"
        )
    if hidden_layers is not None:
        raise ValueError(
            f"hidden_layers={list(hidden_layers)} and {name} is an EAGLE-1 head, which reads the last hidden "
            f"state: leave hidden_layers out"
        )
    config = config_of(name, checkpoint.config, tensors, "layers.0.")
    for key in ("lm_head.weight", "d2t", "t2d"):  # the target's, where a copy was saved
        tensors.pop(key, None)
    table = tensors.get("embed_tokens.weight")
    config.vocab_size = config.vocab_size if table is None else len(table)
    with torch.device("meta"):
        head = EagleHead(config, fusion_bias="fc.bias" in tensors, owns_embeddings=table is not None)
    return fill(name, head, tensors, [("model.", "")])


def _eagle3(
    checkpoint: Checkpoint, tensors: dict[str, Tensor], hidden_layers: tuple[int, ...] | None, kind: type[Eagle3Head]
) -> Eagle3Head:
    name, stored, ours = checkpoint.name, checkpoint.config, checkpoint.json(OURS) or {}
    first = "midlayer." if any(key.startswith("midlayer.") for key in tensors) else "layers.0."
    config = config_of(name, section(name, stored, "transformer_layer_config") or stored, tensors, first)
    joined = needed(name, tensors, "fc.weight").shape[1]
    width = ours.get("captured_width") or count_of(name, stored, KEYS["captured_width"]) or config.hidden_size
    chosen = hidden_layers or layers_of(stored, ours, name=name)
    captured = len(chosen or ()) or joined // width
    if joined != captured * width:
        raise ValueError(
            f"{name}: fc.weight reads {joined} channels, and hidden states of width {width} would be "
            f"{joined / width:.3g}, where {captured} are named: give hidden_layers with as many numbers, or correct "
            f"target_hidden_size in its config.json"
        )
    for norm, key in NORMS.items():
        if stored.get(KEYS[norm]) is True:
            needed(name, tensors, key)
    embeddings, marks, more = tensors.get("embed_tokens.weight"), tensors.get("t2d"), kind.stored(checkpoint, tensors)
    ids = take_draft_ids(name, tensors)
    rows = tensors.get("lm_head.weight") if ids is None else None
    told = [len(part) for part in (embeddings, marks, rows) if part is not None]
    config.vocab_size = told[0] if told else config.vocab_size
    if embeddings is not None and marks is not None and abs(len(marks) - len(embeddings)) > MOST_PADDING:
        raise ValueError(
            f"{name}: its t2d marks the tokens of a vocabulary of {len(marks)} and its embeddings have "
            f"{len(embeddings)}: one of them belongs to another checkpoint"
        )
    parts: Any = ours, stored, section(name, stored, "eagle_config")
    said = ChainMap(*parts)
    with torch.device("meta"):
        head = kind(
            config,
            hidden_layers=chosen,
            captured=captured,
            captured_width=width,
            fusion_bias="fc.bias" in tensors,
            owns_embeddings=embeddings is not None,
            owns_output="lm_head.weight" in tensors,
            draft_ids=ids,
            **{norm: key in tensors for norm, key in NORMS.items()},
            **{flag: bool(said.get(KEYS[flag])) for flag in FLAGS},
            **more,
        )
    head.tokens = head.tokens or ours.get("tokens")
    return fill(name, head, tensors, names_of(first))


def layers_of(
    stored: Mapping[str, Any], ours: Mapping[str, Any], *, name: str = "the checkpoint"
) -> tuple[int, ...] | None:
    """The hidden states of the target that a checkpoint names, numbered as inputs of layers; None if none.

    The key's name decides what a number means. ``target_layer_ids`` are outputs of layers. With
    ``eagle_aux_hidden_state_layer_ids``, published checkpoints mean inputs (2, N/2, N-3) or outputs (1, N/2-1, N-4); a
    first number of 1 tells, but for speculators, whose numbers are always inputs.
    """
    remedy = "correct it to a list of whole numbers, or give hidden_layers=[…]"
    if ours.get("hidden_layers") is not None:
        return wholes(f"{name}: its {OURS} has hidden_layers", ours["hidden_layers"], remedy)
    said = f"{name}: its config.json has"
    if stored.get("target_layer_ids") is not None:
        return tuple(layer + 1 for layer in wholes(f"{said} target_layer_ids", stored["target_layer_ids"], remedy))
    ids = section(name, stored, "eagle_config").get(IDS) or stored.get(IDS)
    if not ids:
        return None
    ids = wholes(f"{said} {IDS}", ids, remedy)
    outputs = ids[0] == 1 and stored.get("speculators_model_type") is None
    return tuple(layer + outputs for layer in ids)


def save_eagle(
    head: EagleHead | Eagle3Head,
    folder: str | Path,
    *,
    layout: str = "native",
    served: ServedFor | None = None,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write a head's files; refuses what the layout cannot say, and speculators' without the target (``served``)."""
    fuses = isinstance(head, Eagle3Head)
    check_layout(layout, LAYOUTS if fuses else ("native", "sglang"))
    if layout == "sglang":
        check_limits(layout, head, SGLANG | (SGLANG_3 if fuses else {"fusion_bias": True}))
    elif layout == "speculators":
        check_limits(layout, head, SPECULATORS)
    if fuses and layout != "native":
        _check_layers(layout, head.hidden_layers)
    layers, dtype = layers_said(head.config), dtype_name(head.dtype)
    public, ours = {**layers, "torch_dtype": dtype}, {"family": "eagle", **(notes or {})}
    if layout == "sglang" or not fuses:
        public["bias"] = head.fusion_bias
    if not isinstance(head, Eagle3Head):
        public["architectures"] = ["LlamaForCausalLMEagle" if layout == "sglang" else "LlamaForCausalLM"]
        write(folder, named(dict(head.named_parameters()), names_of("layers.0.")), public, ours=ours)
        return
    ids = None if head.hidden_layers is None else [layer - (layout == "sglang") for layer in head.hidden_layers]
    own = {key: getattr(head, attribute) for attribute, key in KEYS.items()} | head.said()
    if layout == "speculators":
        public = (served or ServedFor(target="")).speculators(*head.in_speculators, head.tokens or TOKENS)
        public |= {"dtype": dtype, "transformer_layer_config": layers | {"dtype": dtype}, IDS: ids}
    else:
        public["architectures"] = ["LlamaForCausalLMEagle3"]
        public["eagle_config"] = {"use_aux_hidden_state": True, IDS: ids}
        public |= {"num_aux_hidden_states": head.captured} if layout == "sglang" else {}
    ours |= {"family": "eagle3", "hidden_layers": head.hidden_layers, "captured_width": head.captured_width}
    ours |= {} if head.tokens is None else {"tokens": head.tokens}
    ours |= {KEYS[flag]: getattr(head, flag) for flag in FLAGS}
    first = "midlayer." if len(head.model.layers) == 1 and layout != "speculators" else "layers.0."
    tensors = dict(head.named_parameters()) | draft_id_tensors(head.draft_ids, head.config.vocab_size)
    write(folder, named(tensors, names_of(first)), public | own, ours=ours)


def _check_layers(layout: str, layers: Sequence[int] | None) -> None:
    if layers is None:
        raise ValueError("the head's files do not say which hidden states of the target it fuses: give hidden_layers")
    least = 1 if layout == "sglang" else 0  # it counts outputs of layers
    if min(layers) < least or (layout == "speculators" and len({*layers}) < len(layers)):
        raise ValueError(
            f"layout={layout} has no heads that fuse the hidden states {list(layers)}: engines hand out each one once, "
            f"and not the last one after its norm (-1); SGLang not the embeddings (0): give native"
        )
