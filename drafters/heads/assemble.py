"""From the tensors of a checkpoint to a head: sizes are read off the tensors, and what is missing is named."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.arguments import number, shown, whole
from specdec.target.loading import listed

_Head = TypeVar("_Head", bound=PreTrainedModel)
_Config = TypeVar("_Config", bound=PreTrainedConfig)
_PLAIN_THETA = 10000.0  # what a configuration without a rope_theta means, whatever the target's is


def config_of(name: str, stored: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str) -> PreTrainedConfig:
    """Returns the configuration of the decoder layers of a checkpoint.

    Args:
        name: The checkpoint's, for messages.
        stored: The part of its ``config.json`` that describes the layers.
        tensors: Its tensors; where they disagree with ``stored``, they are right.
        layer: What the names of the first layer's tensors begin with.

    Raises:
        ValueError: A tensor that is needed is missing, or widths do not fit each other, or a setting is of the wrong
            type.
    """
    width = needed(name, tensors, f"{layer}self_attn.o_proj.weight").shape[0]
    reads = needed(name, tensors, f"{layer}mlp.gate_proj.weight").shape[1]
    if width != reads:  # transformers would speak of its own checks
        raise ValueError(
            f"{name}: the tensor {layer}self_attn.o_proj.weight is for hidden states of width {width}, and "
            f"{layer}mlp.gate_proj.weight reads {reads} channels: they belong to different checkpoints"
        )
    kind = Qwen3Config if norms_queries(tensors, layer) else LlamaConfig
    config = made(
        name,
        kind,
        vocab_size=count_of(name, stored, "vocab_size") or 1,
        hidden_size=width,
        intermediate_size=needed(name, tensors, f"{layer}mlp.gate_proj.weight").shape[0],
        **heads_of(name, stored, tensors, layer, width),
        hidden_act=stored.get("hidden_act") or "silu",
        max_position_embeddings=stored.get("max_position_embeddings") or 2048,
        rms_norm_eps=stored.get("rms_norm_eps") or 1e-6,
        rope_parameters=rope_of(name, stored),
        attention_bias=f"{layer}self_attn.q_proj.bias" in tensors,
        num_hidden_layers=1,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.output_bias = f"{layer}self_attn.o_proj.bias" in tensors
    config.mlp_bias = f"{layer}mlp.gate_proj.bias" in tensors
    return config


def norms_queries(tensors: Mapping[str, Tensor], layer: str) -> bool:
    """Returns whether the attention of a layer norms queries and keys, as Qwen3's does and Llama's does not."""
    return f"{layer}self_attn.q_norm.weight" in tensors


def heads_of(
    name: str, stored: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str, width: int
) -> dict[str, Any]:
    """Returns the numbers of attention heads and their width, as fields of a configuration.

    Args:
        name: See ``config_of``.
        stored: See ``config_of``.
        tensors: See ``config_of``.
        layer: See ``config_of``.
        width: The width of hidden states.

    Raises:
        ValueError: A tensor that is needed is missing, or widths do not fit each other.
    """
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
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": keys // head_dim,
        "head_dim": head_dim,
    }


def count_of(name: str, stored: Mapping[str, Any], key: str) -> int | None:
    """Returns a positive number that a ``config.json`` states; None if it does not, or states 0.

    Raises:
        ValueError: It is something else.
    """
    return whole(f"{name}: its config.json has {key}", stored[key], least=1) if stored.get(key) else None


def section(name: str, stored: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns a group of settings within a ``config.json``; an empty one if there is none.

    Raises:
        ValueError: There are no settings by name.
    """
    found = stored.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{name}: its config.json has {key}={shown(found)}: it must hold settings by name")
    return found


def made(name: str, kind: type[_Config], **settings: Any) -> _Config:
    """Returns a configuration.

    Raises:
        ValueError: A setting is of the wrong type.
    """
    try:
        return kind(**settings)
    except StrictDataclassError as error:
        reason = " ".join(str(error).replace("TypeError: ", "").split())
        raise ValueError(f"{name}: its config.json cannot be used: {reason}") from error


def rope_of(name: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary embedding that a configuration describes, in the words of any version of transformers."""
    parameters = {**section(name, stored, "rope_scaling"), **section(name, stored, "rope_parameters")}
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
    """Returns a tensor.

    Raises:
        ValueError: It is missing.
    """
    if key not in tensors:
        raise ValueError(f"{name} is incomplete: the tensor {key} is missing")
    return tensors[key]


def fill(name: str, head: _Head, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> _Head:
    """Put a checkpoint's tensors into a head that was made on the ``meta`` device.

    Args:
        name: The checkpoint's, for messages.
        head: The head.
        tensors: The tensors, by the head's names.
        names: What the checkpoint calls them, where it has other names.

    Returns:
        The head, on the CPU.

    Raises:
        ValueError: Tensors are missing, or superfluous, or of another shape, or not finite; names them as the
            checkpoint does.
    """
    wanted = head.state_dict()
    missing = [names.get(key, key) for key in wanted if key not in tensors]
    if missing:
        raise ValueError(f"{name} is incomplete: {listed(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    unknown = [names.get(key, key) for key in tensors if key not in wanted]
    if unknown:
        raise ValueError(
            f"{name} holds {listed(unknown)}, which {type(head).__name__} does not have: "
            f"it is a checkpoint of another kind"
        )
    for key, tensor in tensors.items():
        if tensor.shape != wanted[key].shape:
            raise ValueError(
                f"{name}: the tensor {names.get(key, key)} has the shape {list(tensor.shape)} and the others call for "
                f"{list(wanted[key].shape)}"
            )
        check_finite(name, names.get(key, key), tensor)
    head.load_state_dict(dict(tensors), assign=True, strict=False)
    # Frequencies are no weights, and were not computed on the meta device.
    body: Any = head.base_model
    body.rotary_emb = type(body.rotary_emb)(head.config)
    return head.eval()


def finite(tensor: Tensor | None) -> bool:
    """Returns whether a tensor is there and has no NaN, which some trainings leave where they borrow, nor infinity."""
    if tensor is None:
        return False
    if not tensor.is_floating_point() or not tensor.numel() or tensor.dtype.itemsize == 1:  # no aminmax for fp8
        return True
    # One pass without a mask as large as the tensor; NaN makes both ends NaN.
    return all(bool(end.isfinite()) for end in torch.aminmax(tensor))


def check_finite(name: str, key: str, tensor: Tensor) -> None:
    """Refuse weights that would make all drafts worthless, and nothing else would tell.

    Args:
        name: The checkpoint's, for messages.
        key: What the checkpoint calls the tensor.
        tensor: The tensor.

    Raises:
        ValueError: It holds NaN or infinity.
    """
    if not finite(tensor):
        raise ValueError(
            f"{name}: the tensor {key} holds NaN or infinity: its training diverged or the file is damaged, give "
            f"another checkpoint"
        )
