"""In how many bytes a target's numbers are stored, and what it computes in."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from specdec.llama_shapes import shape_of
from specdec.physics.precision import BYTES, Precision, stored

GROUP = 64
"""Weights that share a factor in this project's ``int4``."""

_QUANTIZED = ("int8", "int4", "fp8")


@dataclass(frozen=True)
class Formats:
    """Bytes of a target's numbers, the type that matrix products compute in, and both in words."""

    precision: Precision
    computes: str
    words: str


def choose_formats(config: Mapping[str, Any], *, dtype: str, quantization: str | None, kv_cache: str | None) -> Formats:
    """Return the bytes of a target's numbers, by settings as in ``target.dtype`` and ``target.quantization``.

    Quantized weights are expanded before they are multiplied, so that products compute in the model's own type.
    """
    computes = _dtype_of(config) if dtype == "auto" else dtype
    if computes not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"target.dtype={dtype!r}: give float32, bfloat16, float16 or auto")
    if quantization is not None and quantization not in _QUANTIZED:
        raise ValueError(f"target.quantization={quantization!r}: give one of {', '.join(_QUANTIZED)}, or null")
    kv_words = "" if kv_cache is None else f", KV cache in {kv_cache}"
    if quantization is not None:
        scheme = quantization
        found = Precision.of(computes, weights=scheme, kv=kv_cache)
        if scheme == "int4":  # factors are kept in the model's own type
            size = found.weights + BYTES[computes] / GROUP
            found = replace(found, weights=size, output=size)
        # Experts that are stored as one tensor are left alone.
        found = replace(found, experts=BYTES[computes])
        return Formats(found, computes, f"weights in {scheme}, computing in {computes}{kv_words}")
    found = Precision.of(computes, kv=kv_cache)
    checkpoint = stored(config)
    if checkpoint is None:
        return Formats(found, computes, f"{computes}{kv_words}")
    weights = found.weights if checkpoint.weights is None else checkpoint.weights
    found = replace(found, weights=weights, experts=checkpoint.experts)
    return Formats(found, computes, f"weights as stored ({checkpoint.name}), computing in {computes}{kv_words}")


def inflated(config: Mapping[str, Any], inflate: str | Mapping[str, int] | None) -> dict[str, Any]:
    """Return the configuration of a target that is inflated; as it is if it is not."""
    if inflate is None:
        return dict(config)
    if config.get("model_type") != "llama":
        raise ValueError(
            f"target.inflate={inflate}: only Llama models can be inflated, and this is a "
            f"{config.get('model_type')} model"
        )
    return {**config, **asdict(shape_of(inflate))}


def _dtype_of(config: Mapping[str, Any]) -> str:
    inner = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else {}
    named = config.get("dtype") or config.get("torch_dtype") or (inner or {}).get("torch_dtype")
    return str(named).removeprefix("torch.") if named else "bfloat16"
