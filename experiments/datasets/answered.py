"""Prompts with their answers, from files of benchmarks and of conversations."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.datasets.files import rows

PROMPTS = ("turns", "prompt", "question")
ANSWERS = ("reference", "answer", "response", "completion")
"""Keys of a row that hold what was asked and what was answered; the first that a row has."""
_CONVERSATIONS = ("messages", "conversations")
_ASSISTANTS = ("assistant", "gpt")


@dataclass(frozen=True)
class Answered:
    """A text that is known to its end.

    Attributes:
        category: The row's ``category``, else the name of its file.
        prompt: Everything before the answer, earlier turns and their answers included; a line break behind each.
        answer: What is to be decoded.
    """

    category: str
    prompt: str
    answer: str


def answered(file: str, category: str) -> Iterator[Answered]:
    """Yields every answer of a file, with all that stands before it.

    A row has ``turns`` with a ``reference`` for each, as Spec-Bench's; a ``prompt`` or ``question`` with an ``answer``,
    ``response`` or ``completion``; or a conversation under ``messages``, as ``experiments.train`` writes responses of
    a target. Rows and turns without an answer are left out. Alternatives (a list within a list) are joined by commas.

    Args:
        file: A path of JSON Lines or Parquet, or a name on the Hugging Face hub.
        category: The category of rows that name none.

    Raises:
        ValueError: There is no such file, or it is not what its name says.
    """
    for number, row in rows(file, "texts"):
        if not isinstance(row, Mapping):
            raise ValueError(f'{file}, line {number} is not a JSON object: give {{"prompt": "…", "answer": "…"}}')
        before = ""
        for said, is_answer in spoken(row):
            if is_answer and said.strip() and before:
                yield Answered(str(row.get("category") or category), before, said)
            before += said + "\n"


def spoken(row: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yields what is said one after another, and whether it is an answer; an empty answer is one that is not known."""
    messages = next((row[key] for key in _CONVERSATIONS if isinstance(row.get(key), list)), None)
    if messages is not None:
        for message in messages:
            role = message.get("role", message.get("from"))
            yield _text(message.get("content", message.get("value"))), role in _ASSISTANTS
        return
    prompts, answers = _several(row, PROMPTS), _several(row, ANSWERS)
    for turn, prompt in enumerate(prompts):
        yield _text(prompt), False
        yield _text(answers[turn] if turn < len(answers) else None), True


def _several(row: Mapping[str, Any], keys: tuple[str, ...]) -> list[Any]:
    value = next((row[key] for key in keys if row.get(key)), [])
    return value if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_text(part) for part in value if part)
    return value if isinstance(value, str) else "" if value is None else str(value)
