"""The configuration of a model by its name, and the bytes of its numbers, without its weights and without PyTorch."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specdec import bundled, llama_shapes
from specdec.files import located, looks_local
from specdec.physics.precision import BYTES, Precision, stored
from specdec.physics.reading import MissingSizeError, read_shape
from specdec.physics.shape import ModelShape

FILE = "config.json"


def read_config(name: str, gguf_file: str | None = None) -> dict[str, Any]:
    """Return the content of a model's ``config.json``: of a file, a folder, ``bundled/…``, or a name on the hub.

    A GGUF file (``gguf_file``: of a name on the hub) has one by transformers, which imports PyTorch.
    """
    resolved, files = located(bundled.resolve(name), {"gguf_file": gguf_file})
    if files["gguf_file"] is not None:
        from specdec.target.loading import load_config

        return load_config(name, gguf_file=gguf_file).to_dict()
    path = Path(resolved, FILE) if Path(resolved).is_dir() else Path(resolved)
    if not path.is_file():
        if looks_local(resolved) or path.suffix == ".json":
            raise ValueError(f"there is no {path}: give a {FILE}, its folder, a GGUF file, or a name on the hub")
        path = _from_hub(name)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no configuration, but {type(found).__name__}")
    return found


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a model.

    What a configuration leaves out, its class in transformers may have a default for. Only then transformers is
    imported, which takes seconds.

    Raises ValueError: it is no decoder, or lacks a size that transformers does not know either.
    """
    try:
        return read_shape(config)
    except MissingSizeError as missing:
        from transformers import CONFIG_MAPPING  # imports PyTorch

        if config.get("model_type") not in CONFIG_MAPPING:
            raise ValueError(f"{name}: {missing}") from missing
        return read_shape(CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def stored_sizes(name: str, pattern: str = "", axis: int | None = None) -> dict[str, int]:
    """Return how many numbers each tensor of a drafter's files has, from the heads of the files alone.

    ``pattern`` is the end of the names that count; with ``axis``, the length of this axis is returned instead.
    Raises ValueError: there are no files in safetensors' format on this machine.
    """
    place = Path(bundled.resolve(name))
    found = downloaded(name) if not place.exists() else None
    folder = place if found is None else found.parent
    folder = folder / "adapter" if (folder / "adapter").is_dir() else folder
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise ValueError(f"{name!r}: there are no files in safetensors' format on this machine: download them first")
    sizes: dict[str, int] = {}
    for file in files:
        with file.open("rb") as stream:
            tensors = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for key, tensor in tensors.items():
            if key != "__metadata__" and re.search(f"{pattern}$", key):
                sizes[key] = math.prod(tensor["shape"]) if axis is None else tensor["shape"][axis]
    return sizes


def downloaded(name: str) -> Path | None:
    """Return the file of a name on the hub if it is on this machine. Raises ValueError: the hub has no such names."""
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, FILE)
    except ValueError as error:
        raise ValueError(f"{name!r} is neither a file, nor a folder, nor a name that the hub can have") from error
    return Path(cached) if isinstance(cached, str) else None


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        return downloaded(name) or Path(hf_hub_download(name, FILE))
    except GatedRepoError as error:
        raise ValueError(f"the hub gives {name} to those who accept its terms, at huggingface.co/{name}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"the hub has no model {name!r}, or hides it from you") from error
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"{name!r} is not on this machine, and the hub cannot be reached: give the path of its {FILE}"
        ) from error


_GROUP = 64  # weights that share a factor in this project's int4
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
    found, words = Precision.of(computes, weights=quantization, kv=kv_cache), computes
    if quantization is not None:
        if quantization == "int4":  # factors are kept in the model's own type
            size = found.weights + BYTES[computes] / _GROUP
            found = replace(found, weights=size, output=size)
        # Experts that are stored as one tensor are left alone.
        found, words = replace(found, experts=BYTES[computes]), f"weights in {quantization}, computing in {computes}"
    elif (checkpoint := stored(config)) is not None:
        weights = found.weights if checkpoint.weights is None else checkpoint.weights
        found = replace(found, weights=weights, experts=checkpoint.experts)
        words = f"weights as stored ({checkpoint.name}), computing in {computes}"
    return Formats(found, computes, words + ("" if kv_cache is None else f", KV cache in {kv_cache}"))


def inflated(config: Mapping[str, Any], inflate: str | Mapping[str, int] | None) -> dict[str, Any]:
    """Return the configuration of a target that is inflated; as it is if it is not."""
    if inflate is None:
        return dict(config)
    if (kind := config.get("model_type")) != "llama":
        raise ValueError(f"target.inflate={inflate}: only Llama models can be inflated, and this is a {kind} model")
    return {**config, **asdict(llama_shapes.shape_of(inflate))}


def _dtype_of(config: Mapping[str, Any]) -> str:
    inner = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else {}
    named = config.get("dtype") or config.get("torch_dtype") or (inner or {}).get("torch_dtype")
    return str(named).removeprefix("torch.") if named else "bfloat16"
