"""What the prompts of a run say: one JSON line per prompt, so that records need only name it."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

PROMPTS = "prompts.jsonl"


class HasTurns(Protocol):
    """A prompt, as far as it is kept here."""

    @property
    def id(self) -> str: ...

    @property
    def category(self) -> str: ...

    @property
    def turns(self) -> tuple[str, ...]: ...


def write_prompts(folder: Path, prompts: Iterable[HasTurns]) -> None:
    """Write id, category and turns of every prompt into a run's folder, in the order in which they are measured."""
    lines = (
        json.dumps({"prompt": each.id, "category": each.category, "turns": each.turns}, ensure_ascii=False)
        for each in prompts
    )
    part = folder / f"{PROMPTS}.part"
    part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    os.replace(part, folder / PROMPTS)


def read_prompts(folder: Path) -> Mapping[str, tuple[str, ...]]:
    """The turns of every prompt, by its id; empty for a run that has kept none.

    Raises:
        ValueError: The file is damaged.
    """
    path = folder / PROMPTS
    if not path.is_file():
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            found[row["prompt"]] = tuple(row["turns"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number} is not a prompt: {error}") from error
    return found
