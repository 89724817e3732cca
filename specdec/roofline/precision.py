"""How many bytes the numbers of a model take."""

from dataclasses import dataclass

BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}
"""Bytes of a number, without factors that belong to it."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per number.

    Attributes:
        weights: Bytes of a weight in a layer's matrix, factors and zero points of its group included.
        output: Bytes of a weight in the output layer.
        tables: Bytes of a weight in the tables of embeddings, which quantizers leave alone.
        kv: Bytes of a number in the cache.
        kv_vector: Bytes of the factor that a quantized cache keeps with every vector.
        activations: Bytes of a number between layers.
        logits: Bytes of a logit.
    """

    weights: float = 2.0
    output: float = 2.0
    tables: float = 2.0
    kv: float = 2.0
    kv_vector: float = 0.0
    activations: float = 2.0
    logits: float = 4.0

    @classmethod
    def of(
        cls,
        dtype: str = "bfloat16",
        *,
        weights: str | None = None,
        group: int | None = None,
        zero_points: bool = False,
        output: str | None = None,
        kv: str | None = None,
    ) -> "Precision":
        """Returns the bytes of formats by name.

        Args:
            dtype: What the model computes in.
            weights: Format of the layers' matrices; None for ``dtype``.
            group: How many weights of a quantized matrix share a factor of 16 bits; None for a row, whose factor is
                too small a part of it to count.
            zero_points: Whether every group has a zero point of 16 bits, too.
            output: Format of the output layer; None for that of ``weights``.
            kv: Format of the cache; ``int8`` and ``fp8`` keep a factor of 32 bits with every vector. None for
                ``dtype``.

        Raises:
            ValueError: There is no such format.
        """
        factors = 0.0 if group is None else (4 if zero_points else 2) / group
        return cls(
            weights=bytes_of(weights or dtype) + factors,
            output=bytes_of(output or weights or dtype) + (factors if output is None else 0.0),
            tables=bytes_of(dtype),
            kv=bytes_of(kv or dtype),
            kv_vector=4.0 if kv in ("int8", "fp8") else 0.0,
            activations=bytes_of(dtype),
        )


def bytes_of(name: str) -> float:
    """Returns the bytes of a number in a format.

    Raises:
        ValueError: There is no such format.
    """
    if name not in BYTES:
        raise ValueError(f"there is no number format {name!r}: give one of {', '.join(BYTES)}")
    return BYTES[name]
