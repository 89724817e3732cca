"""Prompts from files of the kind that the field's benchmarks ship as: JSONL, or the hub's Parquet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.datasets.files import rows
from experiments.datasets.prompt import Prompt, Selection

_IDS = ("question_id", "id", "task_id", "prompt_id")


@dataclass(frozen=True, kw_only=True)
class Jsonl(Selection):
    """One JSON object per line: a conversation under ``turns``, or one prompt under another key.

    Which of them a run takes is set as in every dataset (``Selection``).

    A row's id is its ``question_id``, ``id``, ``task_id`` or ``prompt_id``, else the line's number. Other keys are
    left alone. Blank lines are skipped.

    Attributes:
        file: A path, or a name on the Hugging Face hub (``experiments.datasets.files``).
        fields: Keys that hold the prompt where there are no ``turns``; the first that a row has. A list of texts
            there is a conversation, too.
        chat: The text under ``fields`` is what a user says, for the target's chat template; False: text to be
            continued. (``turns`` are always a conversation.)
        template: What becomes of that text: ``{}`` stands for it.
        category: Category of rows that name none.
        tasks: New names for categories; several may share one. None for no new names.
    """

    file: str
    fields: Sequence[str] = ("prompt",)
    chat: bool = False
    template: str = "{}"
    category: str = ""
    tasks: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if "{}" not in self.template:
            raise ValueError(f"dataset.template={self.template!r}: write {{}} where the row's text is to stand")

    def load(self) -> list[Prompt]:
        """All lines, in order."""
        prompts = [self._prompt(row, number) for number, row in rows(self.file)]
        if not prompts:
            raise ValueError(f"{self.file} has no prompts: it is empty")
        return prompts

    def _prompt(self, row: Any, number: int) -> Prompt:
        where = f"{self.file}, line {number}"
        if not isinstance(row, dict):
            raise ValueError(f'{where} is not a JSON object: give {{"turns": ["…"]}} or {{"prompt": "…"}}')
        key = next((key for key in ("turns", *self.fields) if key in row), None)
        if key is None:
            *others, last = [f'"{each}"' for each in ("turns", *self.fields)]
            raise ValueError(f"{where} has neither {', '.join(others)} nor {last}")
        value = row[key]
        if key == "turns" or isinstance(value, list):
            turns, chat = value, True
            if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
                raise ValueError(f'{where}: "{key}" must be a list of non-empty strings')
        else:
            if not isinstance(value, str) or not value:
                raise ValueError(f'{where}: "{key}" must be a non-empty string')
            turns, chat = [self.template.replace("{}", value)], self.chat
        category = str(row.get("category") or self.category)
        category = (self.tasks or {}).get(category, category)
        own = next((row[key] for key in _IDS if row.get(key) is not None), number)
        return Prompt(id=str(own), turns=tuple(turns), category=category, chat=chat)
