"""Finds out which models can decode over our cache, from their configuration and from a trial forward.

No list of models is needed. A configuration rules some models out at once, with the best reason. For all others,
``find`` (``facts.py``) compares a forward over the cache with the model's own (``differs``).
"""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from specdec.arguments import instance
from specdec.attention.facts import Reach
from specdec.cache.transformers_cache import cache_argument

# Layer types of transformers' configurations. Sparse layers that select single positions work: they follow the mask.
# Those that select blocks of positions do not: they count blocks along the cache, where a tree's nodes stand side by
# side.
MASKED = (
    "full_attention", "attention", "indexed_attention", "deepseek_sparse_attention", "sliding_attention",
    "chunked_attention",
)  # fmt: skip
STATELESS = ("mlp", "moe", "dummy")
RECURRENT = ("linear", "conv", "mamba", "recurrent", "rwkv", "ssm")
"""How the types of layers begin that keep a state and have no attention."""
BOTH = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""Layers with a state and with attention, and how far that sees."""

# Smaller differences from the model's own forward are rounding: TF32 in single precision; in half precision or
# quantized a few percent, and sometimes another expert. A wrong position or mask gives 30% and more.
TOLERANCE = 1e-2
HALF_TOLERANCE = 0.3


def check_model(name: str, model: Any, loader: str) -> None:
    """Refuse anything but a loaded model of transformers; ``loader`` loads one by its name or path."""
    if isinstance(model, str | Path):
        raise ValueError(f"{name} is the text {str(model)!r}: give a loaded model, or use {loader}({str(model)!r})")
    if not isinstance(model, torch.nn.Module) or not isinstance(getattr(model, "config", None), PreTrainedConfig):
        instance(name, model, (), "a loaded causal LM of transformers (that of a Target is its attribute .model)")


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse anything that is not a tokenizer as transformers loads them, or None."""
    wanted = "a tokenizer loaded with AutoTokenizer.from_pretrained"
    if isinstance(tokenizer, str | Path):
        raise ValueError(f"tokenizer is the text {str(tokenizer)!r}: give {wanted}({str(tokenizer)!r})")
    fits = callable(tokenizer) and hasattr(tokenizer, "decode") and not isinstance(tokenizer, type)
    if tokenizer is not None and not fits:
        instance("tokenizer", tokenizer, (), f"{wanted}, or None")


def check_supported(model: PreTrainedModel) -> None:
    """Refuse a model whose configuration shows that it cannot work, by its type and the reason."""
    kind = model.config.model_type
    text = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{kind}: encoder-decoder models are not supported; give a decoder-only causal LM")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{kind}: {type(model).__name__} has no output layer; load it with AutoModelForCausalLM")
    types = sorted(set(read(text, "layer_types", kind) or []) - {*MASKED, *STATELESS, *BOTH})
    types = [each for each in types if not each.startswith(RECURRENT)]
    if types:
        raise ValueError(
            f"{kind}: no tree mask for layers of type {', '.join(types)}; "
            f"full, sliding, chunked and indexed attention have one"
        )
    if getattr(text, "alibi", False) or getattr(getattr(text, "attn_config", None), "alibi", False):
        raise ValueError(_alibi(kind))


def check_length(config: Any, max_length: int) -> None:
    """Refuse a length beyond the model's positions, or one at which it would be masked or rotated wrongly."""
    kind = config.model_type
    limit = position_limit(config)
    if limit is not None and max_length > limit:
        raise ValueError(
            f"max_length={max_length} is beyond the {limit} positions of this {kind} model: lower max_length"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]:
        scaling = parameters.get("rope_type", "default")
        original = parameters.get("original_max_position_embeddings") or limit
        if scaling in ("longrope", "dynamic") and original is not None and max_length > original:
            raise ValueError(
                f"max_length={max_length} is beyond the {original} positions that this {kind} model was trained on, "
                f"where its {scaling} RoPE scales with the longest row of the batch: lower max_length to {original}"
            )
    # Llama 4 scales the queries of some layers by their positions, counted from the length of the cache, from
    # floor_scale on.
    floor = getattr(config, "floor_scale", None)
    if floor and getattr(config, "attn_temperature_tuning", False) and max_length >= floor:
        raise ValueError(
            f"max_length={max_length} is beyond the {floor - 1} positions up to which this {kind} model scales no "
            f"queries by the length of the cache, which a batch does not have: lower max_length to {floor - 1}"
        )
    # GPT-Neo masks its local layers itself, counting along the cache: right only where the window hides nothing.
    window = getattr(config, "window_size", None)
    if window and "local" in (getattr(config, "attention_layers", None) or []) and max_length > window:
        raise ValueError(
            f"max_length={max_length} is beyond the window of {window} positions that this {kind} model's local layers "
            f"apply along the cache, where a tree's nodes stand side by side: lower max_length to {window}"
        )


def position_limit(config: Any) -> int | None:
    """Return the number of positions that a model has; None if nothing limits it."""
    limit = getattr(config, "max_position_embeddings", None)
    return limit if limit is not None and limit > 0 else None


def read(config: Any, name: str, kind: str, default: Any = None) -> Any:
    """Return a field of a configuration; refuse one that differs from layer to layer."""
    try:
        return getattr(config, name, default)
    except RuntimeError as error:  # how transformers answers for a field that is set per layer
        raise ValueError(f"{kind}: {name} differs from layer to layer, which the masks do not follow") from error


def reaches(config: Any, asked: set[int | None]) -> dict[str, Reach | None]:
    """Return how far every layer type of a model sees, by the type's name; None for recurrent layers.

    ``asked`` holds the windows and chunk sizes of the masks that the model made for itself, which the configuration's
    must be; None stands for a mask without either. It is empty if the model makes its masks in another way.
    """
    kind = config.model_type
    window = read(config, "sliding_window", kind)
    chunk = read(config, "attention_chunk_size", kind)
    of_type = {"sliding_attention": Reach(window=window), "chunked_attention": Reach(chunk=chunk)}
    types = [t for t in dict.fromkeys(read(config, "layer_types", kind) or []) if t not in STATELESS]
    found: dict[str, Reach | None]
    if types:
        of_type |= {both: of_type[part] for both, part in BOTH.items() if part in of_type}
        found = {t: None if t.startswith(RECURRENT) else of_type.get(t, Reach()) for t in types}
        if any(t in of_type and reach == Reach() for t, reach in found.items()):
            raise ValueError(f"{kind}: has {', '.join(found)} layers, but no window in its configuration")
    elif window is not None and getattr(config, "use_sliding_window", True):
        found = {"sliding_attention": Reach(window=window)}
    elif chunk is not None:
        found = {"chunked_attention": Reach(chunk=chunk)}
    else:
        found = {"full_attention": Reach()}
    sizes = {reach.window or reach.chunk for reach in found.values() if reach is not None}
    if asked and not sizes <= asked:
        if len(sizes) > 1 or len(asked) > 1:
            raise ValueError(
                f"{kind}: its configuration speaks of windows {_listed(sizes)}, but its code makes masks with "
                f"{_listed(asked)}; not supported"
            )
        # All layers are alike, and the code counts: the window has another name, or it is not used.
        (size,) = asked
        return {t: reach and Reach(window=size) for t, reach in found.items()}
    return found


@contextmanager
def noted_masks(configs: list[PreTrainedConfig]) -> Iterator[set[int | None]]:
    """Note the window of every mask that a model makes for itself by transformers' functions.

    The functions are the process's, so one thread looks at a time, and only at its own calls.
    """
    asked: set[int | None] = set()
    here = threading.get_ident()
    names = {config._attn_implementation for config in configs} & set(ALL_MASK_ATTENTION_FUNCTIONS)

    def noting(function: Any) -> Any:
        def make_mask(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here:
                asked.add(kwargs.get("local_size"))
            return function(*args, **kwargs)

        return make_mask

    with _looking:
        functions = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in names}
        for name, function in functions.items():
            ALL_MASK_ATTENTION_FUNCTIONS[name] = noting(function)
        try:
            yield asked
        finally:
            for name in functions:
                del ALL_MASK_ATTENTION_FUNCTIONS[name]


_looking = threading.Lock()


def differs(
    logits: Float[Tensor, "batch node vocab"], own: Float[Tensor, "batch node vocab"], *, precise: bool
) -> float | None:
    """Return how far logits are from the model's own, relative to their spread; None if within rounding.

    In single precision the worst position counts. In half precision the median position does, because a token may be
    routed to another expert without a fault.
    """
    logits, own = logits.double(), own.double()
    usable = torch.isfinite(own)  # padded vocabularies may be at -inf, and broken weights are found while decoding
    error = torch.where(usable, logits - own, 0.0).norm(dim=-1)
    own = torch.where(usable, own, 0.0)
    mean = own.sum(-1, keepdim=True) / usable.sum(-1, keepdim=True).clamp(min=1)
    spread = torch.where(usable, own - mean, 0.0).norm(dim=-1)
    relative = error / spread.clamp(min=1e-3 * own.norm(dim=-1)).clamp(min=1e-6)
    worst = float(relative.max() if precise else relative.median())
    # Written so that NaN differs.
    return None if worst <= (TOLERANCE if precise else HALF_TOLERANCE) else worst


def explain(model: PreTrainedModel, finding: str) -> str:
    """Return why a model failed its trial, in one sentence that names its type."""
    kind = model.config.model_type
    parameters = inspect.signature(type(model).forward).parameters
    if "state" in parameters or (model._is_stateful and "ShapeProbe" in finding):
        return f"{kind}: its states are in one object that goes through the whole model, and cannot be had node by node"
    names = {name for part in {type(part) for part in model.modules()} for name in dir(part)}
    if any("alibi" in name for name in names):
        return _alibi(kind)
    if "create_position_ids_from_input_ids" in names:
        return f"{kind}: it numbers positions from its padding token's id on, not from 0; not supported"
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "is_decoder", None) is False:
        return f"{kind}: its attention is bidirectional unless its configuration has is_decoder=True ({finding})"
    if cache_argument(parameters) not in parameters:
        return f"{kind}: {type(model).__name__}.forward takes no cache (past_key_values); not supported"
    if "position_ids" not in parameters and not model._is_stateful:
        return (
            f"{kind}: {type(model).__name__}.forward takes no position_ids, so that a tree's tokens cannot be placed; "
            f"not supported"
        )
    if model.training:
        return f"{kind}: the model is in training mode, where dropout changes every forward: call model.eval()"
    return f"{kind}: not supported, because a trial forward over the KV cache failed: {finding}"


def _alibi(kind: str) -> str:
    return f"{kind}: ALiBi derives positions from the mask's columns, which a tree's nodes do not follow; not supported"


def _listed(sizes: set[int | None]) -> str:
    return ", ".join(str(size) for size in sorted(sizes, key=lambda size: size or 0))
