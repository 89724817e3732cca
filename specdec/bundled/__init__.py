"""The models that ship with the package: a trained target, a hybrid one with recurrent layers, and drafters.

With them every command of this project runs on trained weights without a download. ``MODEL_CARD.md`` beside this file,
and in the folders of heads, say how they were made; ``SHA256SUMS`` lists their files.
"""

import hashlib
from pathlib import Path

from specdec.files import offline

PREFIX = "bundled/"
FOLDER = Path(__file__).parent
SUMS = "SHA256SUMS"
"""The file with the checksums, as ``sha256sum -c`` reads it."""
MOST_BYTES = 80_000_000
"""All models together have at most so many: they are part of every clone and wheel."""


def names(folder: Path = FOLDER) -> tuple[str, ...]:
    """The models that a folder's ``SHA256SUMS`` lists; none without that file."""
    path = folder / SUMS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return tuple(dict.fromkeys(line.split(maxsplit=1)[1].partition("/")[0] for line in lines))


NAMES = names()


def resolve(name_or_path: str) -> str:
    """Turn ``"bundled/target"`` into the directory of that model; other names are looked up as ``offline`` says.

    Raises:
        ValueError: ``bundled/…`` names a model that does not ship, or whose files are missing.
    """
    text = str(name_or_path)
    if not text.startswith(PREFIX):
        return str(Path(text).expanduser()) if text.startswith("~") else offline(text)
    name = text.removeprefix(PREFIX)
    if name not in NAMES:
        raise ValueError(f"no bundled model {name!r}: the bundled models are {', '.join(PREFIX + n for n in NAMES)}")
    path = FOLDER / name
    if not (path / "config.json").is_file():
        remedy = "reinstall the package, or make it as MODEL_CARD.md says"
        raise ValueError(f"bundled model {name!r} has no files in {path}: {remedy}")
    return str(path)


def files(folder: Path = FOLDER) -> list[Path]:
    """The files of all models in a folder, cards not counted, in a fixed order."""
    return sorted(path for path in folder.glob("*/*") if path.is_file() and path.suffix in (".json", ".safetensors"))


def checksums(folder: Path = FOLDER) -> str:
    """What ``SHA256SUMS`` says if every file is as it should be."""
    sums = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files(folder)}
    return "".join(f"{own}  {path.relative_to(folder).as_posix()}\n" for path, own in sums.items())
