"""The folder layouts of EAGLE heads, read and written: EAGLE-1/2, EAGLE-3 and 3.1, P-EAGLE, in several dialects.

What a checkpoint is, is read off its tensors; its ``config.json`` is asked only for what they cannot tell.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from drafters.heads.assemble import (
    Names,
    Written,
    config_of,
    count_of,
    draft_id_tensors,
    fill,
    finite,
    loaded,
    named,
    needed,
    section,
    take_draft_ids,
)
from drafters.heads.eagle import Eagle3Head, EagleHead
from drafters.heads.files import OURS, Checkpoint, ServedFor, check_layout, write
from specdec.arguments import whole, wholes
from specdec.drafting.vocabulary import MOST_PADDING
from specdec.machine import dtype_name

LAYOUTS = ("native", "speculators", "sglang")
"""EAGLE's own; speculators' (vLLM); EAGLE's with what SGLang reads otherwise."""
TOKENS = 5
"""Drafted tokens per round that a server is told, if nothing else is said."""
EMBEDDINGS = ("auto", "own", "target")
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""The names of the mask token in a ``config.json``, as vLLM looks for it (``get_parallel_drafting_token_id``)."""
IDS = "eagle_aux_hidden_state_layer_ids"
PUBLIC = {
    "captured_width": "target_hidden_size",
    "norm_before_residual": "norm_before_residual",
    "norm_joined": "norm_before_fc",
    "norm_each": "fc_norm",
    "feeds_normed": "norm_output",
}
"""Attributes of an EAGLE-3 head, and their public names."""
FLAGS = ("norm_before_residual", "feeds_normed")
"""Those of them that no tensor tells."""
NORMS = {"norm_joined": "input_norm.weight", "norm_each": "fc_norm.0.weight"}
"""Tensors that tell the others."""
_LAYERS = """model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
hidden_act max_position_embeddings rms_norm_eps attention_bias vocab_size"""
_LAYER = re.compile(r"(?:midlayer|layers\.0)\.")
_IGNORED = re.compile(r".*rotary_emb\.inv_freq|(?:model\.)?verifier_(?:lm_head|norm)\.weight")


def names_of(first: str) -> Names:
    """The table of names; ``first`` is what the names of the first layer's tensors begin with."""
    return (
        ("model.fusion.norm.norms.", "fc_norm."),
        ("model.fusion.norm.", "input_norm."),
        ("model.fusion.linear.", "fc."),
        ("model.layers.0.", first),
        ("model.", ""),
    )


# ---------------------------------------------------------------- reading


def load_eagle(
    path: str | Path,
    *,
    hidden_layers: tuple[int, ...] | None = None,
    embeddings: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    **where: Any,
) -> EagleHead | Eagle3Head:
    """Load a head of EAGLE-1, 2, 3 or 3.1.

    Args:
        hidden_layers: The target's hidden states that the head fuses, in place of those that its files name; for
            EAGLE-3 only.
        embeddings: ``"own"`` takes the checkpoint's, ``"target"`` the target's; ``"auto"`` the checkpoint's if it has
            some and they are finite.

    Raises:
        ValueError: There is no such checkpoint, or it is none of an EAGLE head, or incomplete.
    """
    if embeddings not in EMBEDDINGS:
        raise ValueError(f"embeddings={embeddings!r}: give one of {', '.join(EMBEDDINGS)}")

    def build(checkpoint: Checkpoint) -> EagleHead | Eagle3Head:
        name, stored = checkpoint.name, checkpoint.tensors(lambda key: not _IGNORED.fullmatch(key))
        tensors = {key.removeprefix("model."): tensor for key, tensor in stored.items()}
        own = finite(tensors.get("embed_tokens.weight"))
        if embeddings == "own" and not own:
            raise ValueError(f"embeddings='own' and {name} has none that are finite: give 'target'")
        if embeddings == "target" or not own:
            tensors.pop("embed_tokens.weight", None)
        if _fuses(tensors):
            return _eagle3(checkpoint, tensors, hidden_layers)
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
        return _eagle1(checkpoint, tensors)

    return loaded(path, build, dtype=dtype, device=device, **where)


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
    embeddings = tensors.get("embed_tokens.weight")
    if embeddings is not None:
        config.vocab_size = len(embeddings)
    with torch.device("meta"):
        head = EagleHead(config, fusion_bias="fc.bias" in tensors, owns_embeddings=embeddings is not None)
    return fill(name, head, tensors, [("model.", "")])


def _eagle3(checkpoint: Checkpoint, tensors: dict[str, Tensor], hidden_layers: tuple[int, ...] | None) -> Eagle3Head:
    name, stored, ours = checkpoint.name, checkpoint.config, checkpoint.json(OURS) or {}
    first = "midlayer." if any(key.startswith("midlayer.") for key in tensors) else "layers.0."
    if any("kv_a_proj" in key for key in tensors):
        raise ValueError(f"{name} has layers with latent attention (MLA): give a head with q_proj, k_proj and v_proj")
    config = config_of(name, section(name, stored, "transformer_layer_config") or stored, tensors, first)
    embeddings, marks = tensors.get("embed_tokens.weight"), tensors.get("t2d")
    joined = needed(name, tensors, "fc.weight").shape[1]
    width = ours.get("captured_width") or count_of(name, stored, "target_hidden_size") or config.hidden_size
    chosen = hidden_layers or layers_of(stored, ours, name=name)
    captured = len(chosen or ()) or joined // width
    if joined != captured * width:
        raise ValueError(
            f"{name}: fc.weight reads {joined} channels, and hidden states of width {width} would be "
            f"{joined / width:.3g}, where {captured} are named: give hidden_layers with as many numbers, or correct "
            f"target_hidden_size in its config.json"
        )
    mask = mask_of(name, stored)
    if stored.get("speculators_model_type") == "peagle":
        needed(name, tensors, "mask_hidden")
    if mask is None and "mask_hidden" in tensors:
        raise ValueError(f"{name} is a P-EAGLE head and its config.json names no mask token: add mask_token_id to it")
    if mask is not None:  # vLLM takes zeros, too, where there are none
        tensors["mask_hidden"] = tensors.get("mask_hidden", tensors["fc.weight"].new_zeros(joined)).reshape(1, 1, -1)
    for norm, key in NORMS.items():
        if stored.get(PUBLIC[norm]) is True:
            needed(name, tensors, key)
    ids = take_draft_ids(name, tensors)
    rows = tensors.get("lm_head.weight") if ids is None else None
    told = [each for each in (embeddings, marks, rows) if each is not None]
    if told:
        config.vocab_size = len(told[0])
    if embeddings is not None and marks is not None and abs(len(marks) - len(embeddings)) > MOST_PADDING:
        raise ValueError(
            f"{name}: its t2d marks the tokens of a vocabulary of {len(marks)} and its embeddings have "
            f"{len(embeddings)}: one of them belongs to another checkpoint"
        )
    with torch.device("meta"):
        head = Eagle3Head(
            config,
            hidden_layers=chosen,
            captured=captured,
            captured_width=width,
            fusion_bias="fc.bias" in tensors,
            owns_embeddings=embeddings is not None,
            owns_output="lm_head.weight" in tensors,
            draft_ids=ids,
            mask_token_id=mask,
            tokens=_tokens(name, stored, ours),
            **{norm: key in tensors for norm, key in NORMS.items()},
            **{flag: _flag(stored, ours, PUBLIC[flag]) for flag in FLAGS},
        )
    return fill(name, head, tensors, names_of(first))


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
    ids = section(name, stored, "eagle_config").get(IDS) or stored.get(IDS)
    if not ids:
        return None
    ids = wholes(f"{said} {IDS}", ids, remedy)
    outputs = ids[0] == 1 and stored.get("speculators_model_type") is None
    return tuple(layer + outputs for layer in ids)


def _flag(stored: Mapping[str, Any], ours: Mapping[str, Any], key: str) -> bool:
    """Whether our notes say yes to a setting, or else ``config.json``, or else its EAGLE section."""
    inner = stored.get("eagle_config") or {}
    return bool(ours.get(key, stored.get(key, inner.get(key, False))))


# ---------------------------------------------------------------- writing


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
    config: Any = head.config
    rope, dtype = dict(config.rope_parameters), dtype_name(head.dtype)
    layers: Written = {name: getattr(config, name) for name in _LAYERS.split()} | {"tie_word_embeddings": False}
    layers |= {"rope_theta": rope["rope_theta"], "rope_parameters": rope}
    tensors, ours = dict(head.named_parameters()), {"family": "eagle", **(notes or {})}
    if not isinstance(head, Eagle3Head):
        if layout == "speculators":
            raise ValueError("speculators' layout has no EAGLE-1 heads: give native or sglang")
        public = {"architectures": ["LlamaForCausalLM"], **layers, "torch_dtype": dtype, "bias": head.fusion_bias}
        if layout == "sglang":
            _check_sglang(head, {"a fc without a bias": not head.fusion_bias})
            public["architectures"] = ["LlamaForCausalLMEagle"]
        write(folder, named(tensors, names_of("layers.0.")), public, ours=ours)
        return
    own: Written = {public: getattr(head, ours) for ours, public in PUBLIC.items()}
    own["draft_vocab_size"] = config.vocab_size if head.draft_ids is None else len(head.draft_ids)
    if head.mask_token_id is not None:  # the second name is the one that vLLM's proposer reads
        own |= dict.fromkeys(MASK_KEYS[:2], head.mask_token_id)
    ours |= {"family": "eagle3", "hidden_layers": head.hidden_layers, "captured_width": head.captured_width}
    ours |= {PUBLIC[flag]: getattr(head, flag) for flag in FLAGS}
    ours |= {} if head.mask_token_id is None else {"tokens": head.tokens}
    first = "midlayer." if len(head.model.layers) == 1 and layout != "speculators" else "layers.0."
    ids = None if head.hidden_layers is None else list(head.hidden_layers)
    if layout == "speculators":
        kind = ("eagle3", "Eagle3Speculator") if head.mask_token_id is None else ("peagle", "PEagleSpeculator")
        public = {IDS: _speculators_layers(head)} | (served or ServedFor(target="")).speculators(
            *kind, head.tokens or TOKENS
        )
        public |= {"dtype": dtype, "transformer_layer_config": layers | {"dtype": dtype}, **own}
    else:
        public = {**layers, "architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": dtype, **own}
        if layout == "sglang":  # it counts hidden states as outputs of layers
            ids = [layer - 1 for layer in _sglang_layers(head)]
            public |= {"bias": head.fusion_bias, "num_aux_hidden_states": head.captured}
        public["eagle_config"] = {"use_aux_hidden_state": True, IDS: ids}
    tensors |= draft_id_tensors(head.draft_ids, config.vocab_size)
    write(folder, named(tensors, names_of(first)), public, ours=ours)


def _speculators_layers(head: Eagle3Head) -> list[int]:
    """The hidden states of a head that speculators' layout can describe; refuses any other."""
    layers = _known_layers(head)
    if len(set(layers)) < len(layers):
        raise ValueError(f"the head fuses the hidden states {layers}, and speculators refuses duplicates")
    if head.fusion_bias:
        raise ValueError("speculators' layout has no bias where the hidden states are fused: give native")
    if not head.owns_output:
        raise ValueError("speculators' EAGLE-3 heads have an output layer, and this one borrows the target's")
    return layers


def _sglang_layers(head: Eagle3Head) -> list[int]:
    """The hidden states of a head that SGLang can serve; refuses any other."""
    layers, count = _known_layers(head), len(head.model.layers)
    wrong = {
        "a residual stream that begins with the normed feature (norm_before_residual)": head.norm_before_residual,
        "one norm over all fused states (norm_before_fc)": head.norm_joined,
        "an output layer that is borrowed from the target": not head.owns_output,
        "masks (P-EAGLE)": head.mask_token_id is not None,
        f"more than one layer, and this one has {count}": count > 1,
        f"hidden states before the first layer, and this head reads the embeddings (layers {layers})": min(layers) < 1,
    }
    _check_sglang(head, wrong)
    return layers


def _check_sglang(head: EagleHead | Eagle3Head, wrong: Mapping[str, bool]) -> None:
    wrong = {
        "layers that norm queries and keys, as Qwen3's do": isinstance(head.config, Qwen3Config),
        "embeddings but the target's, and this one has its own": head.owns_embeddings,
        **wrong,
    }
    for words, is_so in wrong.items():
        if is_so:
            kind = "EAGLE-3" if isinstance(head, Eagle3Head) else "EAGLE-1"
            raise ValueError(f"SGLang's {kind} heads do not have {words}: give native or speculators")


def _known_layers(head: Eagle3Head) -> list[int]:
    """The hidden states that a head fuses."""
    if head.hidden_layers is None:
        raise ValueError("the head's files do not say which hidden states of the target it fuses: give hidden_layers")
    if min(head.hidden_layers) < 0:
        raise ValueError(
            f"the head fuses the hidden states {list(head.hidden_layers)}, and serving engines do not hand out -1, the "
            f"last one after its norm: give native"
        )
    return list(head.hidden_layers)
