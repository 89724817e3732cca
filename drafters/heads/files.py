"""The files of a checkpoint: in a local folder, or in a repository of the hub."""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec import bundled
from specdec.origin import first_sentence
from specdec.target.loading import looks_local

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

OURS = "specdec.json"
"""A file of ours beside ``config.json``: what the public keys cannot say without doubt."""


class Checkpoint:
    """Finds and reads the files of one checkpoint.

    Args:
        path: A folder, a name on the hub, or ``bundled/…``.
        subfolder: Folder of the checkpoint within.
        **download: What ``hf_hub_download`` takes: ``revision``, ``token``, ``cache_dir``, ``force_download`` and
            ``local_files_only``.

    Attributes:
        name: What was given as ``path``.
        config: Its ``config.json``.

    Raises:
        ValueError: There is no such folder or repository, or no ``config.json`` in it.
    """

    def __init__(self, path: str | Path, *, subfolder: str | None = None, **download: Any):
        self.name = str(path)
        resolved = bundled.resolve(self.name)
        self._folder = Path(resolved) / (subfolder or "") if looks_local(resolved) else None
        self._repository, self._subfolder, self._download = resolved, subfolder, download
        if self._folder is not None and not self._folder.is_dir():
            raise ValueError(f"no checkpoint at {self.name!r}: there is no such folder")
        config = self.json("config.json")
        if config is None:
            raise ValueError(f"no checkpoint at {self.name!r}: there is no config.json")
        self.config: dict[str, Any] = config

    def find(self, file: str) -> Path | None:
        """Returns a file's place on this machine, after a download if need be; None if there is no such file.

        Raises:
            ValueError: The hub cannot be reached, or refuses.
        """
        if self._folder is not None:
            return self._folder / file if (self._folder / file).is_file() else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )

        try:
            return Path(hf_hub_download(self._repository, file, subfolder=self._subfolder, **self._download))
        except LocalEntryNotFoundError as error:
            if file != "config.json":
                return None  # the repository is in the cache without this file
            raise ValueError(
                f"no checkpoint at {self.name!r}: not a local folder, and the hub cannot be reached"
            ) from error
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            reason = first_sentence(error)
            raise ValueError(
                f"no checkpoint at {self.name!r}: not a local folder, and the hub says: {reason}"
            ) from error

    def json(self, file: str) -> dict[str, Any] | None:
        """Returns what a JSON file holds; None if there is no such file."""
        found = self.find(file)
        if found is None:
            return None
        try:
            stored = json.loads(found.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.name}: {file} is not JSON: {error}") from error
        if not isinstance(stored, dict):
            raise ValueError(f"{self.name}: {file} holds no settings by name, but a {type(stored).__name__}")
        return stored

    def names(self) -> list[str]:
        """Returns the names of all tensors, which are not read as far as the files allow it.

        Raises:
            ValueError: There are no weights, or they cannot be read.
        """
        for index in INDICES:
            listing = self.json(index)
            if listing is not None:
                return sorted(listing["weight_map"])
        seen: list[str] = []
        self.tensors(lambda name: bool(seen.append(name)))  # none is wanted
        return sorted(seen)

    def tensors(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
        """Returns the tensors whose names are wanted, on the CPU. Of several files, only those that hold some are read.

        Raises:
            ValueError: There are no weights, or they cannot be read.
        """
        for index in INDICES:
            listing = self.json(index)
            if listing is not None:
                files = sorted({file for name, file in listing["weight_map"].items() if wanted(name)})
                break
        else:
            files = [file for file in WEIGHTS if self.find(file) is not None][:1]
            if not files:
                raise ValueError(f"{self.name} has no weights: there is neither {' nor '.join(WEIGHTS)}")
        found: dict[str, Tensor] = {}
        for file in files:
            path = self.find(file)
            if path is None:
                raise ValueError(f"{self.name} is incomplete: {file} is missing")
            found |= _read(path, wanted)
        return found


def _read(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = first_sentence(error)
        raise ValueError(f"{path} cannot be read as a checkpoint: {reason}") from error
    if not isinstance(stored, Mapping) or not all(isinstance(tensor, Tensor) for tensor in stored.values()):
        raise ValueError(f"{path} is not a dict of tensors: give a checkpoint as a training wrote it")
    return {name: tensor for name, tensor in stored.items() if wanted(name)}
