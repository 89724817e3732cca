"""Writes the manifest: the configuration, versions, machine, code and seeds that made a result.

It asks torch about the machine. Reading a manifest needs no torch, and is in ``experiments.results.origin``.
"""

import hashlib
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

import specdec
from experiments.results.origin import MANIFEST, json_text, read_manifest, replace_text
from specdec import bundled
from specdec.machine import cpu

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "scipy", "hydra-core", "wandb")
MOST_CHANGES = 50
"""Changed files that a manifest lists."""

_FACTS = ("chosen_hash", "prompts_hash", "device", "dtype", "revisions", "threads", "torch", "transformers")
"""Facts about a run that do not follow from its configuration alone, and have to be the same where it goes on."""
_OTHER: dict[str, str] = {"chosen_hash": "other prompts", "prompts_hash": "other prompts"}
_OTHER["revisions"] = "other files of its models (revisions in its manifest.json)"

ROOT = Path(__file__).parent.parent.parent
"""Root of the clone, if the package runs from one."""


def write_manifest(folder: Path, config: Mapping[str, Any], **facts: object) -> dict[str, Any]:
    """Write ``manifest.json`` into a run's folder, and return it."""
    manifest = {"command": sys.argv, "config": dict(config), **_circumstances(), **facts}
    replace_text(folder / MANIFEST, json_text(manifest))
    return manifest


def _circumstances() -> dict[str, Any]:
    began = datetime.now().astimezone().isoformat(timespec="seconds")
    code = {"versions": versions(), "git": git_state(ROOT), "project": project_state(Path.cwd())}
    return {"started": began, "machine": machine(), **code}


def check_facts(manifest: Mapping[str, Any], folder: Path, **facts: object) -> None:
    """Refuse to go on with an interrupted run (``resume=true``) with other prompts, another device or model."""
    for name in _FACTS:
        if name in facts and name in manifest and manifest[name] != facts[name]:
            what = _OTHER.get(name, f"{name} {manifest[name]}, now {facts[name]}")
            raise ValueError(f"resume=true: the run in {folder} had {what}: its results cannot be continued here")


def note_resumed(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write into the manifest when, where and with what the run went on."""
    note_in_manifest(folder, resumed=[*manifest.get("resumed", []), _circumstances()])


def note_in_manifest(folder: Path, **facts: object) -> None:
    """Add facts to the manifest of a run at its end; whatever happens, the file is the old one or the new one."""
    replace_text(folder / MANIFEST, json_text({**read_manifest(folder), **facts}))


def versions() -> dict[str, str | None]:
    """Python's and the packages' versions; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "specdec": specdec.__version__}
    for name in PACKAGES:
        found[name] = None
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> dict[str, Any]:
    """Its name, processor and threads, and the GPUs if there are any."""
    facts: dict[str, Any] = {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": cpu().name,
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
    if facts["gpus"]:
        facts["cuda"] = torch.version.cuda
    return facts


def device_name(device: torch.device) -> str:
    """A GPU's product name, or the processor's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu().name


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, and whether files differ from it; None outside a clone."""
    found = project_state(folder)
    # A package installed inside some other repository must not report that one's commit.
    if found is None or found["commit"] is None or Path(found["folder"]).resolve() != folder.resolve():
        return None
    return {name: found[name] for name in ("commit", "dirty")}


def project_state(folder: Path) -> dict[str, Any] | None:
    """The ``folder``, ``commit`` (None before the first) and ``changes`` (at most 50) of a folder's repository.

    ``dirty`` says whether there are any changes. None outside of a repository.
    """
    top, changes = _git(folder, "rev-parse", "--show-toplevel"), _git(folder, "status", "--porcelain")
    if top is None or changes is None:
        return None
    listed, commit = changes.splitlines(), _git(folder, "rev-parse", "--verify", "HEAD")
    return {"folder": top, "commit": commit, "dirty": bool(listed), "changes": listed[:MOST_CHANGES]}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git on this machine, or a repository too slow to ask
    return done.stdout.rstrip() if done.returncode == 0 else None


# ---------------------------------------------------------------- revisions of models

_FILES = ("config.json", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Files of which a downloaded model has at least one."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_PIECE, _PIECES = 1 << 16, 16
"""Bytes of a piece of a file of weights, and pieces that are read: training changes nearly all weights."""


def revision_of(
    name: str, *, revision: str | None = None, subfolder: str | None = None, cache_dir: str | None = None
) -> str | None:
    """``"hub:"`` and the commit of a model's downloaded files, or ``"files:"`` and a digest; None if neither is known.

    The digest is of a local folder's ``.json`` files and of its weights' names, sizes and samples. The arguments are
    those with which the model was loaded.
    """
    folder = Path(bundled.resolve(name)) / (subfolder or "")
    if folder.exists():
        return f"files:{_digest(folder if folder.is_dir() or folder.suffix == '.gguf' else folder.parent)}"
    for file in _FILES:
        path = f"{subfolder}/{file}" if subfolder else file
        try:
            cached = try_to_load_from_cache(name, path, cache_dir=cache_dir, revision=revision)
        except ValueError:  # not a name that the hub can have
            return None
        if isinstance(cached, str):
            parts = Path(cached).parts
            return f"hub:{parts[parts.index('snapshots') + 1]}" if "snapshots" in parts else None
    return None


def _digest(folder: Path) -> str:
    """A digest of the files in a folder that make a model what it is; of a GGUF file, of it alone."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        if not path.is_file() or path.suffix not in (".json", *_WEIGHTS):
            continue
        size = path.stat().st_size
        total.update(f"{path.name} {size}\n".encode())
        if path.suffix == ".json" or size <= _PIECE * _PIECES:
            total.update(path.read_bytes())
            continue
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek((size - _PIECE) * piece // (_PIECES - 1))
                total.update(file.read(_PIECE))
    return total.hexdigest()
