"""Quantized weights, by name: ``quantization="int8"`` for a target or a drafter.

| name | weights | bytes per weight that one token reads |
|---|---|---|
| ``int8`` | 8-bit integers, a scale per output channel | 1 |
| ``int4`` | 4-bit integers, a scale for every 64 weights | 0.56 |
| ``fp8`` | 8-bit floating-point numbers, a scale per output channel; GPUs only | 1 |

To add one: a module beside ``int8.py`` with a subclass of ``QuantizedLinear``, and a line in ``METHODS``
(``checkpoint.py``), which also saves it and reads it back.
"""

from transformers import PreTrainedModel

from specdec.quantization.base import QuantizedLinear, replace_linears
from specdec.quantization.checkpoint import METHODS, mark, quantization_of, quantized_by
from specdec.quantization.speed import check_fast

__all__ = ["METHODS", "check_fast", "check_quantization", "quantization_of", "quantize"]


def check_quantization(name: str | None) -> None:
    """Refuse a name that there is not, before a model is loaded for it."""
    if name is not None and (not isinstance(name, str) or name not in METHODS):
        raise ValueError(f"quantization={name!r}: give one of {', '.join(METHODS)}, or leave it out")


def quantize(model: PreTrainedModel, name: str, *, check: bool = True) -> PreTrainedModel:
    """Quantize a loaded model's linear layers in place; returns the model.

    The quantized model is a model of its own: decoding with it as the target follows *its* distribution exactly. A
    quantized copy of a target is a drafter for it (``drafters.itself``). ``save_pretrained`` writes it as it is, and
    ``Target.from_pretrained`` reads it back.

    Args:
        model: In the dtype and on the device that it will run in.
        name: A name in ``METHODS``.
        check: Refuse a scheme that is not faster than full precision on the model's device (``speed.py``).

    Raises:
        ValueError: There is no such quantization (the names are listed), the model is quantized already, or the scheme
            is not faster here.
    """
    check_quantization(name)
    method = quantized_by(model.config)
    if method is not None or any(isinstance(module, QuantizedLinear) for module in model.modules()):
        by, kind = "" if method is None else f" by {method}", model.config.model_type
        raise ValueError(
            f"quantization={name!r}: this {kind} model is quantized{by} already; load it in full precision"
        )
    if check:
        check_fast(model, name)
    replace_linears(model, METHODS[name])
    mark(model, name)
    return model
