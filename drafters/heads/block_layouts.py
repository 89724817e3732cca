"""The folders of block drafters' heads, written in the layouts that others read; ``block_files`` reads them."""

from pathlib import Path
from typing import Any

from drafters.heads.assemble import draft_id_tensors, named
from drafters.heads.block import BlockHead
from drafters.heads.block_config import BlockConfig
from drafters.heads.block_domino import NAMES
from drafters.heads.files import ServedFor, check_layout, write
from specdec.machine import dtype_name

LAYOUTS = ("own", "z-lab", "deepspec", "speculators", "sglang")
"""This project's own; z-lab's for heads in place and SpecForge's for shifted ones (SGLang, vLLM); DeepSpec's (SGLang,
vLLM); speculators' (vLLM); z-lab's or DeepSpec's, if SGLang can serve the head."""


def save_block(head: BlockHead, folder: str | Path, *, layout: str = "own", served: ServedFor | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors``.

    Args:
        folder: Where to; it is made if it is not there.
        served: The target, which speculators' layout has to name.

    Raises:
        ValueError: There is no such layout, or it cannot say what this head is.
    """
    check_layout(layout, LAYOUTS)
    if layout == "own":
        head.save_pretrained(folder)
        return
    _check_parts(head.config, layout)
    described = {
        "z-lab": _z_lab,
        "deepspec": _deepspec,
        "speculators": lambda each: _speculators(each, served or ServedFor(target="")),
        "sglang": _sglang,
    }
    tensors = dict(head.state_dict())
    ids = draft_id_tensors(tensors.pop("draft_ids", None), head.config.vocab_size)
    write(folder, named(tensors, NAMES) | ids, described[layout](head))


def _check_parts(config: BlockConfig, layout: str) -> None:
    """Refuse a head with parts that a layout does not know."""
    parts = {
        "convolutions": (config.conv_kernel_size, "z-lab"),
        "a selector": (config.selector_rank, "z-lab"),
        "a recurrent network": (config.gru_hidden_dim, "z-lab"),
        "a refiner": (config.xpress_rank, "speculators"),
    }
    second = bool(config.conv_kernel_size) is bool(config.selector_rank) and not config.shifted
    for part, (size, known) in parts.items():
        if size and (layout != known or not (second or config.xpress_rank or config.gru_hidden_dim)):
            raise ValueError(
                f"layout={layout!r} has no head with {part} such as this one: DFlash 2's heads have convolutions and a "
                f"selector, they and Domino's are z-lab's, xPress's are speculators'; our own layout has all"
            )


def _layers(head: BlockHead) -> dict[str, Any]:
    """Return the settings of the layers in all layouts; the base of RoPE twice, as old and new versions look for it."""
    config = head.config
    names = (
        "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
        "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
        "rms_norm_eps", "rope_parameters", "sliding_window", "use_sliding_window", "vocab_size",
    )  # fmt: skip
    rope: Any = config.rope_parameters
    copied = {name: getattr(config, name) for name in names}
    more = {"rope_theta": rope["rope_theta"], "tie_word_embeddings": False, "dtype": dtype_name(head.dtype)}
    return {"model_type": config.layer_kind, **copied, **more}


def _outputs(head: BlockHead) -> list[int]:
    """Returns the layers whose outputs the head reads; -1 for the embeddings."""
    return [layer - 1 for layer in head.hidden_layers]


def _block(head: BlockHead) -> dict[str, Any]:
    """Return the settings that have one name in all layouts."""
    config = head.config
    plain = {"input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": None}
    changed = {name: getattr(config, name) for name, usual in plain.items() if getattr(config, name) != usual}
    return {"block_size": config.block_size, "mask_token_id": config.mask_token_id, **changed}


def _markov(head: BlockHead) -> dict[str, Any]:
    config = head.config
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }


def _z_lab(head: BlockHead) -> dict[str, Any]:
    config = head.config
    inner = {**_block(head), "target_layer_ids": _outputs(head)}
    architecture = "DFlashDraftModel"
    if config.conv_kernel_size and config.selector_rank and not config.shifted:
        architecture = "DFlash2DraftModel"
        inner |= {key: getattr(config, key) for key in _DFLASH2}
    elif config.gru_hidden_dim:
        architecture = "DominoDraftModel"
        inner |= {"projector_type": "domino", "shift_label": config.shifted}
        inner |= {key: getattr(config, key) for key in ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")}
    elif config.shifted:
        inner |= {"projector_type": "dspark", **_markov(head)}
    elif config.markov_rank:
        raise ValueError("z-lab's layout has no Markov head in place: this project's own layout has")
    more = {"block_size": config.block_size, **_is_causal(config), "dflash_config": inner}
    if config.target_layers is not None:
        more["num_target_layers"] = config.target_layers
    return {"architectures": [architecture], **_layers(head), **more}


_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def _is_causal(config: BlockConfig) -> dict[str, Any]:
    """Causality in z-lab's and DeepSpec's layouts; without it, only sliding layers are causal."""
    if config.slides and config.window_from_root:
        raise ValueError("the layout counts windows from each place, and this head from the root: give speculators")
    if config.causal_in_windows in (None, config.causal):
        return {"is_causal": config.causal}
    if config.causal:
        raise ValueError(
            "no layout but our own has full layers that see a block one way beside sliding ones that do not"
        )
    return {}


def _deepspec(head: BlockHead) -> dict[str, Any]:
    config = head.config
    if not config.shifted:
        raise ValueError("DeepSpec's layout is for heads whose places predict the next one's token: give z-lab's")
    more = {"target_layer_ids": _outputs(head), **_is_causal(config)}
    return {"architectures": ["Qwen3DSparkModel"], **_layers(head), **_block(head), **_markov(head), **more}


def _sglang(head: BlockHead) -> dict[str, Any]:
    """SGLang serves the head with the target's embeddings and output layer, and would leave the rest out silently."""
    config = head.config
    kind = "DSPARK" if config.shifted else "DFLASH"
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
        (config.markov_rank and not config.shifted, "Markov head in place"),
    ):
        if wrong:
            raise ValueError(f"SGLang's {kind} heads have no {words}, and this one has: give native or speculators")
    return _deepspec(head) if config.shifted else _z_lab(head)


def _speculators(head: BlockHead, served: ServedFor) -> dict[str, Any]:
    config = head.config
    if config.causal and "full_attention" in (config.layer_types or ()):
        raise ValueError("speculators' layout has no full layers that see a block one way: z-lab's layout has")
    if config.slides and not config.window_from_root:
        raise ValueError("speculators' layout counts windows from the root, and this head from each place: give z-lab")
    in_windows = config.causal if config.causal_in_windows is None else config.causal_in_windows
    if config.markov_rank and not config.shifted:
        raise ValueError("speculators' layout has no Markov head in place: this project's own layout has")
    kind, architecture = ("dspark", "DSparkDraftModel") if config.shifted else ("dflash", "DFlashDraftModel")
    further = _markov(head) if config.shifted else {}
    if config.xpress_rank:
        kind, architecture = "xpress", "XPressDraftModel"
        further = {key: getattr(config, key) for key in ("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes")}
    layers = _layers(head)
    if config.slides:
        layers["sliding_window"] -= 1  # the root is not counted
    return {
        **served.speculators(kind, architecture, config.tokens),
        "dtype": layers["dtype"],
        "transformer_layer_config": layers,
        "aux_hidden_state_layer_ids": list(head.hidden_layers),
        "draft_vocab_size": config.columns,
        "target_hidden_size": config.target_hidden_size,
        "sample_from_anchor": config.shifted,
        "sliding_window_non_causal": not in_windows,
        **_block(head),
        **further,
    }
