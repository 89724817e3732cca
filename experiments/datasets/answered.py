"""What prompts and answers a row of a file holds: benchmarks and conversations."""

from collections.abc import Iterator, Mapping
from typing import Any

PROMPTS = ("turns", "prompt", "question")
ANSWERS = ("reference", "answer", "response", "completion")
"""Keys of a row that hold what was asked and what was answered; the first that a row has."""
_CONVERSATIONS = ("messages", "conversations")
_ASSISTANTS = ("assistant", "gpt")


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
