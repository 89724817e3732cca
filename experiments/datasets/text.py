"""Prompts from plain text files."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.datasets.prompt import CHARACTERS_PER_TOKEN, Prompt


@dataclass(frozen=True, kw_only=True)
class Text:
    """Each text file, or each piece of one, is a prompt to be continued.

    Attributes:
        files: Paths or glob patterns (``**`` goes into folders), one or several.
        count: Prompts to take; None for all.
        prompt_tokens: Cut the files into pieces of about this many tokens, from line to line; None takes whole files.
        seed: Seed of the choice.
    """

    files: str | Sequence[str]
    count: int | None = None
    prompt_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens is not None and self.prompt_tokens < 8:
            raise ValueError(f"dataset.prompt_tokens={self.prompt_tokens}: give at least 8, or null for whole files")

    def load(self) -> list[Prompt]:
        """All files in the patterns' order, each pattern's sorted by name."""
        patterns = [self.files] if isinstance(self.files, str) else list(self.files)
        paths: dict[str, None] = {}
        for pattern in patterns:
            found = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
            if not found:
                raise ValueError(f"dataset.files: no file matches {pattern!r}")
            paths |= dict.fromkeys(found)
        prompts = []
        for path in paths:
            text = _read(path)
            if self.prompt_tokens is None:
                prompts.append(Prompt(id=path, turns=(text.rstrip("\n"),)))
                continue
            for number, piece in enumerate(_pieces(text, round(self.prompt_tokens * CHARACTERS_PER_TOKEN)), start=1):
                prompts.append(Prompt(id=f"{path}#{number}", turns=(piece,)))
        return prompts


def _read(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text file: leave it out of dataset.files") from error
    if not text.strip():
        raise ValueError(f"{path} is empty: leave it out of dataset.files")
    return text


def _pieces(text: str, characters: int) -> list[str]:
    """Whole lines, joined until the next one would make a piece longer than this; without blank pieces."""
    pieces = [""]
    for line in text.splitlines(keepends=True):
        if pieces[-1] and len(pieces[-1]) + len(line) > characters:
            pieces.append("")
        pieces[-1] += line
    return [piece.rstrip("\n") for piece in pieces if piece.strip()]
