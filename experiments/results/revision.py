"""Which revision of a model a result was made with: a commit on the hub, or a digest of a local folder."""

import hashlib
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from specdec import bundled

_FILES = ("config.json", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Files of which a downloaded model has at least one."""
_WEIGHTS = (".safetensors", ".bin", ".pt")
_PIECE, _PIECES = 1 << 16, 16
"""Bytes of a piece, and how many pieces of a file of weights are read: training changes nearly all weights, and reading
all of a large model would take minutes."""


def revision_of(
    name: str, *, revision: str | None = None, subfolder: str | None = None, cache_dir: str | None = None
) -> str | None:
    """Returns what identifies a model's files; None where that cannot be found out.

    Args:
        name: A folder, a name on the hub, or ``bundled/…``.
        revision: As given when it was loaded, as for all that follow.

    Returns:
        ``"hub:"`` and the commit of the downloaded files; or ``"files:"`` and a digest of a folder's ``.json`` files
        and of its weights' names, sizes and samples.
    """
    folder = Path(bundled.resolve(name)) / (subfolder or "")
    if folder.is_dir():
        return f"files:{_digest(folder)}"
    if folder.is_file():
        return f"files:{_digest(folder.parent)}"
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
    """A digest of the files in a folder that make a model what it is."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.suffix not in (".json", *_WEIGHTS):
            continue
        size = path.stat().st_size
        total.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if path.suffix == ".json" or size <= _PIECE * _PIECES:
                total.update(file.read())
                continue
            for piece in range(_PIECES):
                file.seek((size - _PIECE) * piece // (_PIECES - 1))
                total.update(file.read(_PIECE))
    return total.hexdigest()
