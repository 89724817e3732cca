"""Where the files of a model are by its name: on the hub, in a folder, or in ``SPECDEC_MODELS``."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODELS = "SPECDEC_MODELS"
"""The environment variable with a folder of models, for machines without a network."""
SHORT = {
    "openai_humaneval": "humaneval.jsonl",
    "smollm2-135m-instruct": "smollm2-135m",
    "gemma-3-270m": "gemma3-270m",
    "qwen2.5-coder-0.5b-instruct": "qwen-coder-0.5b",
    "qwen2.5-coder-1.5b-instruct": "qwen-coder-1.5b",
}
"""Other names that folders and files of some models and datasets may have there."""
GGUF = ".gguf"


def offline(name: str) -> str:
    """Return the place of ``OWNER/NAME`` in ``SPECDEC_MODELS``, its ``NAME`` in lower case or its ``SHORT`` one.

    Without the variable or such a place, and for every other text, returns the name itself.
    """
    owner, _, own = name.lower().partition("/")
    top = os.environ.get(MODELS)
    if not top or not owner or not own or "/" in own or looks_local(name):
        return name
    places = (Path(top).expanduser() / each for each in (own, SHORT.get(own, own)))
    return str(next((place for place in places if place.exists()), name))


def looks_local(path: str) -> bool:
    """Return whether a text is a path on this machine and not a name on the hub, ``OWNER/NAME`` or ``NAME``."""
    if Path(path).exists() or Path(path).is_absolute() or path.startswith((".", "~")) or "\\" in path:
        return True
    first, *others = path.split("/")
    return path.endswith(GGUF) or len(others) > 1 or (len(others) == 1 and (others == [""] or Path(first).is_dir()))


def located(path: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a path and options as transformers takes them: of a GGUF file its folder, and its name as an option.

    A folder without ``config.json`` stands for the one such file in it. Raises ValueError: it has several, or no name.
    """
    place, where = Path(path, options.get("subfolder") or ""), dict(options)
    if not isinstance(file := where.get("gguf_file"), str | None) or file == "":
        raise ValueError(f"gguf_file={file!r}: give the name of a file of this model, as in gguf_file=NAME.gguf")
    if file is None and place.is_dir() and not (place / "config.json").is_file():
        files = sorted(place.glob(f"*{GGUF}"))
        if len(files) > 1:
            raise ValueError(f"no model at {path!r}: it has {len(files)} GGUF files, give one, as {files[0].name}")
        place = files[0] if files else place
    if place.suffix == GGUF and place.is_file():
        return str(place.parent), where | {"gguf_file": place.name, "subfolder": ""}
    return path, where
