"""How many bytes the numbers of a model take."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.physics.shape import Attention

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a number, without factors that belong to it."""
_CACHED = ("int8", "fp8", "fp8_e5m2")  # ``specdec.cache.formats``, whose import takes PyTorch


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per number: of weights (with factors and zero points), tables, the cache (with factors), activations."""

    weights: float = 2.0
    experts: float | None = None
    output: float = 2.0
    tables: float = 2.0
    kv: float = 2.0
    kv_vector: float = 0.0
    activations: float = 2.0
    logits: float = 4.0

    @property
    def of_experts(self) -> float:
        return self.weights if self.experts is None else self.experts

    def kept(self, part: Attention) -> float:
        return part.kept * self.kv + part.vectors * self.kv_vector

    @classmethod
    def of(cls, dtype: str = "bfloat16", *, weights: str | None = None, kv: str | None = None) -> "Precision":
        """Return the bytes of formats by name; what is None has that of ``dtype``. Factors of weights are not counted.

        Every format ``kv`` of a quantized cache takes a byte per number, and a factor of 32 bits with every vector.
        """
        if kv is not None and kv not in _CACHED:
            raise ValueError(f"kv_cache={kv!r}: give {', '.join(_CACHED)}, or null for the model's own dtype")
        return cls(
            weights=bytes_of(weights or dtype),
            output=bytes_of(weights or dtype),
            tables=bytes_of(dtype),
            kv=bytes_of(dtype) if kv is None else 1.0,
            kv_vector=0.0 if kv is None else 4.0,
            activations=bytes_of(dtype),
        )


def bytes_of(name: str) -> float:
    """Return the bytes of a number in a format. Raises ValueError: there is no such format."""
    if name not in BYTES:
        raise ValueError(f"there is no number format {name!r}: give one of {', '.join(BYTES)}")
    return BYTES[name]


@dataclass(frozen=True)
class Stored:
    """The method that has quantized a checkpoint, and the bytes of a weight in a layer's and in an expert's matrix.

    Factors are included; None stands for the model's own type.
    """

    name: str
    weights: float | None
    experts: float | None = None


def stored(config: Mapping[str, Any]) -> Stored | None:
    """Return how a checkpoint is quantized, by its ``config.json``; None if it is not.

    Raises ValueError: it is quantized in a way whose bytes are not known here.
    """
    given = config.get("quantization_config")
    if not isinstance(given, Mapping):
        return None
    method = str(given.get("quant_method") or "")
    if method == "mxfp4":  # a factor of 8 bits for 32 weights, in experts only
        return Stored(method, None, (4 + 8 / 32) / 8)
    if method in ("gptq", "awq"):
        bits = given.get("bits", given.get("w_bit", 4))
        group = given.get("group_size", given.get("q_group_size", 128))
        return Stored(method, bits / 8 + ((2 + bits / 8) / group if isinstance(group, int) and group > 0 else 0.0))
    if method == "bitsandbytes":
        return Stored(method, 0.5 + 4 / 64 if given.get("load_in_4bit") else 1.0)
    if method in ("fp8", "fbgemm_fp8"):
        return Stored(method, 1.0)
    groups = given.get("config_groups")
    first = next(iter(groups.values()), {}) if method == "compressed-tensors" and isinstance(groups, Mapping) else {}
    if bits := (first.get("weights") or {}).get("num_bits"):
        group = first["weights"].get("group_size") or 0  # none, or -1: a factor for a whole row
        return Stored(method, bits / 8 + (2 / group if group > 0 else 0.0))
    raise ValueError(f"the checkpoint is quantized by {method or 'a method without a name'}, whose size is not known")
