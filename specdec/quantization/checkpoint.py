"""Saves a quantized model and reads it back, with transformers' own ``save_pretrained`` and ``from_pretrained``.

The model's configuration names the scheme (``quantization_config``), and a quantizer that is registered with
transformers makes the quantized layers before the weights are read into them. A program that has not imported this
package does not know the scheme: transformers then warns and loads a model with wrong weights.
"""

import copy
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from specdec.memory import off_files
from specdec.quantization.base import QuantizedLinear, replace_linears
from specdec.quantization.fp8 import Fp8Linear
from specdec.quantization.int4 import Int4Linear
from specdec.quantization.int8 import Int8Linear

METHODS: dict[str, Callable[[Tensor, Tensor | None], QuantizedLinear]] = {
    "int8": Int8Linear,
    "int4": Int4Linear,
    "fp8": Fp8Linear,
}
"""Each makes a layer from a weight of shape (out, in) and a bias. It must also take tensors on torch's ``meta`` device,
which have shapes but no numbers: in this way the layers of a saved model are made before its numbers are read."""

METHOD = "specdec"
"""The value of ``quant_method`` in ``config.json`` for our schemes."""


class SpecdecConfig(QuantizationConfigMixin):
    """The entry ``quantization_config`` of a quantized model's configuration.

    Args:
        scheme: A name in ``METHODS``.
        **ignored: ``quant_method``, as it was read from a file.
    """

    def __init__(self, scheme: str, **ignored: object):
        self.quant_method: Any = METHOD
        self.scheme = scheme.removesuffix("_compact")  # earlier versions had a name for a layer without copies


class SpecdecQuantizer(HfQuantizer):
    """What transformers calls while it loads a model that was saved in one of our schemes."""

    quantization_config: SpecdecConfig

    def validate_environment(self, *args: object, **kwargs: object) -> None:
        """Refuse what cannot be read."""
        scheme = self.quantization_config.scheme
        if scheme not in METHODS:
            raise ValueError(f"the model is stored in {scheme!r}, and this version reads {', '.join(METHODS)}")
        if not self.pre_quantized:
            raise ValueError(f"give quantization={scheme!r} to load_model or Target.from_pretrained instead")

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> PreTrainedModel:
        replace_linears(model, METHODS[self.quantization_config.scheme])
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> PreTrainedModel:
        # transformers refuses to change the dtype of a model with this mark. Ours can: only its scales are cast.
        off_files(model)
        model.is_quantized = False  # pyright: ignore[reportArgumentType] (transformers sets it as well)
        return model

    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride] (its stub says None)
        return True

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return False


def mark(model: PreTrainedModel, scheme: str) -> None:
    """Write into a model's configuration that it is quantized.

    The model gets a configuration of its own, because others may share the one that it had. If its output layer shared
    the embedding's table, it no longer does, and the configuration says that too.
    """
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                setattr(module, name, copies[id(value)])
    model.config.quantization_config = SpecdecConfig(scheme)
    if isinstance(model.get_output_embeddings(), QuantizedLinear):
        for config in (model.config, model.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False
        # Names that transformers noted when the model was made; saving and tying go by them.
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def quantization_of(model: PreTrainedModel) -> str | None:
    """Returns the name of a model's quantization; None if it has none of ours."""
    return stored_scheme(model.config)


def stored_scheme(config: PreTrainedConfig) -> str | None:
    """Returns the scheme that a checkpoint's configuration names; None if it names none of ours."""
    stored: Any = getattr(config, "quantization_config", None)
    if isinstance(stored, SpecdecConfig):
        return stored.scheme
    if not isinstance(stored, dict) or stored.get("quant_method") != METHOD:
        return None
    return SpecdecConfig(**stored).scheme


# Checkpoints that other libraries have quantized load through transformers' own quantizers, unmodified.

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel",),
    "compressed-tensors": ("compressed_tensors",),
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao",),
}
"""The modules that transformers needs to read each kind of checkpoint. The extra that installs them has its name."""


def quantized_by(config: PreTrainedConfig, given: Any = None) -> str | None:
    """Returns the method by which another library has quantized a checkpoint, or will quantize it while it is loaded.

    Args:
        given: The option ``quantization_config`` of ``from_pretrained``.

    Returns:
        The method's name in transformers (``"gptq"``, …); None for full precision and for this project's own schemes.
    """
    settings = given if given is not None else getattr(config, "quantization_config", None)
    if settings is None:
        return None
    read = settings.get if isinstance(settings, Mapping) else lambda name: getattr(settings, name, None)
    method = read("quant_method")
    method = getattr(method, "value", method)
    if method is None and (read("load_in_4bit") or read("load_in_8bit")):  # as written before methods had names
        return "bitsandbytes"
    return None if method in (None, METHOD) else str(method)


def check_packages(method: str) -> None:
    """Refuse a checkpoint (``quantized_by`` this method) that cannot be read here, before its weights are."""
    missing = [module for module in PACKAGES.get(method, ()) if find_spec(module) is None]
    if missing:
        packages = " and ".join(module.replace("_", "-") for module in missing)
        verb = "is" if len(missing) == 1 else "are"
        said = f"it is quantized by {method}, and {packages} {verb} not installed"
        raise ValueError(f"{said}: pip install 'specdec-research[{method}]'")


def check_alone(method: str, *, quantization: object, inflate: object) -> None:
    """Refuse this project's changes to weights on top of another library's."""
    for option, value in (("quantization", quantization), ("inflate", inflate)):
        if value is not None:
            said = f"it is quantized by {method} already; leave {option}={value!r} out"
            raise ValueError(f"{said}, or load the checkpoint in full precision")


# Assigned and not registered by transformers' functions, which refuse a module that is imported a second time.
AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = SpecdecConfig
AUTO_QUANTIZER_MAPPING[METHOD] = SpecdecQuantizer
