"""The origin of a result, read back from its manifest; figures, and JSON of them. Needs the standard library only."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"

_FREE = frozenset(["resume", "out", "progress_every", "title"])
"""Settings that may differ between the attempts at a run."""


class Figures(dict[str, Any]):
    """Figures by name, which can be read as attributes too: ``found.speedup``. As JSON they are what a file has."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no figure {name!r} among {', '.join(self)}") from None

    def __or__(self, more: Mapping[str, Any]) -> "Figures":  # type: ignore[override]
        return Figures({**self, **more})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run; a folder without one, or with a damaged one, is refused."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest["config"], dict):
            raise ValueError("its config is not an object")
        return manifest
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{folder} is not the folder of a run: it has no {MANIFEST}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by dotted name: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        inner = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first key whose value differs, with both values; None if the configurations ask for the same."""
    old, new = flatten(before), flatten(now)
    pairs = ((key, old.get(key, "nothing"), new.get(key, "nothing")) for key in (*old, *new) if key not in _FREE)
    return next((pair for pair in pairs if pair[1] != pair[2]), None)


def json_text(value: Any) -> str:
    """The value as indented JSON with a line break at its end. A number that JSON does not have becomes null."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def replace_text(path: Path, text: str) -> None:
    """Write a file; whatever happens, it has the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.part")
    new.write_text(text, encoding="utf-8", errors="replace")
    os.replace(new, path)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------- a file of JSON lines that grows with every step


def kept_rows(file: Path) -> list[Figures]:
    """The rows that an earlier attempt has left; a last one that was cut off is taken out of the file, too."""
    if not file.exists():
        return []
    written = file.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    if len(whole) < len(written):
        file.write_bytes(whole)
    return [json.loads(line, object_hook=Figures) for line in whole.splitlines()]


def keep_row(file: Path, row: dict[str, Any]) -> None:
    """Append a row, so that Ctrl-C or a crash loses no step."""
    with file.open("a", encoding="utf-8", newline="\n") as stream:
        stream.write(json.dumps(row) + "\n")
