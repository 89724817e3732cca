"""Grades the outputs of a run: is each one's answer right?"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from experiments.grading.numbers import final_number
from experiments.grading.programs import program_of
from experiments.grading.references import Number, Reference
from experiments.grading.sandbox import Limits, Outcome, run_all
from experiments.results.records import Record


@dataclass(frozen=True, kw_only=True)
class Grade:
    """One output, graded.

    Attributes:
        task: The benchmark: gsm8k, humaneval or mbpp.
        prompt: Id of the prompt.
        sample: Number of the sample.
        method: Name of the method.
        exactness: What its rule promises.
        temperature: The request's temperature.
        correct: The answer is right; None where the decoding failed, so that there is none.
        why: What was found instead, or how the program failed.
    """

    task: str
    prompt: str
    sample: int
    method: str
    exactness: str | None
    temperature: float
    correct: bool | None
    why: str | None = None


@dataclass(frozen=True)
class Graded:
    """Grades, and what is to be said about how they came about.

    Attributes:
        grades: One for every output that has a reference and was graded.
        not_executed: Outputs whose programs were not run, because nobody allowed it.
        programs: How many different programs ran.
        no_network: They all ran without network; None if none ran.
    """

    grades: list[Grade]
    not_executed: int
    programs: int
    no_network: bool | None


def grade(
    records: Iterable[Record],
    references: Mapping[str, Reference],
    *,
    execute: bool,
    limits: Limits,
    workers: int,
) -> Graded:
    """Grade all outputs that have a reference.

    Every program runs once, however many outputs are equal: so equal outputs get equal grades, however slow the machine
    is at the moment.

    Args:
        records: Outputs.
        references: Right answers, by prompt id.
        execute: Run programs.
        limits: What each may use.
        workers: How many run at a time.

    Raises:
        ValueError: This system cannot limit what a program does.
    """
    known = [record for record in records if record.prompt in references]
    programs: dict[str, None] = {}
    if execute:
        programs = dict.fromkeys(
            program_of(reference, record.text)
            for record in known
            if not record.failed and not isinstance(reference := references[record.prompt], Number)
        )
    screen = Console(stderr=True)
    shown = track(
        run_all(list(programs), limits, workers),
        "programs",
        total=len(programs),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    )
    outcomes = dict(zip(programs, shown, strict=True))
    grades: list[Grade] = []
    not_executed = 0
    for record in known:
        reference = references[record.prompt]
        if record.failed:
            correct, why = None, record.error
        elif isinstance(reference, Number):
            found = final_number(record.text)
            correct = found == reference.value
            why = None if correct else f"found {found}, expected {reference.value}"
        elif execute:
            outcome = outcomes[program_of(reference, record.text)]
            correct, why = outcome.passed, outcome.error
        else:
            not_executed += 1
            continue
        grades.append(
            Grade(
                task=reference.task,
                prompt=record.prompt,
                sample=record.sample,
                method=record.method,
                exactness=record.exactness,
                temperature=record.temperature,
                correct=correct,
                why=why,
            )
        )
    return Graded(grades, not_executed, len(outcomes), _no_network(list(outcomes.values())))


def _no_network(outcomes: Sequence[Outcome]) -> bool | None:
    known = [outcome.no_network for outcome in outcomes if outcome.no_network is not None]
    return all(known) if known else None


def write_grades(path: Path, graded: Mapping[str, Sequence[Grade]]) -> None:
    """Write the grades of runs, by the run's name, as JSON lines."""
    lines = [{"run": run, **asdict(each)} for run, grades in graded.items() for each in grades]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
