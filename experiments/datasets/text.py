"""Prompts from plain text files."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.datasets.prompt import CHARACTERS_PER_TOKEN, Prompt, Selection


@dataclass(frozen=True, kw_only=True)
class Text(Selection):
    """Each text file, or each piece of one, is a prompt to be continued; the choice is set as in ``Selection``.

    Attributes:
        files: Paths or glob patterns (``**`` goes into folders), one or several.
        prompt_tokens: Cut the files into pieces of about this many tokens, from line to line; None takes whole files.
    """

    files: str | Sequence[str]
    prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens is not None and self.prompt_tokens < 8:
            raise ValueError(f"dataset.prompt_tokens={self.prompt_tokens}: give at least 8, or null for whole files")

    def load(self) -> list[Prompt]:
        """All files in the patterns' order, each pattern's sorted by name."""
        prompts = []
        for path, text in texts(self.files):
            if self.prompt_tokens is None:
                prompts.append(Prompt(id=path, turns=(text.rstrip("\n"),)))
                continue
            for number, piece in enumerate(pieces(text, round(self.prompt_tokens * CHARACTERS_PER_TOKEN)), start=1):
                prompts.append(Prompt(id=f"{path}#{number}", turns=(piece,)))
        return prompts


def texts(files: str | Sequence[str], setting: str = "dataset.files") -> list[tuple[str, str]]:
    """Path and text of every file that the patterns match, each once.

    Raises:
        ValueError: A pattern matches no file, or a file is empty or not UTF-8.
    """
    patterns = [files] if isinstance(files, str) else list(files)
    paths: dict[str, None] = {}
    for pattern in patterns:
        found = matching(pattern)
        if not found:
            raise ValueError(f"{setting}: no file matches {pattern!r}")
        paths |= dict.fromkeys(found)
    return [(path, _read(path, setting)) for path in paths]


def matching(pattern: str) -> list[str]:
    """The files that a pattern matches, sorted by name."""
    return sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())


def _read(path: str, setting: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text file: leave it out of {setting}") from error
    if not text.strip():
        raise ValueError(f"{path} is empty: leave it out of {setting}")
    return text


def pieces(text: str, characters: int) -> list[str]:
    """Whole lines, joined until the next one would make a piece longer than this; without blank pieces."""
    found = [""]
    for line in text.splitlines(keepends=True):
        if found[-1] and len(found[-1]) + len(line) > characters:
            found.append("")
        found[-1] += line
    return [piece.rstrip("\n") for piece in found if piece.strip()]
