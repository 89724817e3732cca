"""Quantized weights, by name: ``quantization="int8"`` for a target or a drafter.

To add one: a module beside ``int8.py`` with a function that takes a loaded model, changes it in place and returns it,
and a line in ``methods.py``. Saving and reading back (``checkpoint.py``) then work for it too.
"""

from transformers import PreTrainedModel

from specdec.quantization.base import QuantizedLinear
from specdec.quantization.checkpoint import mark, quantization_of
from specdec.quantization.foreign import quantized_by
from specdec.quantization.methods import METHODS

__all__ = ["METHODS", "check_quantization", "quantization_of", "quantize"]


def check_quantization(name: str) -> None:
    """Refuse a name before a model is loaded for it.

    Raises:
        ValueError: Lists the names that there are.
    """
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"quantization={name!r}: give one of {', '.join(METHODS)}, or leave it out")


def quantize(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Quantize a loaded model's linear layers in place; returns the model.

    The quantized model is a model of its own: decoding with it as the target follows *its* distribution exactly. A
    quantized ``copy.deepcopy`` of a target is a drafter for it. ``save_pretrained`` writes it as it is, and
    ``Target.from_pretrained`` reads it back.

    Args:
        model: In the dtype and on the device that it will run in.
        name: ``"int8"``, or ``"int8_compact"`` (see ``specdec/quantization/int8.py``).

    Raises:
        ValueError: There is no such quantization (the names are listed), or the model is quantized already.
    """
    check_quantization(name)
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise ValueError(
            f"quantization={name!r}: this {model.config.model_type} model is quantized already; load it anew"
        )
    method = quantized_by(model.config)
    if method is not None:
        raise ValueError(
            f"quantization={name!r}: this {model.config.model_type} model is quantized by {method} already"
        )
    METHODS[name](model)
    mark(model, name)
    return model
