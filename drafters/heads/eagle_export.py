"""Writes EAGLE heads in the layouts that serving engines read."""

from pathlib import Path
from typing import Any

from transformers import Qwen3Config

from drafters.heads.eagle import EagleHead
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.eagle_files import save_eagle, write_eagle
from drafters.heads.eagle_layouts import public_config
from drafters.heads.served_for import VERSION, ServedFor, speculators_section

LAYOUTS = ("native", "speculators", "sglang")
"""EAGLE's own; speculators' (vLLM); EAGLE's with what SGLang reads otherwise."""

TOKENS = 5
"""Drafted tokens per round that a server is told, if nothing else is said."""


def export_eagle(head: EagleHead | Eagle3Head, folder: str | Path, *, layout: str, served: ServedFor) -> None:
    """Write ``config.json``, ``model.safetensors`` and ``specdec.json``.

    Args:
        head: The head.
        folder: Where to; it is made if it is not there.
        layout: One of ``LAYOUTS``.
        served: The target.

    Raises:
        ValueError: There is no such layout, or it cannot say what this head is.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: give one of {', '.join(LAYOUTS)}")
    if layout == "native":
        save_eagle(head, folder)
    elif layout == "speculators":
        write_eagle(head, folder, config=_speculators(head, served), first="layers.0.")
    elif isinstance(head, Eagle3Head):
        write_eagle(head, folder, config=_sglang3(head), first="midlayer.")
    else:
        write_eagle(head, folder, config=_sglang1(head), first="layers.0.")


def _speculators(head: EagleHead | Eagle3Head, served: ServedFor) -> dict[str, Any]:
    if not isinstance(head, Eagle3Head):
        raise ValueError("speculators' layout has no EAGLE-1 heads: give native or sglang")
    layers = _known_layers(head)
    if len(set(layers)) < len(layers):
        raise ValueError(f"the head fuses the hidden states {list(layers)}, and speculators refuses duplicates")
    if head.fusion_bias:
        raise ValueError("speculators' layout has no bias where the hidden states are fused: give native")
    if not head.owns_output:
        raise ValueError("speculators' EAGLE-3 heads have an output layer, and this one borrows the target's")
    public = public_config(head)
    inner = ("architectures", "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc",
             "fc_norm", "norm_output", "eagle_config", "bias", "torch_dtype")  # fmt: skip
    described = {key: value for key, value in public.items() if key not in inner}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "dtype": public["torch_dtype"],
        "transformer_layer_config": described | {"dtype": public["torch_dtype"]},
        "draft_vocab_size": public["draft_vocab_size"],
        "target_hidden_size": head.captured_width,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_joined,
        "fc_norm": head.norm_each,
        "norm_output": head.feeds_normed,
        "tie_word_embeddings": False,
        "speculators_config": speculators_section("eagle3", served, tokens=TOKENS),
    }


def _sglang3(head: Eagle3Head) -> dict[str, Any]:
    """Returns the configuration of an EAGLE-3 head for SGLang, which counts hidden states as outputs of layers."""
    layers = _known_layers(head)
    _check_sglang(head)
    if len(head.model.layers) > 1:
        raise ValueError(f"SGLang's EAGLE-3 heads have one layer, and this one has {len(head.model.layers)}")
    if min(layers) < 1:
        raise ValueError(f"SGLang reads outputs of layers, and this head reads the embeddings (layers {list(layers)})")
    for flag, words in (
        (head.norm_before_residual, "a residual stream that begins with the normed feature (norm_before_residual)"),
        (head.norm_joined, "one norm over all fused states (norm_before_fc)"),
        (not head.owns_output, "an output layer that is borrowed from the target"),
    ):
        if flag:
            raise ValueError(f"SGLang's EAGLE-3 heads do not have {words}: give native or speculators")
    outputs = [layer - 1 for layer in layers]
    inner = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs}
    more = {"bias": head.fusion_bias, "num_aux_hidden_states": head.captured, "eagle_config": inner}
    return public_config(head) | more


def _sglang1(head: EagleHead) -> dict[str, Any]:
    _check_sglang(head)
    if not head.fusion_bias:
        raise ValueError("SGLang's EAGLE-1 heads have a bias in fc, and this one has none: give native")
    return public_config(head) | {"architectures": ["LlamaForCausalLMEagle"]}


def _check_sglang(head: EagleHead | Eagle3Head) -> None:
    if isinstance(head.config, Qwen3Config):
        raise ValueError("SGLang's EAGLE heads have Llama's layers, and this one norms queries and keys, as Qwen3 does")
    if head.owns_embeddings:
        raise ValueError(
            "SGLang gives every EAGLE head the target's embeddings, and this one has its own: load it with "
            "embeddings=target if they are the target's"
        )


def _known_layers(head: Eagle3Head) -> tuple[int, ...]:
    """Returns the hidden states that a head fuses.

    Raises:
        ValueError: Its files do not say, or engines do not have them.
    """
    if head.hidden_layers is None:
        raise ValueError("the head's files do not say which hidden states of the target it fuses: give hidden_layers")
    if min(head.hidden_layers) < 0:
        raise ValueError(
            f"the head fuses the hidden states {list(head.hidden_layers)}, and serving engines do not hand out -1, the "
            f"last one after its norm: give native"
        )
    return head.hidden_layers
