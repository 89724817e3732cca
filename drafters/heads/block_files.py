"""The folders of block drafters' heads, read and written: z-lab's and SpecForge's, DeepSpec's, speculators', and ours.

All of them name the tensors as we do; what differs is ``config.json``. Sizes are read off the tensors, because uploaded
configurations are often wrong about them.
"""

import re
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafters.heads.assemble import (
    Written,
    count_layers,
    count_of,
    draft_id_tensors,
    fill,
    finite,
    layers_said,
    loader,
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
from drafters.heads.files import Checkpoint, ServedFor, check_layout, check_limits, write
from specdec.arguments import whole, wholes
from specdec.machine import dtype_name

NAMES = (
    ("prefix_head.gru_input.weight", "prefix_gru.weight_ih_l0"),
    ("prefix_head.gru_state.weight", "prefix_gru.weight_hh_l0"),
    ("prefix_head.joined.weight", "embed_proj.0.weight"),
    ("prefix_head.columns.weight", "embed_proj.2.weight"),
)
"""Tensors whose published names are others than ours."""
PARTS = {
    "shifted": ("markov_rank", "markov_head_type", "confidence", "confidence_with_markov"),
    "markov_rank": ("markov_rank", "markov_head_type"),
    "selector_rank": ("selector_rank", "selector_top_k"),
    "conv_kernel_size": ("conv_kernel_size", "conv_group_size"),
    "gru_hidden_dim": ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"),
    "xpress_rank": ("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes"),
}
"""Parts that a head may have besides layers: by the field that says so, the fields that describe it."""
KEYS = {"confidence": "enable_confidence_head", "confidence_with_markov": "confidence_head_with_markov"}
"""Fields with another name in all public layouts."""
UNTOLD = ("markov_head_type", "selector_top_k", "pure_draft_prefix_len", "num_jacobi_passes")
FACTORS = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
"""Fields that no tensor tells; of the factors, what they are if nothing is said."""
SIZES = (
    ("markov_rank", "markov_head.markov_w1.weight", 1),
    ("gru_hidden_dim", "prefix_gru.weight_hh_l0", 1),
    ("emb_dim", "embed_proj.0.weight", 0),
    ("xpress_rank", "refiner_head.down_h.weight", 0),
    ("selector_rank", "candidate_selector.predecessor_codebook", 1),
    ("conv_kernel_size", "layers.0.attention_conv.base_kernel", 1),
)
"""Fields that tensors tell: the tensor, and the axis that has this length."""
ROWS = ("embed_tokens.weight", "refiner_head.token_embed.weight", "candidate_selector.predecessor_codebook")
COLUMNS = ("lm_head.weight", "markov_head.markov_w2.weight", "embed_proj.2.weight", "refiner_head.readout.weight")
_MARKOV_ROWS = "markov_head.markov_w1.weight"


class Layout(NamedTuple):
    """A public ``config.json``.

    Attributes:
        kinds: By the parts of a head: the name of its class, and the layout's word for such heads.
        ids: The key of the target's hidden states, which are counted as outputs of layers or (without) as inputs.
        block: The group of the block's settings; empty where they stand at the top.
    """

    kinds: Mapping[frozenset[str], tuple[str, str]]
    ids: str = "target_layer_ids"
    outputs: bool = True
    block: str = ""


_PLAIN, _SHIFTED, _MARKOV = frozenset[str](), frozenset({"shifted"}), frozenset({"shifted", "markov_rank"})
_SECOND, _GRU = frozenset({"conv_kernel_size", "selector_rank"}), frozenset({"gru_hidden_dim"})
LAYOUTS = {
    "deepspec": Layout(dict.fromkeys((_SHIFTED, _MARKOV), ("Qwen3DSparkModel", "dspark"))),
    "z-lab": Layout(
        {
            _PLAIN: ("DFlashDraftModel", "dflash"),
            **dict.fromkeys((_SHIFTED, _MARKOV), ("DFlashDraftModel", "dspark")),
            **dict.fromkeys((_GRU, _GRU | _SHIFTED), ("DominoDraftModel", "domino")),
            _SECOND: ("DFlash2DraftModel", "dflash2"),
        },
        block="dflash_config",
    ),
    "speculators": Layout(
        {
            _PLAIN: ("DFlashDraftModel", "dflash"),
            **dict.fromkeys((_SHIFTED, _MARKOV), ("DSparkDraftModel", "dspark")),
            frozenset({"xpress_rank"}): ("XPressDraftModel", "xpress"),
        },
        ids="aux_hidden_state_layer_ids",
        outputs=False,
    ),
}
"""DeepSpec's (SGLang, vLLM), z-lab's with SpecForge's (SGLang, vLLM), and speculators' (vLLM). The first one that has a
head's parts is the ``native`` one."""
WORDS = ("dflash", "dspark", "domino", "dflash2", "xpress")
SGLANG = {
    **dict.fromkeys(("owns_output", "owns_embeddings", "mlp_bias", "causal"), False),
    **dict.fromkeys(("selector_rank", "conv_kernel_size", "gru_hidden_dim", "xpress_rank"), 0),
    **FACTORS,
    "layer_kind": "qwen3",
}
"""SGLang serves heads with these settings, and would leave the rest of others out silently."""


def save_block(head: BlockHead, folder: str | Path, *, layout: str = "own", served: ServedFor | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors``; refuses a head that the layout cannot say.

    ``layout`` is ``"own"``, one of ``LAYOUTS``, ``"native"`` for the first of them that has such heads, or ``"sglang"``
    for that one if SGLang can serve the head. speculators' has to name the target (``served``).
    """
    check_layout(layout, ("own", *LAYOUTS, "native", "sglang"))
    if layout == "own":
        head.save_pretrained(folder)
        return
    config, parts = head.config, frozenset(part for part in PARTS if getattr(head.config, part))
    if layout == "sglang":
        check_limits(layout, config, {**SGLANG, "target_hidden_size": config.target_hidden_size and config.hidden_size})
    if layout == "sglang" and parts == _SHIFTED:
        raise ValueError("layout=sglang has no shifted places without a Markov head: give native")
    if layout not in LAYOUTS:
        layout = next((name for name, known in LAYOUTS.items() if parts in known.kinds), "z-lab")
    if parts not in LAYOUTS[layout].kinds:
        only = " and ".join(part for part in PARTS if part in parts) or "places that predict their own tokens"
        raise ValueError(f"layout={layout} has no heads with {only} and nothing else: our own layout has all")
    tensors = dict(head.state_dict())
    ids = draft_id_tensors(tensors.pop("draft_ids", None), config.vocab_size)
    write(folder, named(tensors, NAMES) | ids, _public(head, layout, parts, served or ServedFor(target="")))


def _public(head: BlockHead, layout: str, parts: frozenset[str], served: ServedFor) -> Written:
    """The ``config.json`` of a head whose parts a layout has. Refuses one whose places see others otherwise."""
    config, known, dtype = head.config, LAYOUTS[layout], dtype_name(head.dtype)
    architecture, kind = known.kinds[parts]
    fields = ["block_size", "mask_token_id", *(field for part in PARTS if part in parts for field in PARTS[part])]
    fields += [field for field, usual in FACTORS.items() if getattr(config, field) != usual]
    block: Written = {str(KEYS.get(field, field)): getattr(config, field) for field in fields}
    block[known.ids] = [layer - known.outputs for layer in head.hidden_layers]
    layers: Written = layers_said(config) | {"model_type": config.layer_kind, "dtype": dtype}
    one_way = config.causal if config.causal_in_windows is None else config.causal_in_windows
    if layout == "speculators":
        full = config.causal and "full_attention" in (config.layer_types or ())
        if full or (config.slides and not config.window_from_root):
            raise ValueError(
                f"layout={layout} has full layers that see a block both ways, and windows that are counted from the "
                f"root: give z-lab"
            )
        if config.slides:
            layers["sliding_window"] -= 1  # the root is not counted
        sizes = {"draft_vocab_size": config.columns, "target_hidden_size": config.target_hidden_size}
        said = {"dtype": dtype, "transformer_layer_config": layers, "sample_from_anchor": config.shifted}
        public = served.speculators(kind, architecture, config.tokens)
        return {**public, **said, **sizes, "sliding_window_non_causal": not one_way, **block}
    if config.slides and (config.window_from_root or (config.causal and not one_way)):
        raise ValueError(
            f"layout={layout} has windows that are counted from each place, and no full layers that see a block one "
            f"way beside sliding ones that do not: give speculators, or our own layout"
        )
    if known.block:
        block |= {"projector_type": kind} if kind in ("dspark", "domino") else {}
        block |= {"shift_label": config.shifted} if kind == "domino" else {}
        block = {"block_size": config.block_size, known.block: block}
        block |= {} if config.target_layers is None else {"num_target_layers": config.target_layers}
    # Without it, only sliding layers are causal.
    causal = {"is_causal": config.causal} if one_way == config.causal else {}
    return {"architectures": [architecture], **layers, **causal, **block}


_PREFIX = re.compile(r"(?:model|logit_head|domino_head)\.")
_FLAT = re.compile(r"(?=(?:markov_w[12]|gate_proj|joint_proj)\.)")
"""Where the names of modelopt's Markov heads lack what stands before those of all others."""
_IGNORED = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq|verifier_(?:lm_head|norm)\.weight")
_COPIED = ("hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "sliding_window", "layer_types")


@loader
def load_block(
    checkpoint: Checkpoint, *, hidden_layers: tuple[int, ...] | None = None, mask_token_id: int | None = None
) -> BlockHead:
    """Load a block drafter's head; ``hidden_layers`` and ``mask_token_id`` replace those that its files name."""
    name, tensors = checkpoint.name, {}
    for key, tensor in checkpoint.tensors().items():
        if not _IGNORED.fullmatch(key):
            key = _PREFIX.sub("", key).replace("confidence_proj.", "confidence_head.proj.")
            tensors["markov_head." + key if _FLAT.match(key) else key] = tensor
    tensors = named(tensors, NAMES)
    if not finite(tensors.get("embed_tokens.weight")):
        tensors.pop("embed_tokens.weight", None)
    layers, settings = _described(name, checkpoint.config, tensors)
    settings |= {} if hidden_layers is None else {"hidden_layers": list(hidden_layers)}
    settings |= {} if mask_token_id is None else {"mask_token_id": mask_token_id}
    ids = take_draft_ids(name, tensors, COLUMNS)
    settings |= _sizes(name, layers, tensors, reduced=ids is not None)
    _check(name, settings, tensors)
    tensors |= {} if ids is None else {"d2t": ids}
    with torch.device("meta"):
        head = BlockHead(made(name, BlockConfig, **settings))
    return fill(name, head, tensors, [*NAMES, ("draft_ids", "d2t")])


def _described(
    name: str, stored: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Returns the settings of the layers in a ``config.json``, and those of the block as fields of ``BlockConfig``."""
    inner, kind = section(name, stored, "dflash_config"), stored.get("speculators_model_type")
    both: Any = inner, stored
    layout, layers, given = LAYOUTS["speculators" if kind else "z-lab"], stored, ChainMap(*both)
    if stored.get("model_type") == BlockConfig.model_type:
        own = BlockConfig.__annotations__
        return stored, {key: stored[key] for key in stored if key in own and stored[key] is not None}
    if kind is None and "target_layer_ids" in stored and not inner:
        kind = "dspark"  # DeepSpec's, whatever its name: "DFlash", too, is shifted there
    elif kind is None and (inner or (stored.get("architectures") or [""])[0].startswith("DFlash")):
        kind = inner.get("projector_type") or "dflash"
    elif kind is None:
        raise ValueError(
            f"{name} is no block drafter: its config.json has neither dflash_config (z-lab, SpecForge), nor "
            f"target_layer_ids (DeepSpec), nor speculators_model_type (speculators), nor the model_type "
            f"{BlockConfig.model_type!r}"
        )
    if kind not in WORDS:
        raise ValueError(f"{name} is of the kind {kind!r}: BlockDrafter takes {', '.join(WORDS)}")
    if given.get("block_size") is None:
        raise ValueError(f"{name}: its config.json has no block_size: add it, as the head was trained")
    if layout.outputs:
        shifted = kind == "dspark" or bool(given.get("shift_label"))
        causal = given.get("causal", given.get("is_causal"))  # without it, only sliding layers are causal
        if given.get("use_swa"):  # modelopt's and vLLM's: all layers have a window, and are no more causal for it
            window = stored.get("sliding_window") or given.get("swa_window_size")
            kinds, causal = ["sliding_attention"] * count_layers(tensors), bool(causal)
            layers = ChainMap({"layer_types": kinds, "sliding_window": window}, both[1])
        sight = _sight(layers, full=bool(causal), sliding=causal is None or bool(causal))
    else:
        described: Any = section(name, stored, "transformer_layer_config")
        layers = ChainMap({}, described)
        if layers.get("sliding_window") is not None:  # positions before the root, whatever the place
            layers["sliding_window"] = whole(f"{name}: its sliding_window", layers["sliding_window"], least=1) + 1
        shifted = stored.get("sample_from_anchor", kind == "dspark" or stored.get("projector_type") == "domino")
        shifted = shifted if stored.get("shift_label") is None else stored["shift_label"]
        sight = _sight(layers, full=False, sliding=not stored.get("sliding_window_non_causal", kind == "dflash2"))
        sight |= {"window_from_root": True} if "sliding_attention" in (layers.get("layer_types") or ()) else {}
    key, total = layout.ids, count_of(name, stored, "num_target_layers")
    ids = given.get(key, given.get(f"eagle_{key}"))
    if ids is not None:
        ids = wholes(f"{name}: its config.json has {key}", ids, "correct it to a list of whole numbers")
    elif total is not None:
        ids = default_layers(total, count_layers(tensors))
    fields = ("block_size", "mask_token_id", "target_hidden_size", *UNTOLD, *FACTORS)
    return layers, {
        **{field: given[field] for field in fields if given.get(field) is not None},
        "shifted": bool(shifted),
        "hidden_layers": None if ids is None else [layer + layout.outputs for layer in ids],
        "target_layers": total,
        **sight,
    }


def is_shifted(stored: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is of a head with shifted places."""
    return bool(_described("it", stored, {})[1].get("shifted"))


def _sight(layers: Mapping[str, Any], *, full: bool, sliding: bool) -> dict[str, Any]:
    """The directions in which places see each other, as fields of ``BlockConfig``, for each type of layers there is."""
    types = set(layers.get("layer_types") or ())
    if "sliding_attention" not in types:
        return {"causal": full}
    causal = full if len(types) > 1 else sliding
    return {"causal": causal} | ({} if sliding is causal else {"causal_in_windows": sliding})


def _sizes(name: str, layers: Mapping[str, Any], tensors: Mapping[str, Tensor], *, reduced: bool) -> dict[str, Any]:
    """The fields of ``BlockConfig`` that the tensors tell, or else what ``config.json`` says of the layers."""
    first, width = "layers.0.", needed(name, tensors, "fc.weight").shape[0]
    found: dict[str, Any] = {key: layers[key] for key in _COPIED if layers.get(key) is not None}
    tables = [len(tensors[key]) for key in (*(() if reduced else ("lm_head.weight",)), _MARKOV_ROWS) if key in tensors]
    certain = [len(tensors[key]) for key in ROWS if key in tensors]
    found["vocab_size"] = certain[-1] if certain else found.get("vocab_size") or (tables[-1] if tables else None)
    if found["vocab_size"] is None:
        raise ValueError(f"{name}: its config.json has no vocab_size: add that of its target")
    found |= {field: tensors[key].shape[axis] for field, key, axis in SIZES if key in tensors}
    if "markov_rank" in found:
        kind = "gated" if "markov_head.gate_proj.weight" in tensors else "vanilla"
        found["markov_head_type"] = "rnn" if "markov_head.joint_proj.weight" in tensors else kind
        found["markov_biases"] = not {"markov_head.gate_proj.bias", "markov_head.joint_proj.bias"}.isdisjoint(tensors)
    if "xpress_rank" in found:
        found["xpress_mlp_ratio"] = len(needed(name, tensors, "refiner_head.mlp_gate.weight")) // found["xpress_rank"]
    if "conv_kernel_size" in found:
        taps = len(needed(name, tensors, "layers.0.attention_conv.kernel_projection.weight"))
        found["conv_group_size"] = width * 2 * found["conv_kernel_size"] // taps
    columns = next((len(tensors[key]) for key in COLUMNS if key in tensors), found["vocab_size"])
    judge = tensors.get("confidence_head.proj.weight")
    return found | {
        "layer_kind": "qwen3" if norms_queries(tensors, first) else "llama",
        **sizes_of(name, layers, tensors, first, width),
        "mlp_bias": f"{first}mlp.gate_proj.bias" in tensors,
        "use_sliding_window": "sliding_attention" in (layers.get("layer_types") or ()),
        "draft_vocab_size": None if columns == found["vocab_size"] else columns,
        "owns_embeddings": "embed_tokens.weight" in tensors,
        "owns_output": "lm_head.weight" in tensors,
        "confidence": judge is not None,
        "confidence_with_markov": judge is not None and judge.shape[1] > width,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }


def _check(name: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse what neither the configuration nor a tensor's shape would tell."""
    least, said = 1 if settings.get("shifted") else 2, f"{name}: its config.json has"
    whole(f"{said} block_size", settings.get("block_size", 2), least=least)
    if settings.get("mask_token_id") is None:
        raise ValueError(f"{said} no mask_token_id: give mask_token_id=…, as in training")
    mask, vocabulary = whole(f"{name}: mask_token_id", settings["mask_token_id"]), settings["vocab_size"]
    if not 0 <= mask < vocabulary:
        raise ValueError(
            f"{name}: its mask token {mask} is outside of the vocabulary of {vocabulary} tokens: give mask_token_id=…, "
            f"as in training"
        )
    ids, joined = settings.get("hidden_layers"), tensors["fc.weight"].shape[1]
    if not ids or min(wholes(f"{name}: hidden_layers", ids, "give hidden_layers=[…]")) < 0:
        raise ValueError(
            f"{name}: its config.json does not say which hidden states of the target it reads (it says {ids}): give "
            f"hidden_layers=…"
        )
    width = count_of(name, settings, "target_hidden_size") or settings["hidden_size"]
    if joined != len(ids) * width:
        raise ValueError(
            f"{name}: fc.weight reads {joined} channels, and {len(ids)} hidden states of width {width} have "
            f"{len(ids) * width}: correct the layer ids in its config.json, or give hidden_layers=…"
        )
