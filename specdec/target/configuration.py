"""Reads off a model's type and configuration whether it can work, how far its layers see, and up to which length."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.arguments import instance
from specdec.attention.facts import Reach

# Layer types of transformers' configurations. Sparse layers that select single positions work: they follow the mask.
# Those that select blocks of positions do not: they count blocks along the cache, where a tree's nodes stand side by
# side.
MASKED = {"full_attention", "attention", "indexed_attention", "deepseek_sparse_attention"}
MASKED |= {"sliding_attention", "chunked_attention"}
STATELESS = ("mlp", "moe", "dummy")
RECURRENT = ("linear", "conv", "mamba", "recurrent", "rwkv", "ssm")  # how types begin that have states, no attention
BOTH = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}  # layers with states and attention
ALIBI = "ALiBi derives positions from the mask's columns, which a tree's nodes do not follow; not supported"


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
    types = sorted(set(_read(text, "layer_types") or []) - {*MASKED, *STATELESS, *BOTH})
    types = ", ".join(name for name in types if not name.startswith(RECURRENT))
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{kind}: encoder-decoder models are not supported; give a decoder-only causal LM")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{kind}: {type(model).__name__} has no output layer; load it with AutoModelForCausalLM")
    if types:
        has = "full, sliding, chunked and indexed attention have one"
        raise ValueError(f"{kind}: no tree mask for layers of type {types}; {has}")
    if getattr(text, "alibi", False) or getattr(getattr(text, "attn_config", None), "alibi", False):
        raise ValueError(f"{kind}: {ALIBI}")


def check_length(config: Any, max_length: int) -> None:
    """Refuse a length beyond the model's positions, or one at which it would be masked or rotated wrongly."""
    for most, why in _lengths(config):
        if max_length > most:
            beyond = f"is beyond the {most} positions {why.replace('KIND', f'this {config.model_type} model')}"
            raise ValueError(f"max_length={max_length} {beyond}: lower max_length to {most}")


def _lengths(config: Any) -> Iterator[tuple[int, str]]:
    """Yield the lengths up to which a model works, each with the reason."""
    limit = position_limit(config)
    if limit is not None:
        yield limit, "of KIND"
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]:
        scaling, original = parameters.get("rope_type"), parameters.get("original_max_position_embeddings") or limit
        if scaling in ("longrope", "dynamic") and original is not None:
            yield original, f"that KIND was trained on, where its {scaling} RoPE scales with the batch's longest row"
    # Llama 4 scales the queries of some layers by their positions, counted from the length of the cache, from
    # floor_scale on.
    floor = getattr(config, "floor_scale", None)
    if floor and getattr(config, "attn_temperature_tuning", False):
        yield floor - 1, "up to which KIND scales no queries by the length of the cache, which a batch does not have"
    # GPT-Neo masks its local layers itself, counting along the cache: right only where the window hides nothing.
    window = getattr(config, "window_size", None)
    if window and "local" in (getattr(config, "attention_layers", None) or []):
        yield window, "of the window that KIND's local layers apply along the cache, where a tree's nodes lie in line"


def position_limit(config: Any) -> int | None:
    """Return the number of positions that a model has; None if nothing limits it."""
    limit = getattr(config, "max_position_embeddings", None)
    return limit if limit is not None and limit > 0 else None


def _read(config: Any, name: str) -> Any:
    """Return a field of a configuration; refuse one that differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError as error:  # how transformers answers for a field that is set per layer
        raise ValueError(f"{config.model_type}: {name} differs from layer to layer; not supported") from error


def reaches(config: Any, asked: set[int | None]) -> dict[str, Reach | None]:
    """Return how far every layer type of a model sees, by the type's name; None for recurrent layers.

    ``asked`` holds the windows and chunk sizes of the masks that the model made for itself, which the configuration's
    must be; None stands for a mask without either. It is empty if the model makes its masks in another way.
    """
    kind = config.model_type
    window, chunk = _read(config, "sliding_window"), _read(config, "attention_chunk_size")
    of_type = {"sliding_attention": Reach(window=window), "chunked_attention": Reach(chunk=chunk)}
    types = [t for t in dict.fromkeys(_read(config, "layer_types") or []) if t not in STATELESS]
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
    if not asked or sizes <= asked:
        return found
    if len(sizes) > 1 or len(asked) > 1:
        named, made = (sorted(each, key=lambda size: size or 0) for each in (sizes, asked))
        raise ValueError(f"{kind}: its configuration has windows {named}, but its code makes masks with {made}")
    # All layers are alike, and the code counts: the window has another name, or it is not used.
    (size,) = asked
    return {t: reach and Reach(window=size) for t, reach in found.items()}
