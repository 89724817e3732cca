"""The folders of block drafters' heads, read and written: z-lab's and SpecForge's, DeepSpec's, speculators', and ours.

All of them name the tensors as we do; what differs is ``config.json``. Sizes are read off the tensors, because uploaded
configurations are often wrong about them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.heads.assemble import (
    Written,
    count_layers,
    count_of,
    draft_id_tensors,
    fill,
    finite,
    loaded,
    made,
    named,
    needed,
    norms_queries,
    section,
    sizes_of,
    take_draft_ids,
)
from drafters.heads.block import BlockConfig, BlockHead, default_layers
from drafters.heads.block_parts import NAMES
from drafters.heads.files import Checkpoint, ServedFor, check_layout, write
from specdec.arguments import whole, wholes
from specdec.machine import dtype_name

# ---------------------------------------------------------------- the layouts

PARTS = {
    "shifted": ("shifted places", ("markov_rank", "markov_head_type", "confidence", "confidence_with_markov")),
    "markov_rank": ("a Markov head", ("markov_rank", "markov_head_type")),
    "selector_rank": ("a selector", ("selector_rank", "selector_top_k")),
    "conv_kernel_size": ("convolutions", ("conv_kernel_size", "conv_group_size")),
    "gru_hidden_dim": ("a recurrent network", ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")),
    "xpress_rank": ("a refiner", ("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes")),
}
"""What a head may have besides layers, by the field that says so: its name, and the fields that describe it."""
PUBLIC = {"confidence": "enable_confidence_head", "confidence_with_markov": "confidence_head_with_markov"}
"""Fields with another name in all public layouts; the others have the same one everywhere."""
UNTOLD = ("markov_head_type", "selector_top_k", "pure_draft_prefix_len", "num_jacobi_passes")
FACTORS = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
"""Fields that no tensor tells; of the factors, what they are if nothing is said."""
_LAYERS = """attention_bias head_dim hidden_act hidden_size intermediate_size layer_types max_position_embeddings
mlp_bias num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters sliding_window
use_sliding_window vocab_size"""
_PLAIN, _SHIFTED, _MARKOV = frozenset[str](), frozenset({"shifted"}), frozenset({"shifted", "markov_rank"})
_SECOND, _GRU = frozenset({"conv_kernel_size", "selector_rank"}), frozenset({"gru_hidden_dim"})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A public ``config.json``.

    Attributes:
        kinds: By the parts of a head: the name of its class, and the layout's word for such heads.
        ids: The key of the target's hidden states.
        outputs: Whether these are counted as outputs of layers; else as inputs.
        block: The group of the block's settings; empty where they stand at the top.
        layers: The group of the layers' settings, likewise.
    """

    kinds: Mapping[frozenset[str], tuple[str, str]]
    ids: str = "target_layer_ids"
    outputs: bool = True
    block: str = ""
    layers: str = ""


DSPARK = ("Qwen3DSparkModel", "dspark")
LAYOUTS = {
    "deepspec": Layout(kinds={_SHIFTED: DSPARK, _MARKOV: DSPARK}),
    "z-lab": Layout(
        kinds={
            _PLAIN: ("DFlashDraftModel", "dflash"),
            **dict.fromkeys((_SHIFTED, _MARKOV), ("DFlashDraftModel", "dspark")),
            **dict.fromkeys((_GRU, _GRU | _SHIFTED), ("DominoDraftModel", "domino")),
            _SECOND: ("DFlash2DraftModel", "dflash2"),
        },
        block="dflash_config",
    ),
    "speculators": Layout(
        kinds={
            _PLAIN: ("DFlashDraftModel", "dflash"),
            **dict.fromkeys((_SHIFTED, _MARKOV), ("DSparkDraftModel", "dspark")),
            frozenset({"xpress_rank"}): ("XPressDraftModel", "xpress"),
        },
        ids="aux_hidden_state_layer_ids",
        outputs=False,
        layers="transformer_layer_config",
    ),
}
"""DeepSpec's (SGLang, vLLM), z-lab's with SpecForge's (SGLang, vLLM), and speculators' (vLLM). The first one that has a
head's parts is the ``native`` one."""
KINDS = ("dflash", "dspark", "dflash2", "xpress")
"""speculators' names of what is loaded."""
PROJECTORS = ("dflash", "dspark", "domino", "dflash2")
"""SpecForge's and modelopt's."""

# ---------------------------------------------------------------- writing


def save_block(head: BlockHead, folder: str | Path, *, layout: str = "own", served: ServedFor | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors``.

    Args:
        folder: Where to; it is made if it is not there.
        layout: ``"own"``, one of ``LAYOUTS``, ``"native"`` for the first of them that has such heads, or ``"sglang"``
            for that one if SGLang can serve the head.
        served: The target, which speculators' layout has to name.

    Raises:
        ValueError: There is no such layout, or it cannot say what this head is.
    """
    check_layout(layout, ("own", *LAYOUTS, "native", "sglang"))
    if layout == "own":
        head.save_pretrained(folder)
        return
    config = head.config
    if layout == "sglang":
        _check_sglang(config)
    parts = frozenset(part for part in PARTS if getattr(config, part))
    if layout not in LAYOUTS:
        layout = next((name for name, known in LAYOUTS.items() if parts in known.kinds), "z-lab")
    if parts not in LAYOUTS[layout].kinds:
        what = " and ".join(PARTS[part][0] for part in PARTS if part in parts) or "every place for its own token"
        raise ValueError(f"layout={layout!r} has no head with {what} alone: this project's own layout has all")
    tensors = dict(head.state_dict())
    ids = draft_id_tensors(tensors.pop("draft_ids", None), config.vocab_size)
    write(folder, named(tensors, NAMES) | ids, _public(head, layout, parts, served or ServedFor(target="")))


def _public(head: BlockHead, layout: str, parts: frozenset[str], served: ServedFor) -> Written:
    """The ``config.json`` of a head whose parts a layout has."""
    config, known = head.config, LAYOUTS[layout]
    architecture, kind = known.kinds[parts]
    fields = ["block_size", "mask_token_id", *(field for part in PARTS if part in parts for field in PARTS[part][1])]
    fields += [field for field, usual in FACTORS.items() if getattr(config, field) != usual]
    block: Written = {str(PUBLIC.get(field, field)): getattr(config, field) for field in fields}
    block[known.ids] = [layer - known.outputs for layer in head.hidden_layers]
    rope: Any = config.rope_parameters  # its base stands twice, as old and new versions of transformers look for it
    layers: Written = {name: getattr(config, name) for name in _LAYERS.split()} | {"rope_theta": rope["rope_theta"]}
    layers |= {"model_type": config.layer_kind, "dtype": dtype_name(head.dtype), "tie_word_embeddings": False}
    if layout == "speculators":
        sight = _sight_in_speculators(config, layers)
        return {
            **served.speculators(kind, architecture, config.tokens),
            "dtype": layers["dtype"],
            known.layers: layers,
            "draft_vocab_size": config.columns,
            "target_hidden_size": config.target_hidden_size,
            "sample_from_anchor": config.shifted,
            **sight,
            **block,
        }
    if known.block:
        more = {} if kind not in ("dspark", "domino") else {"projector_type": kind}
        more |= {"shift_label": config.shifted} if kind == "domino" else {}
        block = {"block_size": config.block_size, known.block: block | more}
        block |= {} if config.target_layers is None else {"num_target_layers": config.target_layers}
    return {"architectures": [architecture], **layers, **_is_causal(config), **block}


def _is_causal(config: BlockConfig) -> Written:
    """Causality in z-lab's and DeepSpec's layouts; without it, only sliding layers are causal."""
    if config.slides and config.window_from_root:
        raise ValueError("the layout counts windows from each place, and this head from the root: give speculators")
    if config.causal_in_windows in (None, config.causal):
        return {"is_causal": config.causal}
    if config.causal:
        raise ValueError("no layout but our own has causal full layers beside sliding ones that are not")
    return {}


def _sight_in_speculators(config: BlockConfig, layers: Written) -> Written:
    if config.causal and "full_attention" in (config.layer_types or ()):
        raise ValueError("speculators' layout has no full layers that see a block one way: z-lab's layout has")
    if config.slides:
        if not config.window_from_root:
            raise ValueError("speculators' layout counts windows from the root, and this head from each place")
        layers["sliding_window"] -= 1  # the root is not counted
    causal = config.causal if config.causal_in_windows is None else config.causal_in_windows
    return {"sliding_window_non_causal": not causal}


def _check_sglang(config: BlockConfig) -> None:
    """SGLang serves a head with the target's embeddings and output layer, and would leave the rest out silently."""
    for wrong, words in (
        (config.owns_output, "output layer of their own, nor a reduced vocabulary"),
        (config.owns_embeddings, "embeddings of their own"),
        (config.layer_kind != "qwen3", "layers without norms of queries and keys, such as Llama's"),
        (config.mlp_bias, "biases in the MLPs"),
        (config.target_hidden_size not in (None, config.hidden_size), "width that is not the target's"),
        (config.causal, "places that see a block one way"),
        (config.input_embedding_scale != 1 or config.output_multiplier != 1, "factors of embeddings or logits"),
        (config.final_logit_softcapping is not None, "capped logits"),
        (config.shifted and not config.markov_rank, "shifted places without a Markov head"),
        (any(getattr(config, part) for part in list(PARTS)[2:]), "parts of DFlash 2, Domino or xPress"),
    ):
        if wrong:
            kind = "DSPARK" if config.shifted else "DFLASH"
            raise ValueError(f"SGLang's {kind} heads have no {words}, and this one has: give native or speculators")


# ---------------------------------------------------------------- reading

_PREFIX = re.compile(r"(?:model|logit_head|domino_head)\.")
_FLAT = re.compile(r"(?=(?:markov_w[12]|gate_proj|joint_proj)\.)")
"""Where the names of modelopt's Markov heads lack what stands before those of all others."""
_IGNORED = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq|verifier_(?:lm_head|norm)\.weight")
_COPIED = ("hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "sliding_window", "layer_types")
_COLUMNS = ("lm_head.weight", "markov_head.markov_w2.weight", "embed_proj.2.weight", "refiner_head.readout.weight")
_CODES, _KERNEL = "candidate_selector.predecessor_codebook", "layers.0.attention_conv.base_kernel"
SIZES = (
    ("markov_rank", "markov_head.markov_w1.weight", 1),
    ("gru_hidden_dim", "prefix_gru.weight_hh_l0", 1),
    ("emb_dim", "embed_proj.0.weight", 0),
    ("xpress_rank", "refiner_head.down_h.weight", 0),
    ("selector_rank", _CODES, 1),
    ("conv_kernel_size", _KERNEL, 1),
)
"""Fields that tensors tell: the tensor, and the axis that has this length."""
VOCABULARY = ("embed_tokens.weight", "refiner_head.token_embed.weight", _CODES)
"""Tensors with a row per token, whatever ``config.json`` says."""


def load_block(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    hidden_layers: tuple[int, ...] | None = None,
    mask_token_id: int | None = None,
    **where: Any,
) -> BlockHead:
    """Load a block drafter's head in any of the known layouts.

    Args:
        hidden_layers: The target's hidden states that it reads, numbered as in ``Drafter.hidden_layers``, in place of
            those that its files name.
        mask_token_id: In place of the one that its files name.

    Raises:
        ValueError: There is no such checkpoint, it is of another kind, it is incomplete, or its numbers contradict each
            other.
    """

    def build(checkpoint: Checkpoint) -> BlockHead:
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
        ids = take_draft_ids(name, tensors, _COLUMNS)
        settings |= _sizes(name, layers, tensors, reduced=ids is not None)
        _check(name, settings, tensors)
        tensors |= {} if ids is None else {"d2t": ids}
        with torch.device("meta"):
            head = BlockHead(made(name, BlockConfig, **settings))
        return fill(name, head, tensors, [*NAMES, ("draft_ids", "d2t")])

    return loaded(path, build, dtype=dtype, device=device, **where)


def _described(
    name: str, stored: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Returns what a ``config.json`` says of the layers, and what of the block, as fields of ``BlockConfig``."""
    kind = stored.get("speculators_model_type")
    inner = section(name, stored, "dflash_config")
    if stored.get("model_type") == BlockConfig.model_type:
        own = BlockConfig.__annotations__
        return stored, {key: value for key, value in stored.items() if key in own and value is not None}
    if kind is not None:
        if kind not in KINDS:
            raise ValueError(
                f"{name} is a speculators folder of the type {kind!r}: BlockDrafter takes {', '.join(KINDS)}"
            )
        layout, layers = LAYOUTS["speculators"], dict(section(name, stored, "transformer_layer_config"))
        if layers.get("sliding_window") is not None:  # positions before the root, whatever the place
            layers["sliding_window"] = whole(f"{name}: its sliding_window", layers["sliding_window"], least=1) + 1
        sliding = not stored.get("sliding_window_non_causal", kind == "dflash2")
        shifted = stored.get("sample_from_anchor", kind == "dspark" or stored.get("projector_type") == "domino")
        shifted = shifted if stored.get("shift_label") is None else stored["shift_label"]
        ids = layout.ids if stored.get(layout.ids) is not None else f"eagle_{layout.ids}"
        return layers, {
            **_block(name, stored),
            "shifted": bool(shifted),
            "hidden_layers": _ids(name, stored, ids, outputs=False),
            **_sight(layers, full=False, sliding=sliding, from_root=True),
        }
    if "target_layer_ids" in stored and not inner:  # DeepSpec's, whatever its name: "DFlash", too, is shifted there
        given, projector = stored, "dspark"
    elif inner or (stored.get("architectures") or [""])[0].startswith("DFlash"):
        given, projector = {**stored, **inner}, inner.get("projector_type") or "dflash"
        if projector not in PROJECTORS:
            raise ValueError(f"{name} has the projector_type {projector!r}: BlockDrafter takes {', '.join(PROJECTORS)}")
    else:
        raise ValueError(
            f"{name} is no block drafter: its config.json has neither dflash_config (z-lab, SpecForge), nor "
            f"target_layer_ids (DeepSpec), nor speculators_model_type (speculators), nor the model_type "
            f"{BlockConfig.model_type!r}"
        )
    layers, total = _ids(name, given, "target_layer_ids", outputs=True), count_of(name, stored, "num_target_layers")
    if layers is None and total is not None:
        layers = [layer + 1 for layer in default_layers(total, count_layers(tensors))]
    causal = given.get("causal", given.get("is_causal"))  # without it, only sliding layers are causal
    if given.get("use_swa"):  # modelopt's and vLLM's: all layers have a window, and are no more causal for it
        window = stored.get("sliding_window") or given.get("swa_window_size")
        kinds, causal = ["sliding_attention"] * count_layers(tensors), bool(causal)
        stored = {**stored, "layer_types": kinds, "sliding_window": window}
    return stored, {
        **_block(name, given),
        "shifted": projector == "dspark" or bool(given.get("shift_label")),
        "hidden_layers": layers,
        "target_layers": total,
        **_sight(stored, full=bool(causal), sliding=causal is None or bool(causal)),
    }


def is_shifted(stored: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is of a head with shifted places."""
    return bool(_described("it", stored, {})[1].get("shifted"))


def _block(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a block that no tensor tells."""
    if given.get("block_size") is None:
        raise ValueError(f"{name}: its config.json has no block_size: add it, as the head was trained")
    fields = ("block_size", "mask_token_id", "target_hidden_size", *UNTOLD, *FACTORS)
    return {key: given[key] for key in fields if given.get(key) is not None}


def _sight(layers: Mapping[str, Any], *, full: bool, sliding: bool, from_root: bool = False) -> dict[str, Any]:
    """The directions in which places see each other, as fields of ``BlockConfig``, for each type of layers there is."""
    types = set(layers.get("layer_types") or ())
    if "sliding_attention" not in types:
        return {"causal": full}
    causal = full if len(types) > 1 else sliding
    windows = {} if sliding is causal else {"causal_in_windows": sliding}
    return {"causal": causal, **windows, **({"window_from_root": True} if from_root else {})}


def _ids(name: str, stored: Mapping[str, Any], key: str, *, outputs: bool) -> list[int] | None:
    """The hidden states that a ``config.json`` has under a key; None if it has none."""
    if stored.get(key) is None:
        return None
    ids = wholes(f"{name}: its config.json has {key}", stored[key], "correct it to a list of whole numbers")
    return [layer + outputs for layer in ids]


def _sizes(name: str, layers: Mapping[str, Any], tensors: Mapping[str, Tensor], *, reduced: bool) -> dict[str, Any]:
    """The fields of ``BlockConfig`` that the tensors tell, or else what ``config.json`` says of the layers."""
    first, width = "layers.0.", needed(name, tensors, "fc.weight").shape[0]
    sizes = sizes_of(name, layers, tensors, first, width)

    def rows(*keys: str) -> dict[str, int]:
        counts = [len(tensors[key]) for key in keys if key in tensors]
        return {"vocab_size": counts[-1]} if counts else {}

    found: dict[str, Any] = rows(*(() if reduced else ("lm_head.weight",)), "markov_head.markov_w1.weight")
    found |= {key: layers[key] for key in _COPIED if layers.get(key) is not None} | rows(*VOCABULARY)
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
    if "vocab_size" not in found:
        raise ValueError(f"{name}: its config.json has no vocab_size: add that of its target")
    columns = next((len(tensors[key]) for key in _COLUMNS if key in tensors), found["vocab_size"])
    judge = tensors.get("confidence_head.proj.weight")
    return found | {
        "layer_kind": "qwen3" if norms_queries(tensors, first) else "llama",
        **sizes,
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
    least = 1 if settings.get("shifted") else 2
    whole(f"{name}: its config.json has block_size", settings.get("block_size", 2), least=least)
    if settings.get("mask_token_id") is None:
        raise ValueError(f"{name}: its config.json has no mask_token_id: give mask_token_id=…, as in training")
    mask, vocabulary = whole(f"{name}: mask_token_id", settings["mask_token_id"]), settings["vocab_size"]
    if not 0 <= mask < vocabulary:
        raise ValueError(
            f"{name}: its mask token {mask} is outside of the vocabulary of {vocabulary} tokens: give mask_token_id=…, "
            f"as in training"
        )
    ids = settings.get("hidden_layers")
    if not ids or min(wholes(f"{name}: hidden_layers", ids, "give hidden_layers=[…]")) < 0:
        raise ValueError(
            f"{name}: its config.json does not say which hidden states of the target it reads (it says {ids}): give "
            f"hidden_layers=…"
        )
    joined, width = tensors["fc.weight"].shape[1], count_of(name, settings, "target_hidden_size")
    width = width or settings["hidden_size"]
    if joined != len(ids) * width:
        raise ValueError(
            f"{name}: fc.weight reads {joined} channels, and {len(ids)} hidden states of width {width} have "
            f"{len(ids) * width}: correct the layer ids in its config.json, or give hidden_layers=…"
        )
