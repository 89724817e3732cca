"""The folder layouts of EAGLE heads, read and written: EAGLE-1/2, EAGLE-3 and 3.1, P-EAGLE, in several dialects.

What a checkpoint is, is read off its tensors; its ``config.json`` is asked only for what they cannot tell.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import Qwen3Config

from drafters.heads.assemble import (
    Names,
    config_of,
    count_of,
    draft_id_tensors,
    fill,
    finite,
    named,
    needed,
    section,
    take_draft_ids,
)
from drafters.heads.bound import move
from drafters.heads.eagle import Eagle3Head, EagleHead
from drafters.heads.files import OURS, Checkpoint, ServedFor, Where, check_layout, write
from specdec.arguments import whole, wholes
from specdec.drafting.vocabulary import MOST_PADDING
from specdec.target.loading import resolve_device, resolve_dtype

LAYOUTS = ("native", "speculators", "sglang")
"""EAGLE's own; speculators' (vLLM); EAGLE's with what SGLang reads otherwise."""

TOKENS = 5
"""Drafted tokens per round that a server is told, if nothing else is said."""

EMBEDDINGS = ("auto", "own", "target")
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""The names of the mask token in a ``config.json``, as vLLM looks for it (``get_parallel_drafting_token_id``)."""

_LAYER = re.compile(r"(?:midlayer|layers\.0)\.")
_IGNORED = re.compile(r".*rotary_emb\.inv_freq|(?:model\.)?verifier_(?:lm_head|norm)\.weight")


def _names(first: str) -> Names:
    """The table of names; ``first`` is what the names of the first layer's tensors begin with."""
    return (
        ("model.fusion.norm.norms.", "fc_norm."),
        ("model.fusion.norm.", "input_norm."),
        ("model.fusion.linear.", "fc."),
        ("model.layers.0.", first),
        ("model.", ""),
    )


def load_eagle(
    path: str | Path,
    *,
    hidden_layers: tuple[int, ...] | None = None,
    embeddings: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    **where: Unpack[Where],
) -> EagleHead | Eagle3Head:
    """Load a head of EAGLE-1, 2, 3 or 3.1.

    Args:
        path: A folder, a name on the hub, or ``bundled/…``.
        hidden_layers: The target's hidden states that the head fuses, in place of those that its files name; for
            EAGLE-3 only.
        embeddings: ``"own"`` takes the checkpoint's, ``"target"`` the target's; ``"auto"`` the checkpoint's if it has
            some and they are finite.
        dtype: What to load them in; None for the checkpoint's own.
        device: Where to put them; None for the CPU.

    Raises:
        ValueError: There is no such checkpoint, or it is none of an EAGLE head, or incomplete.
    """
    if embeddings not in EMBEDDINGS:
        raise ValueError(f"embeddings={embeddings!r}: give one of {', '.join(EMBEDDINGS)}")
    resolved, place = None if dtype is None else resolve_dtype(dtype), resolve_device(device or "cpu")
    checkpoint = Checkpoint(path, **where)
    name, tensors = checkpoint.name, {}
    for key, tensor in checkpoint.tensors(lambda key: not _IGNORED.fullmatch(key)).items():
        tensors[key.removeprefix("model.")] = tensor
    own = tensors.get("embed_tokens.weight")
    if embeddings == "own" and not finite(own):
        raise ValueError(f"embeddings='own' and {name} has none that are finite: give 'target'")
    if embeddings == "target" or not finite(own):
        tensors.pop("embed_tokens.weight", None)
    if _fuses(tensors):
        head = _eagle3(checkpoint, tensors, hidden_layers)
    elif "fc.weight" in tensors and any(_LAYER.match(key) for key in tensors):
        if hidden_layers is not None:
            raise ValueError(
                f"hidden_layers={list(hidden_layers)} and {name} is an EAGLE-1 head, which reads the last hidden "
                f"state: leave hidden_layers out"
            )
        head = _eagle1(checkpoint, tensors)
    else:
        raise ValueError(
            f"{name} is no EAGLE head: it has no tensors fc.weight and midlayer.* (or layers.0.*); its tensors are "
            f"{', '.join(sorted(tensors)[:3]) or 'none'} …"
        )
    return move(head, place, resolved if isinstance(resolved, torch.dtype) else head.dtype)


def _fuses(tensors: Mapping[str, Tensor]) -> bool:
    """Whether tensors are EAGLE-3's, whatever may be missing: its first layer reads two widths side by side."""
    if any(name.startswith("midlayer.") or name == "layers.0.hidden_norm.weight" for name in tensors):
        return True
    queries, output = (tensors.get(f"layers.0.self_attn.{part}_proj.weight") for part in "qo")
    return queries is not None and output is not None and queries.shape[1] == 2 * output.shape[0]


def _eagle1(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> EagleHead:
    name = checkpoint.name
    config = config_of(name, checkpoint.config, tensors, "layers.0.")
    for key in ("lm_head.weight", "d2t", "t2d"):  # the target's, where a copy was saved
        tensors.pop(key, None)
    joined, embeddings = needed(name, tensors, "fc.weight").shape, tensors.get("embed_tokens.weight")
    if joined[1] != 2 * joined[0]:
        raise ValueError(
            f"{name}: fc.weight joins {joined[1]} channels to {joined[0]}, and EAGLE-1's joins two hidden sizes to one"
        )
    if embeddings is not None:
        config.vocab_size = embeddings.shape[0]
    with torch.device("meta"):
        head = EagleHead(config, fusion_bias="fc.bias" in tensors, owns_embeddings=embeddings is not None)
    return fill(name, head, tensors, [("model.", "")])


def _eagle3(checkpoint: Checkpoint, tensors: dict[str, Tensor], hidden_layers: tuple[int, ...] | None) -> Eagle3Head:
    name, stored, ours = checkpoint.name, checkpoint.config, checkpoint.json(OURS) or {}
    layers = section(name, stored, "transformer_layer_config") or stored
    first = "midlayer." if any(key.startswith("midlayer.") for key in tensors) else "layers.0."
    if any("kv_a_proj" in key for key in tensors):
        raise ValueError(f"{name} has layers with latent attention (MLA): give a head with q_proj, k_proj and v_proj")
    config = config_of(name, layers, tensors, first)
    width = config.hidden_size
    embeddings, marks = tensors.get("embed_tokens.weight"), tensors.get("t2d")
    if embeddings is not None and embeddings.shape[1] != width:
        raise ValueError(f"{name}: its embeddings have width {embeddings.shape[1]} and its layers {width}")
    joined = needed(name, tensors, "fc.weight").shape[1]
    captured_width = ours.get("captured_width") or count_of(name, stored, "target_hidden_size") or width
    if joined % captured_width:
        raise ValueError(
            f"{name}: fc.weight reads {joined} channels, which are no whole number of hidden states of "
            f"{captured_width}: correct target_hidden_size in its config.json"
        )
    chosen = hidden_layers or layers_of(stored, ours, name=name)
    captured = joined // captured_width
    if chosen is not None and len(chosen) != captured:
        raise ValueError(
            f"{name} fuses {captured} hidden states of width {captured_width}, and {list(chosen)} are {len(chosen)}: "
            f"give hidden_layers with {captured} numbers"
        )
    mask = mask_of(name, stored)
    if stored.get("speculators_model_type") == "peagle":
        needed(name, tensors, "mask_hidden")
    if mask is None and "mask_hidden" in tensors:
        raise ValueError(f"{name} is a P-EAGLE head and its config.json names no mask token: add mask_token_id to it")
    if mask is not None:
        # vLLM takes zeros, too, where there are none.
        found = tensors.get("mask_hidden", tensors["fc.weight"].new_zeros(joined))
        tensors["mask_hidden"] = found.reshape(1, 1, -1)
    for flag, key in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if stored.get(flag) is True:
            needed(name, tensors, key)
    ids = take_draft_ids(name, tensors)
    if embeddings is not None:
        config.vocab_size = embeddings.shape[0]
        if marks is not None and abs(len(marks) - config.vocab_size) > MOST_PADDING:
            raise ValueError(
                f"{name}: its t2d marks the tokens of a vocabulary of {len(marks)} and its embeddings have "
                f"{config.vocab_size}: one of them belongs to another checkpoint"
            )
    elif marks is not None:
        config.vocab_size = len(marks)
    elif ids is None and "lm_head.weight" in tensors:
        config.vocab_size = tensors["lm_head.weight"].shape[0]
    with torch.device("meta"):
        head = Eagle3Head(
            config,
            hidden_layers=chosen,
            captured=captured,
            captured_width=captured_width,
            norm_before_residual=_flag(stored, ours, "norm_before_residual"),
            norm_joined="input_norm.weight" in tensors,
            norm_each="fc_norm.0.weight" in tensors,
            feeds_normed=_flag(stored, ours, "norm_output"),
            fusion_bias="fc.bias" in tensors,
            owns_embeddings=embeddings is not None,
            owns_output="lm_head.weight" in tensors,
            draft_ids=ids,
            mask_token_id=mask,
            tokens=_tokens(name, stored, ours),
        )
    return fill(name, head, tensors, _names(first))


def mask_of(name: str, stored: Mapping[str, Any]) -> int | None:
    """The mask token that a ``config.json`` names; None if it names none."""
    key = next((key for key in MASK_KEYS if stored.get(key) is not None), None)
    return None if key is None else whole(f"{name}: its config.json has {key}", stored[key], least=0)


def _tokens(name: str, stored: Mapping[str, Any], ours: Mapping[str, Any]) -> int | None:
    """How many tokens a draft is to have, as our notes say or speculators' first proposal; None if neither does."""
    proposals = section(name, stored, "speculators_config").get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    return ours.get("tokens") or (count_of(name, first, "speculative_tokens") if isinstance(first, Mapping) else None)


def layers_of(
    stored: Mapping[str, Any], ours: Mapping[str, Any], *, name: str = "the checkpoint"
) -> tuple[int, ...] | None:
    """The hidden states of the target that a checkpoint names, numbered as inputs of layers; None if none.

    The key's name decides what a number means. ``target_layer_ids`` are outputs of layers. With
    ``eagle_aux_hidden_state_layer_ids``, published checkpoints mean inputs (2, N/2, N-3) or outputs (1, N/2-1, N-4); a
    first number of 1 tells, but for speculators, whose numbers are always inputs.

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
    outputs = ids[0] == 1 and stored.get("speculators_model_type") is None
    return tuple(layer + outputs for layer in ids)


def _flag(stored: Mapping[str, Any], ours: Mapping[str, Any], key: str) -> bool:
    """Whether our notes say yes to a setting, or else ``config.json``, or else its EAGLE section."""
    inner = stored.get("eagle_config") or {}
    return bool(ours.get(key, stored.get(key, inner.get(key, False))))


def save_eagle(
    head: EagleHead | Eagle3Head,
    folder: str | Path,
    *,
    layout: str = "native",
    served: ServedFor | None = None,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` and ``specdec.json``.

    Args:
        folder: Where to; it is made if it is not there.
        layout: One of ``LAYOUTS``.
        served: The target, which speculators' layout has to name.
        notes: More to keep in ``specdec.json``, such as the target's name and the training data.

    Raises:
        ValueError: There is no such layout, or it cannot say what this head is.
    """
    check_layout(layout, LAYOUTS)
    three = isinstance(head, Eagle3Head)
    first = "midlayer." if three and len(head.model.layers) == 1 and layout != "speculators" else "layers.0."
    tensors, ours = dict(head.named_parameters()), {"family": "eagle3" if three else "eagle", **(notes or {})}
    if three:
        ours |= {
            "hidden_layers": head.hidden_layers,
            "captured_width": head.captured_width,
            "norm_before_residual": head.norm_before_residual,
            "norm_output": head.feeds_normed,
        }
        if head.mask_token_id is not None:
            ours |= {"tokens": head.tokens}
        tensors |= draft_id_tensors(head.draft_ids, head.config.vocab_size)
    config = _config(head)
    if layout == "speculators":
        config = _speculators(head, config, served or ServedFor(target=""))
    elif layout == "sglang":
        config |= _sglang(head)
    write(folder, named(tensors, _names(first)), config, ours=ours)


def _config(head: EagleHead | Eagle3Head) -> dict[str, Any]:
    """``config.json`` with the keys that EAGLE's, SGLang's and vLLM's loaders read."""
    config: Any = head.config
    copied = (
        *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
        *("attention_bias", "vocab_size"),
    )
    public = {
        "architectures": ["LlamaForCausalLM"],
        **{name: getattr(config, name) for name in copied},
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_parameters": dict(config.rope_parameters),
        "tie_word_embeddings": False,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    if not isinstance(head, Eagle3Head):
        return public | {"bias": head.fusion_bias}
    ids = None if head.hidden_layers is None else list(head.hidden_layers)
    return public | {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_own(head),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},
    }


def _own(head: Eagle3Head) -> dict[str, Any]:
    """The names that all layouts of EAGLE-3 share."""
    mask = head.mask_token_id
    return {
        "draft_vocab_size": head.config.vocab_size if head.draft_ids is None else len(head.draft_ids),
        "target_hidden_size": head.captured_width,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_joined,
        "fc_norm": head.norm_each,
        "norm_output": head.feeds_normed,
        # The second name is the one that vLLM's proposer reads.
        **({} if mask is None else {"mask_token_id": mask, "pard_token": mask}),
    }


def _speculators(head: EagleHead | Eagle3Head, public: dict[str, Any], served: ServedFor) -> dict[str, Any]:
    if not isinstance(head, Eagle3Head):
        raise ValueError("speculators' layout has no EAGLE-1 heads: give native or sglang")
    layers = _known_layers(head)
    if len(set(layers)) < len(layers):
        raise ValueError(f"the head fuses the hidden states {list(layers)}, and speculators refuses duplicates")
    if head.fusion_bias:
        raise ValueError("speculators' layout has no bias where the hidden states are fused: give native")
    if not head.owns_output:
        raise ValueError("speculators' EAGLE-3 heads have an output layer, and this one borrows the target's")
    own, dtype = _own(head), public.pop("torch_dtype")
    left_out = ("architectures", "eagle_config", *own)
    kind = ("eagle3", "Eagle3Speculator") if head.mask_token_id is None else ("peagle", "PEagleSpeculator")
    return {
        **served.speculators(*kind, head.tokens or TOKENS),
        "dtype": dtype,
        "transformer_layer_config": {k: v for k, v in public.items() if k not in left_out} | {"dtype": dtype},
        **own,
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }


def _sglang(head: EagleHead | Eagle3Head) -> dict[str, Any]:
    """The differences in SGLang's layout: it counts hidden states as outputs of layers."""
    if isinstance(head.config, Qwen3Config):
        raise ValueError("SGLang's EAGLE heads have Llama's layers, and this one norms queries and keys, as Qwen3 does")
    if head.owns_embeddings:
        raise ValueError(
            "SGLang gives every EAGLE head the target's embeddings, and this one has its own: load it with "
            "embeddings=target if they are the target's"
        )
    if not isinstance(head, Eagle3Head):
        if not head.fusion_bias:
            raise ValueError("SGLang's EAGLE-1 heads have a bias in fc, and this one has none: give native")
        return {"architectures": ["LlamaForCausalLMEagle"]}
    layers = _known_layers(head)
    if len(head.model.layers) > 1:
        raise ValueError(f"SGLang's EAGLE-3 heads have one layer, and this one has {len(head.model.layers)}")
    if min(layers) < 1:
        raise ValueError(f"SGLang reads outputs of layers, and this head reads the embeddings (layers {list(layers)})")
    for flag, words in (
        (head.norm_before_residual, "a residual stream that begins with the normed feature (norm_before_residual)"),
        (head.norm_joined, "one norm over all fused states (norm_before_fc)"),
        (not head.owns_output, "an output layer that is borrowed from the target"),
        (head.mask_token_id is not None, "masks (P-EAGLE)"),
    ):
        if flag:
            raise ValueError(f"SGLang's EAGLE-3 heads do not have {words}: give native or speculators")
    outputs = [layer - 1 for layer in layers]
    inner = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs}
    return {"bias": head.fusion_bias, "num_aux_hidden_states": head.captured, "eagle_config": inner}


def _known_layers(head: Eagle3Head) -> tuple[int, ...]:
    """The hidden states that a head fuses."""
    if head.hidden_layers is None:
        raise ValueError("the head's files do not say which hidden states of the target it fuses: give hidden_layers")
    if min(head.hidden_layers) < 0:
        raise ValueError(
            f"the head fuses the hidden states {list(head.hidden_layers)}, and serving engines do not hand out -1, the "
            f"last one after its norm: give native"
        )
    return head.hidden_layers
