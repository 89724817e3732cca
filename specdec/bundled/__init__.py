"""The models that ship with the package: a real trained target, a small drafter and Medusa heads.

With them every command of this project runs on trained weights without a download. All three were made by
``python -m experiments.bundle``; ``MODEL_CARD.md`` beside this file has data, recipe and losses.
"""

from pathlib import Path

NAMES = ("target", "drafter", "medusa")
PREFIX = "bundled/"


def resolve(name_or_path: str) -> str:
    """Turn ``"bundled/target"`` into the directory of that model; return any other name or path (``~`` expanded).

    Raises:
        ValueError: ``bundled/…`` names a model that does not ship, or whose files are missing.
    """
    if not str(name_or_path).startswith(PREFIX):
        text = str(name_or_path)
        return str(Path(text).expanduser()) if text.startswith("~") else text
    name = str(name_or_path)[len(PREFIX) :]
    if name not in NAMES:
        raise ValueError(f"no bundled model {name!r}: the bundled models are {', '.join(PREFIX + n for n in NAMES)}")
    path = Path(__file__).parent / name
    if not (path / "config.json").is_file():
        raise ValueError(
            f"bundled model {name!r} has no files in {path}: reinstall the package, or run python -m experiments.bundle"
        )
    return str(path)
