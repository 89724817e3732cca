"""References by the rows of the benchmarks, and the programs that test an output."""

from decimal import Decimal
from typing import Any

import pytest

from experiments.grading.programs import program_of
from experiments.grading.references import Function, Number, Reference, Snippet, by_question, reference_of

HEADER = 'import math\n\ndef helper(x):\n    return x\n\n\ndef area(r):\n    """Area."""\n'
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": HEADER,
    "entry_point": "area",
    "test": "def check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-3\n",
    "canonical_solution": "    return math.pi * r * r\n",
}
MBPP = {
    "task_id": 2,
    "text": "Write a function to add.",
    "code": "…",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "test_setup_code": "offset = 0",
}
FUNCTION, SNIPPET = reference_of(HUMANEVAL), reference_of(MBPP)
assert isinstance(FUNCTION, Function)
assert isinstance(SNIPPET, Snippet)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "?", "answer": "3+4=<<3+4=7>>7\n#### 7"}, Number(Decimal(7))),
        ({"turns": ["?"], "reference": ["so\n#### 1,000"]}, Number(Decimal(1000))),
        ({"turns": ["?"], "reference": ["A summary of 3 things."]}, None),
        ({"turns": ["?"], "reference": []}, None),
        ({"turns": ["?"]}, None),
        ({"question": "?", "answer": "#### none"}, None),
        ({"prompt": "p", "entry_point": "f", "test": "t"}, Function("p", "f", "t")),
        ({"text": "p", "test_list": ["assert a"], "test_setup_code": ""}, Snippet("", ("assert a",))),
        (
            {"prompt": "p", "test_list": ["assert a"], "test_imports": ["import b"]},
            Snippet("import b\n", ("assert a",)),
        ),
        ("a text", None),
    ],
)
def test_references(row: Any, expected: Reference | None) -> None:
    assert reference_of(row) == expected


def test_references_of_another_file_are_found_by_the_question() -> None:
    rows = [
        {"question": "How many\n are 1 and 1?", "answer": "#### 2"},
        {"question": "How many are 1 and 1? And 1?", "answer": "#### 3"},
        {"turns": ["Say 5."], "reference": ["#### 5"]},
        {"question": "", "answer": "#### 9"},
        {"question": "Nothing.", "answer": "words"},
    ]
    prompts = {
        "a": "Solve: How many are  1 and 1? Think.",
        "b": "How many are 1 and 1? And 1?",
        "c": "Say 5.",
        "d": "Nothing.",
        "e": "Another one",
    }
    found = by_question(rows, prompts)
    assert found == {"a": Number(Decimal(2)), "b": Number(Decimal(3)), "c": Number(Decimal(5))}


def passes(reference: Function | Snippet, output: str) -> bool:
    """Whether the program ends; run right here, because all of these are the test's own."""
    try:
        exec(program_of(reference, output), {"__name__": "program"})
    except Exception:
        return False
    return True


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ("    return math.pi * r ** 2\n", True),
        ("    return math.pi * r ** 2\n\nprint(area(2)\n", True),  # cut before a line that would not compile
        ("    return math.pi * r ** 2\n\ndef other(:\n", True),
        ("    return helper(3.14159 * r)\n", True),
        ("    return 3 * r\n", False),
        ("Here it is:\n```python\nimport math\ndef area(r):\n    return math.pi * r * r\n```\nDone.", True),
        ("```python\ndef area(r):\n    return helper(math.pi) * r\n```", True),  # what the task imports is there
        ("```\nx = 1\n```\nand\n```py\ndef area(r):\n    return 3.14159\n```", True),
        ("```python\ndef area(r):\n    return 3.14159", True),  # cut by the length
        ("```python\n    return 3.14159\n```", True),
        ("def area(r):\n    return 3.14159\n", True),
        ("I would compute it.", False),
        ("", False),
    ],
)
def test_programs_of_functions(output: str, right: bool) -> None:
    assert passes(FUNCTION, output) is right


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ("def add(a, b):\n    return a + b + offset\n", True),
        ("```python\ndef add(a, b):\n    return a + b\n```\nIt adds.", True),
        ("def add(a, b):\n    return a + b\nassert add(1, 1) == 3\n", True),  # a wrong test of its own is cut off
        ("def add(a, b):\n    return a + b\n[DONE]\nmore", True),
        ("def add(a, b):\n    return a - b\n", False),
        ("def plus(a, b):\n    return a + b\n", False),
    ],
)
def test_programs_of_snippets(output: str, right: bool) -> None:
    assert passes(SNIPPET, output) is right
