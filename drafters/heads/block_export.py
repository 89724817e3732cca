"""Writes a block drafter's head in the layouts that serving engines read."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.heads.block import BlockHead
from drafters.heads.served_for import VERSION, ServedFor, speculators_section

LAYOUTS = ("own", "z-lab", "deepspec", "speculators", "sglang")
"""This project's own; z-lab's for heads in place and SpecForge's for shifted ones (SGLang, vLLM); DeepSpec's (SGLang,
vLLM); speculators' (vLLM); z-lab's or DeepSpec's, if SGLang can serve the head."""


def save_block(head: BlockHead, folder: str | Path, *, layout: str = "own", served: ServedFor | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors``.

    Args:
        head: The head.
        folder: Where to; it is made if it is not there.
        layout: One of ``LAYOUTS``.
        served: The target, which speculators' layout has to name.

    Raises:
        ValueError: There is no such layout, or it cannot say what this head is.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: give one of {', '.join(LAYOUTS)}")
    folder = Path(folder)
    if layout == "own":
        head.save_pretrained(folder)
        return
    described = {
        "z-lab": _z_lab,
        "deepspec": _deepspec,
        "speculators": lambda each: _speculators(each, served or ServedFor(target="")),
        "sglang": _sglang,
    }
    config = described[layout](head)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(head), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tensors(head: BlockHead) -> dict[str, Tensor]:
    """Returns the head's tensors, with a reduced vocabulary as d2t and t2d."""
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in head.state_dict().items()}
    ids = tensors.pop("draft_ids", None)
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        marks = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=ids.device)
        tensors["t2d"] = marks.scatter_(0, ids, True)
    return tensors


def _layers(head: BlockHead) -> dict[str, Any]:
    """Returns what all layouts say of the layers; the base of RoPE twice, as old and new versions look for it."""
    config = head.config
    names = (
        "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
        "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
        "rms_norm_eps", "rope_parameters", "sliding_window", "use_sliding_window", "vocab_size",
    )  # fmt: skip
    rope: Any = config.rope_parameters
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    return {
        "model_type": config.layer_kind,
        **{name: getattr(config, name) for name in names},
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def _outputs(head: BlockHead) -> list[int]:
    """Returns the layers whose outputs the head reads; -1 for the embeddings."""
    return [layer - 1 for layer in head.hidden_layers]


def _block(head: BlockHead) -> dict[str, Any]:
    """Returns what is called alike in all layouts."""
    config = head.config
    found: dict[str, Any] = {"block_size": config.block_size, "mask_token_id": config.mask_token_id}
    if config.input_embedding_scale != 1:
        found["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1:
        found["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping is not None:
        found["final_logit_softcapping"] = config.final_logit_softcapping
    return found


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
    if config.shifted:
        inner |= {"projector_type": "dspark", **_markov(head)}
    elif config.markov_rank:
        raise ValueError("z-lab's layout has no Markov head in place: this project's own layout has")
    more = {"block_size": config.block_size, "is_causal": config.causal, "dflash_config": inner}
    if config.target_layers is not None:
        more["num_target_layers"] = config.target_layers
    return {"architectures": ["DFlashDraftModel"], **_layers(head), **more}


def _deepspec(head: BlockHead) -> dict[str, Any]:
    config = head.config
    if not config.shifted:
        raise ValueError("DeepSpec's layout is for heads whose places predict the next one's token: give z-lab's")
    more = {"target_layer_ids": _outputs(head), "is_causal": config.causal}
    return {"architectures": ["Qwen3DSparkModel"], **_layers(head), **_block(head), **_markov(head), **more}


def _sglang(head: BlockHead) -> dict[str, Any]:
    """Returns the configuration of a head that SGLang serves with the target's embeddings and output layer.

    Raises:
        ValueError: SGLang would leave something of the head out, without a word.
    """
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
    if config.markov_rank and not config.shifted:
        raise ValueError("speculators' layout has no Markov head in place: this project's own layout has")
    kind = "dspark" if config.shifted else "dflash"
    return {
        "architectures": ["DSparkDraftModel" if config.shifted else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "dtype": _layers(head)["dtype"],
        "tie_word_embeddings": False,
        "transformer_layer_config": _layers(head),
        "aux_hidden_state_layer_ids": list(head.hidden_layers),
        "draft_vocab_size": config.columns,
        "target_hidden_size": config.target_hidden_size,
        "sample_from_anchor": config.shifted,
        "sliding_window_non_causal": not config.causal,
        **_block(head),
        **(_markov(head) if config.shifted else {}),
        "speculators_config": speculators_section(kind, served, tokens=config.tokens),
    }
