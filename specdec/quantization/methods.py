"""The quantizations that there are, by name."""

from collections.abc import Callable

from transformers import PreTrainedModel

from specdec.quantization import int8

METHODS: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "int8": int8.with_copies,
    "int8_compact": int8.compact,
}
"""Each changes a loaded model in place and returns it. It must also take a model on torch's ``meta`` device, which has
shapes but no numbers: in this way the layers of a saved model are made before its numbers are read."""
