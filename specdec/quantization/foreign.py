"""Checkpoints that other libraries have quantized: they load through transformers' own quantizers, unmodified."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedConfig

from specdec.quantization.checkpoint import METHOD

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
        config: The checkpoint's configuration.
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
    """Refuse a checkpoint that cannot be read here, before its weights are.

    Args:
        method: From ``quantized_by``.

    Raises:
        ValueError: Names the missing package, and the extra that installs it.
    """
    missing = [module for module in PACKAGES.get(method, ()) if find_spec(module) is None]
    if missing:
        packages = " and ".join(module.replace("_", "-") for module in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"it is quantized by {method}, and {packages} {verb} not installed: "
            f"pip install 'specdec-research[{method}]'"
        )


def check_alone(method: str, *, quantization: object, inflate: object) -> None:
    """Refuse this project's changes to weights on top of another library's.

    Raises:
        ValueError: Says which option to leave out.
    """
    for option, value in (("quantization", quantization), ("inflate", inflate)):
        if value is not None:
            raise ValueError(
                f"it is quantized by {method} already; leave {option}={value!r} out, or load the checkpoint in full "
                f"precision"
            )
