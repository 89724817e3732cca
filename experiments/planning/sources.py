"""The configuration of a model by its name, without its weights and without PyTorch."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec import bundled
from specdec.physics.reading import MissingSizeError, read_shape
from specdec.physics.shape import ModelShape

FILE = "config.json"


def read_config(name: str) -> dict[str, Any]:
    """Return the content of a model's ``config.json``: of a file, a folder, ``bundled/…``, or a name on the hub.

    Raises:
        ValueError: There is none, or it is not JSON.
    """
    path = Path(bundled.resolve(name))
    if path.is_dir():
        path = path / FILE
        if not path.is_file():
            raise ValueError(f"{name!r} is a folder without a {FILE}: give the folder of a model")
    elif not path.is_file():
        if path.suffix == ".json" or name.startswith(("/", "./", "../", "~")):
            raise ValueError(f"there is no file or folder {name!r}: give a {FILE}, its folder, or a name on the hub")
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

    Raises:
        ValueError: It is no decoder, or lacks a size that transformers does not know either.
    """
    try:
        return read_shape(config)
    except MissingSizeError as missing:
        completed = _completed(config)
        if completed is None:
            raise ValueError(f"{name}: {missing}") from missing
        return read_shape(completed)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _completed(config: Mapping[str, Any]) -> Any:
    """Return the configuration as transformers completes it; None if it does not know the type."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return None
    from transformers import CONFIG_MAPPING  # imports PyTorch

    if kind not in CONFIG_MAPPING:
        return None
    return CONFIG_MAPPING[kind].from_dict(dict(config))


def stored_sizes(name: str, pattern: str = "", axis: int | None = None, *, least: int = 1) -> dict[str, int]:
    """Return how many numbers each tensor of a drafter's files has, from the heads of the files alone.

    ``pattern`` is the end of the names that count; with ``axis``, the length of this axis is returned instead.

    Raises:
        ValueError: There are not as many files in safetensors' format on this machine.
    """
    place = Path(bundled.resolve(name))
    found = downloaded(name) if not place.exists() else None
    folder = place if found is None else found.parent
    folder = folder / "adapter" if (folder / "adapter").is_dir() else folder
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if len(files) < least or any(file.suffix != ".safetensors" for file in files):
        raise ValueError(f"{name!r}: there are no files in safetensors' format on this machine: download them first")
    sizes: dict[str, int] = {}
    for file in files:
        with file.open("rb") as stream:
            tensors = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for key, stored in tensors.items():
            if key != "__metadata__" and re.search(f"{pattern}$", key):
                sizes[key] = math.prod(stored["shape"]) if axis is None else stored["shape"][axis]
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
