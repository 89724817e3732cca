"""The files of a checkpoint: in a local folder, or in a repository of the hub."""

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec import bundled
from specdec.files import looks_local
from specdec.origin import first_sentence

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

OURS = "specdec.json"
"""A file of ours beside ``config.json``: what the public keys cannot say without doubt."""
TRAINING = "training.json"
"""The file that the trainer writes beside a head's weights."""


TOLD = """architectures model_type auto_map torch_dtype dtype transformers_version use_cache pretraining_tp block_size
_name_or_path name_or_path medusa_num_heads medusa_num_layers hydra_num_heads hydra_num_layers hydra_head_arch
base_model_name_or_path attention_dropout initializer_range tie_word_embeddings bos_token_id eos_token_id pad_token_id
hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
draft_vocab_size attention_bias mlp_bias qkv_bias bias fc_bias rope_theta sliding_window use_sliding_window
max_window_layers num_aux_hidden_states use_aux_hidden_state num_target_layers speculators_version speculators_config
speculators_model_type has_no_defaults_at_init embed_requires_grad use_input_layernorm_in_first_layer
use_last_layernorm use_mtp_layernorm"""  # say nothing beyond tensors and other keys


class Settings(Mapping[str, Any]):
    """A ``config.json``, or a part of it, that knows which of its keys nobody has asked for."""

    def __init__(self, given: Mapping[str, Any]):
        self._given = {key: Settings(value) if isinstance(value, dict) else value for key, value in given.items()}
        self._asked = set[str]()

    def __getitem__(self, key: str) -> Any:
        value = self._given[key]
        self._asked.add(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    @property
    def unread(self) -> list[str]:
        """Keys that nobody has asked for, but ``TOLD`` ones and those without a value; parts' behind their name."""
        left = [key for key, value in self._given.items() if value is not None and key not in TOLD.split()]
        parts = {key: self._given[key] for key in self._asked if isinstance(self._given[key], Settings)}
        inner = [f"{key}.{name}" for key, part in parts.items() for name in part.unread]
        return sorted([key for key in left if key not in self._asked] + inner)


class Where(TypedDict, total=False):
    """Where a checkpoint is, besides its name, as ``huggingface_hub`` calls it; ``subfolder`` holds locally, too."""

    revision: str | None
    subfolder: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    force_download: bool
    local_files_only: bool


class Checkpoint:
    """Finds and reads the files of one checkpoint.

    Args:
        path: A folder, a name on the hub, or ``bundled/…``; with ``weights``, also a file of weights.
        weights: The names that its file of weights, or an index of several, may have, the first one that is there; such
            a checkpoint needs no ``config.json``. None are those of transformers.

    Attributes:
        config: Its ``config.json``; empty if there is none.
    """

    def __init__(self, path: str | Path, *, weights: Sequence[str] = (), **where: Unpack[Where]):
        self.name = str(path)
        resolved = bundled.resolve(self.name)
        self._weights, self._away = tuple(weights or (*INDICES, *WEIGHTS)), ""
        if weights and Path(resolved).is_file():
            resolved, self._weights = str(Path(resolved).absolute().parent), (Path(resolved).name,)
        subfolder = where.pop("subfolder", None)
        self._folder = Path(resolved) / (subfolder or "") if looks_local(resolved) else None
        download: Any = where
        self._repository, self._subfolder, self._download = resolved, subfolder, download
        if self._folder is not None and not self._folder.is_dir():
            raise ValueError(f"no checkpoint at {self.name!r}: there is no such folder")
        config = self.json("config.json")
        if config is None and not weights:
            raise ValueError(f"no checkpoint at {self.name!r}: {self._away or 'there is no config.json'}")
        self.config = Settings(config or {})

    def find(self, file: str) -> Path | None:
        """Returns a file's place on this machine, after a download if need be."""
        if self._folder is not None:
            return self._folder / file if (self._folder / file).is_file() else None
        from huggingface_hub import errors, hf_hub_download

        try:
            return Path(hf_hub_download(self._repository, file, subfolder=self._subfolder, **self._download))
        except errors.LocalEntryNotFoundError:  # perhaps the repository is in the cache without this file
            self._away = "not a local folder, and the hub cannot be reached"
            return None
        except errors.EntryNotFoundError:
            return None
        except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
            reason = f"not a local folder, and the hub says: {first_sentence(error)}"
            raise ValueError(f"no checkpoint at {self.name!r}: {reason}") from error

    def json(self, file: str) -> dict[str, Any] | None:
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
        parts = self._parts()
        if not isinstance(parts, str):
            return sorted(parts)
        seen: list[str] = []
        self.tensors(lambda name: bool(seen.append(name)))  # none is wanted
        return sorted(seen)

    def _parts(self) -> Mapping[str, str] | str:
        """Returns the one file of weights, or by name the file of every tensor."""
        for file in self._weights:
            listing = self.json(file) if file in INDICES else None
            if listing is not None:
                return listing["weight_map"]
            if file not in INDICES and self.find(file) is not None:
                return file
        single = [file for file in self._weights if file not in INDICES]
        raise ValueError(f"{self.name} has no weights: {self._away or 'there is neither ' + ' nor '.join(single)}")

    def tensors(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
        """Returns the tensors whose names are wanted, on the CPU. Files that hold none of them are not read."""
        parts = self._parts()
        files = [parts] if isinstance(parts, str) else sorted({file for name, file in parts.items() if wanted(name)})
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


def write(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    ours: Mapping[str, Any] | None = None,
    file: str = WEIGHTS[0],
) -> None:
    """Write a checkpoint: tensors by their public names, ``config.json``, and unless None our ``specdec.json``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Clones, because safetensors refuses tensors that share memory.
    stored = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / file, metadata={"format": "pt"})
    for name, said in (("config.json", config), (OURS, ours)):
        if said is not None:
            (folder / name).write_text(json.dumps(said, indent=2, default=str) + "\n")


@dataclass(frozen=True, kw_only=True)
class ServedFor:
    """The target, by its name or folder, that a drafter is served with; ``tokens`` None is the head's own number."""

    target: str
    architectures: tuple[str, ...] = ()
    tokens: int | None = None

    def speculators(self, kind: str, architecture: str, tokens: int) -> dict[str, Any]:
        """The entries of ``config.json`` for every drafter in speculators' layout, by default of so many tokens."""
        if not self.target:
            raise ValueError("speculators' layout names the target that is served: give its name")
        proposal = {"proposal_type": "greedy", "speculative_tokens": self.tokens or tokens}
        return {
            "architectures": [architecture],
            "speculators_model_type": kind,
            "speculators_version": "0.9.0",  # whose layout is written
            "tie_word_embeddings": False,
            "speculators_config": {
                "algorithm": kind,
                "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": self.target, "architectures": list(self.architectures)},
            },
        }


@dataclass(frozen=True, kw_only=True)
class Public:
    """A kind of trained drafter as others publish and serve it.

    Attributes:
        formats: Layouts that it is written in, out of native, speculators and sglang.
        holds: Whether files hold one, by the names of their tensors, without ``model.``, and their ``config.json``.
        read: Loads its module by its files' place, the target's configuration (None if unknown), and what it ``takes``.
        write: Writes its module to a folder for a target's configuration, with ``layout`` and ``served``; returns the
            module as it was written, None if that is as it was.
        takes: Settings of a drafter that it has a use for.
        tokens: How many tokens a server drafts per round if nothing else is said; the most, if it is ``bounded``.
        width: Attribute that says how wide the target's hidden states are; None if it reads none.
        decides: Attributes of the module that decide how it drafts, besides its tensors.
        files: Names of its file of weights, where these tell what it is.
        remark: What to know about the module in a layout.
    """

    name: str
    title: str
    formats: tuple[str, ...]
    holds: Callable[[Sequence[str], Mapping[str, Any]], bool]
    read: Callable[..., Any]
    write: Callable[..., object]
    tokens: Callable[[Any], int]
    decides: tuple[str, ...]
    takes: tuple[str, ...] = ()
    bounded: bool = False
    width: str | None = None
    remark: Callable[[Any, str], str] = lambda module, layout: ""
    files: tuple[str, ...] = ()


def has(names: Sequence[str], *beginnings: str) -> bool:
    """Whether any of the names begins so."""
    return any(name.startswith(beginnings) for name in names)


def check_limits(layout: str, head: Any, limits: Mapping[str, Any]) -> None:
    """Refuse a head that a layout cannot say, or whose rest an engine would leave out; ``limits`` by attribute."""
    for name, value in limits.items():
        if (found := attrgetter(name)(head)) != value:
            raise ValueError(f"layout={layout} has heads with {name}={value}, and this one has {found}: give native")


def check_layout(layout: str, layouts: Sequence[str], setting: str = "layout") -> None:
    """Refuse a layout that there is not."""
    if layout not in layouts:
        raise ValueError(f"{setting}={layout!r}: give one of {', '.join(layouts)}")
