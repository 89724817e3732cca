"""From the tensors of a checkpoint to a head and back: sizes are read off the tensors, and what is missing is named.

A head's table of names has pairs, the beginning of our name of a tensor and that of the public one, of which the first
that fits counts. It is read forwards to write a checkpoint, and backwards to load one.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Int
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafters.heads.bound import move
from drafters.heads.files import OURS, TRAINING, Checkpoint, Where
from specdec.arguments import number, shown, whole
from specdec.drafting.vocabulary import Ids
from specdec.target.loading import listed, resolve_device, resolve_dtype

logger = logging.getLogger(__name__)
Names = Sequence[tuple[str, str]]
Written = dict[str, Any]
_Head = TypeVar("_Head", bound=nn.Module)
_Config = TypeVar("_Config", bound=PreTrainedConfig)
_PLAIN_THETA = 10000.0  # what a configuration without a rope_theta means, whatever the target's is
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_LAYER = re.compile(r"layers\.(\d+)\.")


def loader(read: Callable[..., _Head], weights: Sequence[str] = (), *, whole_file: bool = True) -> Callable[..., _Head]:
    """Returns ``load(path, *, dtype, device, **given)`` for a function that reads a head of a ``Checkpoint``.

    ``given`` is ``Where`` and what ``read`` takes; ``dtype`` None is the checkpoint's own, ``device`` None the CPU.
    Unless ``config.json`` is not of a head's ``whole_file``, keys that ``read`` did not ask for are named in a warning.
    """

    @wraps(read)
    def load(
        path: str | Path,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        **given: Any,
    ) -> _Head:
        where: Any = {key: given.pop(key) for key in Where.__annotations__ if key in given}
        resolved, place = None if dtype is None else resolve_dtype(dtype), resolve_device(device or "cpu")
        checkpoint = Checkpoint(path, weights=weights, **where)
        head: Any = read(checkpoint, **given)
        head.unread = checkpoint.config.unread if whole_file and checkpoint.json(OURS) is None else []
        if names := ", ".join(head.unread):
            logger.warning("%s: its config.json has %s, which nothing here reads", checkpoint.name, names)
        trained = checkpoint.json(TRAINING)
        if trained is not None and "scaled_output" not in trained:  # it has learned to scale its logits
            head.scales_itself = True
        own = None if weights else next(head.parameters()).dtype  # what it has of embeddings may be of another
        return move(head, place, resolved if isinstance(resolved, torch.dtype) else own)

    return load


_LAYERS = """model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
hidden_act max_position_embeddings rms_norm_eps attention_bias mlp_bias vocab_size layer_types sliding_window
use_sliding_window rope_parameters"""


def layers_said(config: Any) -> Written:
    """Returns the keys of a ``config.json`` about decoder layers."""
    said = {name: getattr(config, name) for name in _LAYERS.split() if hasattr(config, name)}
    return said | {"rope_theta": config.rope_parameters["rope_theta"], "tie_word_embeddings": False}


def public_name(key: str, names: Names) -> str:
    """The public name of one of our tensors."""
    ours, theirs = next((pair for pair in names if key.startswith(pair[0])), ("", ""))
    return theirs + key.removeprefix(ours)


def named(tensors: Mapping[str, Tensor], names: Names) -> dict[str, Tensor]:
    """Returns tensors by their public names."""
    return {public_name(key, names): tensor for key, tensor in tensors.items()}


def fill(name: str, head: _Head, tensors: Mapping[str, Tensor], names: Names = ()) -> _Head:
    """Returns a head from ``meta`` on the CPU with tensors of files; refuses wrong ones by their public names."""
    wanted = head.state_dict()
    ours = {public_name(key, names): key for key in wanted}
    missing = [key for key in ours if key not in tensors]
    if missing:
        raise ValueError(f"{name} is incomplete: {listed(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    unknown = [key for key in tensors if key not in ours]
    if unknown:
        raise ValueError(
            f"{name} holds {listed(unknown)}, which {type(head).__name__} does not have: it is a checkpoint of another "
            f"kind"
        )
    for key, tensor in tensors.items():
        if tensor.shape != wanted[ours[key]].shape:
            raise ValueError(
                f"{name}: the tensor {key} has the shape {list(tensor.shape)} and the others call for "
                f"{list(wanted[ours[key]].shape)}"
            )
        if not finite(tensor):  # all drafts would be worthless, and nothing else would tell
            raise ValueError(
                f"{name}: the tensor {key} holds NaN or infinity: its training diverged or the file is damaged, give "
                f"another checkpoint"
            )
    head.load_state_dict({ours[key]: tensor for key, tensor in tensors.items()}, assign=True)
    return head.eval()


def finite(tensor: Tensor | None) -> bool:
    """Whether a tensor is there and has neither NaN, which some trainings leave where they borrow, nor infinity."""
    if tensor is None:
        return False
    if not tensor.is_floating_point() or not tensor.numel() or tensor.dtype.itemsize == 1:  # no aminmax for fp8
        return True
    # One pass without a mask as large as the tensor; NaN makes both ends NaN.
    return all(bool(end.isfinite()) for end in torch.aminmax(tensor))


def take_draft_ids(name: str, tensors: dict[str, Tensor], outputs: Sequence[str] = ("lm_head.weight",)) -> Ids | None:
    """Takes the map of a reduced vocabulary out of the tensors: the target's id of every column, ascending.

    ``d2t`` holds differences: column i is token ``i + d2t[i]``. ``t2d`` marks the same tokens. The rows of ``outputs``,
    layers with a row per column, are put in order.
    """
    offsets, marks, ids = tensors.pop("d2t", None), tensors.pop("t2d", None), tensors.pop("draft_ids", None)
    if offsets is not None:
        ids = torch.arange(len(offsets)) + offsets.long()
        if len(ids.unique()) < len(ids) or int(ids.min()) < 0:
            raise ValueError(
                f"{name}: d2t does not lead to distinct tokens: it must hold differences, token - column, not tokens"
            )
    if marks is not None:
        marked = marks.bool().nonzero()[:, 0]
        if ids is not None and not torch.equal(ids.sort().values, marked):
            raise ValueError(
                f"{name}: d2t and t2d name different tokens: d2t must hold differences, token - column, or one of the "
                f"two belongs to another checkpoint"
            )
        ids = marked if ids is None else ids
    if ids is None:
        return None
    if outputs[0] not in tensors:
        raise ValueError(
            f"{name} is incomplete: it has a vocabulary of {len(ids)} tokens of its own (d2t) and no {outputs[0]}, "
            f"which cannot be tied to the target's"
        )
    rows = tensors[outputs[0]].shape[0]
    if rows != len(ids):
        raise ValueError(
            f"{name}: its output layer has {rows} columns, and d2t or t2d names {len(ids)} tokens: one of them "
            f"belongs to another checkpoint"
        )
    ids, order = ids.sort()
    tensors |= {key: tensors[key][order] for key in outputs if key in tensors and len(tensors[key]) == len(order)}
    return ids


def draft_id_tensors(ids: Int[Tensor, " column"] | None, vocab_size: int) -> dict[str, Tensor]:
    """Returns ``d2t`` and ``t2d`` of a reduced vocabulary."""
    if ids is None:
        return {}
    ids = ids.cpu()
    marks = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marks}


def count_layers(tensors: Iterable[str]) -> int:
    """Returns the number of decoder layers, whatever the configuration says."""
    return 1 + max((int(match[1]) for match in map(_LAYER.match, tensors) if match), default=0)


def config_of(name: str, stored: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str) -> PreTrainedConfig:
    """Returns decoder layers' configuration, by the tensors first; ``layer`` begins the names of the first one's."""
    width = needed(name, tensors, f"{layer}self_attn.o_proj.weight").shape[0]
    reads = needed(name, tensors, f"{layer}mlp.gate_proj.weight").shape[1]
    if width != reads:  # transformers would speak of its own checks
        raise ValueError(
            f"{name}: the tensor {layer}self_attn.o_proj.weight is for hidden states of width {width}, and "
            f"{layer}mlp.gate_proj.weight reads {reads} channels: they belong to different checkpoints"
        )
    config = made(
        name,
        Qwen3Config if norms_queries(tensors, layer) else LlamaConfig,
        vocab_size=count_of(name, stored, "vocab_size") or 1,
        hidden_act=stored.get("hidden_act") or "silu",
        max_position_embeddings=stored.get("max_position_embeddings") or 2048,
        rms_norm_eps=stored.get("rms_norm_eps") or 1e-6,
        **sizes_of(name, stored, tensors, layer, width),
    )
    if "sliding_attention" in (kinds := {*(stored.get("layer_types") or ())}):  # a window alone is often not meant
        if len(kinds) > 1 or (window := count_of(name, stored, "sliding_window")) is None:
            raise ValueError(f"{name}: its layers are {', '.join(sorted(kinds))}: give one kind, and sliding_window")
        config.layer_types, config.sliding_window = [*kinds] * config.num_hidden_layers, window
    config.output_bias = f"{layer}self_attn.o_proj.bias" in tensors
    config.mlp_bias = f"{layer}mlp.gate_proj.bias" in tensors
    return config


def norms_queries(tensors: Mapping[str, Tensor], layer: str) -> bool:
    """Returns whether the attention of a layer norms queries and keys, as Qwen3's does and Llama's does not."""
    return f"{layer}self_attn.q_norm.weight" in tensors


def sizes_of(name: str, stored: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str, width: int) -> Written:
    """Returns the fields of a configuration that tensors of decoder layers tell, and RoPE."""
    queries = needed(name, tensors, f"{layer}self_attn.q_proj.weight").shape[0]
    keys = needed(name, tensors, f"{layer}self_attn.k_proj.weight").shape[0]
    stated = count_of(name, stored, "num_attention_heads")
    head_dim = count_of(name, stored, "head_dim") or (width // stated if stated else None)
    if norms_queries(tensors, layer):
        head_dim = tensors[f"{layer}self_attn.q_norm.weight"].shape[0]
    if not head_dim:
        raise ValueError(f"{name}: its config.json says neither head_dim nor num_attention_heads: add one of them")
    if queries % head_dim or keys % head_dim:
        raise ValueError(
            f"{name}: its queries have {queries} channels and its keys {keys}, which are no whole numbers of heads of "
            f"{head_dim}: correct head_dim or num_attention_heads in its config.json"
        )
    return {
        "hidden_size": width,
        "intermediate_size": needed(name, tensors, f"{layer}mlp.gate_proj.weight").shape[0],
        "num_hidden_layers": count_layers(tensors),
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": keys // head_dim,
        "head_dim": head_dim,
        "attention_bias": f"{layer}self_attn.q_proj.bias" in tensors,
        "rope_parameters": rope_of(name, stored),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def count_of(name: str, stored: Mapping[str, Any], key: str) -> int | None:
    """Returns a positive number that a ``config.json`` states; None if it does not, or states 0. Refuses all else."""
    return whole(f"{name}: its config.json has {key}", stored[key], least=1) if stored.get(key) else None


def mask_of(name: str, stored: Mapping[str, Any]) -> int | None:
    """Returns the mask token that a ``config.json`` names, as vLLM looks for it; None if it names none."""
    key = next((key for key in MASK_KEYS if stored.get(key) is not None), None)
    return None if key is None else whole(f"{name}: its config.json has {key}", stored[key], least=0)


def section(name: str, stored: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns a group of settings within a ``config.json``; an empty one if there is none. Names are needed."""
    found = stored.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{name}: its config.json has {key}={shown(found)}: it must hold settings by name")
    return found


def made(name: str, kind: type[_Config], **settings: Any) -> _Config:
    """Returns a configuration; refuses settings of the wrong type."""
    try:
        return kind(**settings)
    except StrictDataclassError as error:
        reason = " ".join(str(error).replace("TypeError: ", "").split())
        raise ValueError(f"{name}: its config.json cannot be used: {reason}") from error


def rope_of(name: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary embedding that a configuration describes, in the words of any version of transformers."""
    parameters = {**section(name, stored, "rope_scaling"), **section(name, stored, "rope_parameters")}
    if parameters and all(isinstance(part, Mapping) for part in parameters.values()):  # by kind of layer
        used = {*(stored.get("layer_types") or ("full_attention",))} & parameters.keys()
        parts = [dict(parameters[kind]) for kind in (used or parameters)]
        if any(part != parts[0] for part in parts):
            raise ValueError(f"{name}: its kinds of layers have rotary embeddings of their own, not supported: {parts}")
        parameters = parts[0]
    kind = parameters.pop("type", None)
    parameters["rope_type"] = parameters.get("rope_type") or kind or "default"
    if parameters["rope_type"] not in ("default", *ROPE_INIT_FUNCTIONS):
        raise ValueError(
            f"{name}: its config.json has the rope_type {parameters['rope_type']!r}, which is unknown: give one "
            f"of default, {', '.join(ROPE_INIT_FUNCTIONS)}"
        )
    theta = parameters.get("rope_theta") or stored.get("rope_theta") or _PLAIN_THETA
    parameters["rope_theta"] = float(number(f"{name}: its config.json has rope_theta", theta))
    return parameters


def needed(name: str, tensors: Mapping[str, Tensor], key: str) -> Tensor:
    """Returns a tensor; refuses a checkpoint without it."""
    if key not in tensors:
        raise ValueError(f"{name} is incomplete: the tensor {key} is missing")
    return tensors[key]
