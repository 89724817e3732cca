"""Prompts from JSONL files of the kind that the field's benchmarks ship as."""

import json
from dataclasses import dataclass
from pathlib import Path

from experiments.datasets.prompt import Prompt


@dataclass(frozen=True, kw_only=True)
class Jsonl:
    """One JSON object per line: ``{"turns": ["…"]}`` for a conversation, or ``{"prompt": "…"}`` for text to continue.

    Optional keys: ``question_id`` or ``id`` (else the line's number names the prompt) and ``category``. Others are
    left alone. Blank lines are skipped.

    Attributes:
        file: Path of the file.
        count: Prompts to take; None for all.
        seed: Of the choice.
    """

    file: str
    count: int | None = None
    seed: int = 0

    def load(self) -> list[Prompt]:
        """All lines, in order."""
        path = Path(self.file)
        if not path.is_file():
            raise ValueError(f"dataset.file: there is no file {self.file!r}")
        prompts = []
        try:
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        prompts.append(_prompt(line, number, f"{self.file}, line {number}"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.file} is not UTF-8 text: {error.reason}") from error
        if not prompts:
            raise ValueError(f"{self.file} has no prompts: it is empty")
        return prompts


def _prompt(line: str, number: int, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where} is not a JSON object: give {{"turns": ["…"]}} or {{"prompt": "…"}}')
    if "turns" in row:
        turns, chat = row["turns"], True
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise ValueError(f'{where}: "turns" must be a list of non-empty strings')
    elif "prompt" in row:
        turns, chat = [row["prompt"]], False
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError(f'{where}: "prompt" must be a non-empty string')
    else:
        raise ValueError(f'{where} has neither "turns" nor "prompt"')
    name = row.get("question_id", row.get("id", number))
    return Prompt(id=str(name), turns=tuple(turns), category=str(row.get("category") or ""), chat=chat)
