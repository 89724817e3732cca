"""Prompts from files of the kind that the field's benchmarks ship as: JSONL, or the hub's Parquet."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.datasets.files import rows
from experiments.datasets.prompt import Prompt, Selection
from specdec.engine.intake import chat_message

_IDS = ("question_id", "id", "task_id", "prompt_id")


@dataclass(frozen=True, kw_only=True)
class Jsonl(Selection):
    """One JSON object per line: a conversation under ``turns`` or ``messages``, or one prompt under another key.

    Every turn is answered, with the answers before in sight. Of ``messages`` in OpenAI's form (with system messages,
    others' answers, calls of tools) the last is; ``tools`` may be described beside them.
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
        split: The part of the dataset: it stands for ``{split}`` in ``file``.
        license: Licence of the file. Rows may say their own in ``license``, or name a ``source`` that has one, too.
        licenses: Licences of sources, by a part of the source's name.
        placeholder: Beginning of a text that has to be fetched from the row's source first: such rows are refused.
    """

    file: str
    fields: Sequence[str] = ("prompt",)
    chat: bool = False
    template: str = "{}"
    category: str = ""
    tasks: Mapping[str, str] | None = None
    split: str = ""
    license: str = ""
    licenses: Mapping[str, str] | None = None
    placeholder: str = ""

    def __post_init__(self) -> None:
        if "{}" not in self.template:
            raise ValueError(f"dataset.template={self.template!r}: write {{}} where the row's text is to stand")

    def load(self) -> list[Prompt]:
        """All lines, in order."""
        file = self.file.replace("{split}", self.split)
        prompts = [self._prompt(row, f"{file}, line {number}", number) for number, row in rows(file)]
        if not prompts:
            raise ValueError(f"{file} has no prompts: it is empty")
        wanted = [self.only] if isinstance(self.only, str) else self.only
        asked = [prompt.turns for prompt in prompts if not wanted or prompt.category in wanted]
        bad = sum(any(self.placeholder and turn.startswith(self.placeholder) for turn in turns) for turns in asked)
        if bad:
            raise ValueError(
                f"{bad} of the {len(prompts)} prompts of {file} are placeholders, whose texts have to be fetched from "
                f"their sources: run the benchmark's own preparation and give dataset.file=PREPARED, or dataset.only "
                f"with categories that are complete"
            )
        return prompts

    def _prompt(self, row: Any, where: str, number: int) -> Prompt:
        if not isinstance(row, dict):
            raise ValueError(f'{where} is not a JSON object: give {{"turns": ["…"]}} or {{"prompt": "…"}}')
        keys = ("turns", *self.fields, "messages")
        key = next((key for key in keys if row.get(key) is not None), None)
        if key is None:
            raise ValueError(f"{where} has none of {', '.join(keys)}")
        value, more = row[key], dict[str, Any]()
        if key == "messages":
            more = _conversation(row, where)
            turns, chat = [more["messages"][-1]["content"]], True
        elif key == "turns" or isinstance(value, list):
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
        return Prompt(id=str(own), turns=tuple(turns), category=category, chat=chat, license=self._license(row), **more)

    def _license(self, row: Mapping[str, Any]) -> str:
        if row.get("license"):
            return str(row["license"])
        source = str(row.get("source") or "")
        if not source or not (self.license or self.licenses):
            return self.license
        own = next((found for name, found in (self.licenses or {}).items() if name in source), "its own licence")
        return "; ".join([*([self.license] if self.license else []), f"{source}: {own}"])


def _conversation(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what was said before the last answer, and the tools; some files have these lists as JSON."""
    lists = [row["messages"], row.get("tools") or []]
    try:
        given, tools = (json.loads(each) if isinstance(each, str) else [*each] for each in lists)
        said = [chat_message(message, f"message {number}") for number, message in enumerate(given, start=1)]
        asked = [place for place, message in enumerate(said) if message["role"] != "assistant" and message["content"]]
        return {"messages": tuple(said[: asked[-1] + 1]), "tools": tuple(tools)}
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f'{where}: give "messages" of which the last can be answered ({error})') from error
