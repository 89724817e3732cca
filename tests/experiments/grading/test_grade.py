"""Grading the records of a run: which are graded, what runs, and what the report says about it."""

from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

import pytest

from experiments.grading import grade as grading
from experiments.grading.grade import Graded, grade
from experiments.grading.references import Number, Reference, Snippet
from experiments.grading.sandbox import Limits, Outcome
from experiments.reporting.accuracy import GradedRun, remarks
from experiments.results.records import Record

REFERENCES: dict[str, Reference] = {"n": Number(Decimal(7)), "s": Snippet("", ("assert x == 1",))}


def record(prompt: str, text: str, *, method: str = "plain", sample: int = 0, failed: bool = False) -> Record:
    return Record(
        prompt=prompt,
        method=method,
        sample=sample,
        temperature=0.0,
        batch=0,
        prompt_tokens=1,
        text=text,
        finish_reason="error" if failed else "stop",
        error="it broke" if failed else None,
    )


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that ran; every one of them "passes" that has x = 1 in it, and the first had the network."""
    programs: list[str] = []

    def run_all(given: Sequence[str], limits: Limits, workers: int) -> Iterator[Outcome]:
        programs.extend(given)
        for number, program in enumerate(given):
            yield Outcome("x = 1" in program, None if "x = 1" in program else "AssertionError:", number > 0)

    monkeypatch.setattr(grading, "run_all", run_all)
    return programs


def graded(records: list[Record], *, execute: bool = True) -> Graded:
    return grade(records, REFERENCES, execute=execute, limits=Limits(), workers=1)


def test_equal_outputs_run_once_and_get_equal_grades(ran: list[str]) -> None:
    found = graded(
        [record("s", "x = 1"), record("s", "x = 1", method="model"), record("s", "x = 2", method="model", sample=1)]
    )
    assert len(ran) == found.programs == 2
    assert [(each.method, each.sample, each.correct, each.why) for each in found.grades] == [
        ("plain", 0, True, None),
        ("model", 0, True, None),
        ("model", 1, False, "AssertionError:"),
    ]


def test_only_what_has_a_reference_is_graded_and_failures_are_neither_right_nor_wrong(ran: list[str]) -> None:
    found = graded([record("n", "7.0"), record("n", "8"), record("poem", "7"), record("s", "x = 1", failed=True)])
    assert [(each.prompt, each.correct, each.why) for each in found.grades] == [
        ("n", True, None),
        ("n", False, "found 8, expected 7"),
        ("s", None, "it broke"),
    ]
    assert ran == []
    assert found.no_network is None


def test_nothing_runs_without_permission(ran: list[str]) -> None:
    found = graded([record("n", "7"), record("s", "x = 1"), record("s", "x = 2")], execute=False)
    assert (len(found.grades), found.not_executed, ran) == (1, 2, [])


def test_the_report_says_when_programs_had_the_network(ran: list[str]) -> None:
    with_network = graded([record("s", "x = 1"), record("s", "x = 2")])
    assert with_network.no_network is False
    (note,) = remarks([GradedRun(Path("run"), (), with_network, ())])
    assert note == "This system does not let a process give up the network: the programs could have used it."
    assert remarks([GradedRun(Path("run"), (), graded([record("n", "7")]), ())]) == []
