"""What a right answer is, by the row of a benchmark's file; and which row belongs to which prompt."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from experiments.grading.numbers import final_number


@dataclass(frozen=True)
class Number:
    """The answer is a number (GSM8K)."""

    value: Decimal

    task = "gsm8k"


@dataclass(frozen=True)
class Function:
    """The answer completes a function, which then has to pass ``test`` (HumanEval)."""

    header: str
    name: str
    test: str

    task = "humaneval"


@dataclass(frozen=True)
class Snippet:
    """The answer is code of which some assertions have to hold (MBPP)."""

    setup: str
    tests: tuple[str, ...]

    task = "mbpp"


Reference = Number | Function | Snippet


def reference_of(row: Any) -> Reference | None:
    """The right answer by a row of GSM8K, HumanEval or MBPP, or of Spec-Bench's part of GSM8K; None for other rows."""
    if not isinstance(row, Mapping):
        return None
    if all(isinstance(row.get(key), str) for key in ("prompt", "entry_point", "test")):
        return Function(header=row["prompt"], name=row["entry_point"], test=row["test"])
    tests = row.get("test_list")
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        imports = row.get("test_imports")
        setup = [*(imports if isinstance(imports, list) else []), row.get("test_setup_code") or ""]
        return Snippet(setup="\n".join(map(str, setup)), tests=tuple(tests))
    answer = row.get("answer", row.get("reference"))
    if isinstance(answer, list) and answer:
        answer = answer[0]
    # Other benchmarks have answers in words. GSM8K's worked solutions end with "#### 18".
    if isinstance(answer, str) and "####" in answer:
        value = final_number(answer)
        return None if value is None else Number(value)
    return None


def by_question(rows: Iterable[Any], prompts: Mapping[str, str]) -> dict[str, Reference]:
    """References from another file than the prompts', by prompt id: that of the row whose question a prompt contains.

    Args:
        rows: The other file's rows.
        prompts: The prompts' texts, by id. Words may stand around the question, and white space does not count.
    """
    known = [(_plain(_question(row)), found) for row in rows if (found := reference_of(row)) is not None]
    # The longest first: one question may be a part of another.
    known = sorted(((text, found) for text, found in known if text), key=lambda each: -len(each[0]))
    matched: dict[str, Reference] = {}
    for name, prompt in prompts.items():
        text = _plain(prompt)
        found = next((found for question, found in known if question in text), None)
        if found is not None:
            matched[name] = found
    return matched


def _question(row: Mapping[str, Any]) -> str:
    for key in ("question", "prompt", "text", "turns"):
        value = row.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str):
            return value
    return ""


def _plain(text: str) -> str:
    return " ".join(text.split())
