"""The report of a grading: its table, its remarks, and the files that it leaves."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.grading.accuracy import Accuracy
from experiments.grading.grade import Graded, write_grades
from experiments.reporting import markdown, terminal
from experiments.reporting.cells import NOTHING, lossiness
from experiments.reporting.formats import USUAL, write_formats
from experiments.reporting.table import Cell, Column, Table
from experiments.results.statistics import Interval

if TYPE_CHECKING:
    import pandas

NAMES = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mbpp": "MBPP"}


@dataclass(frozen=True)
class GradedRun:
    """A run with the accuracy of its methods.

    Attributes:
        folder: The run's.
        settings: In which it differs from the others.
        graded: The grades.
        accuracies: What follows from them.
    """

    folder: Path
    settings: Sequence[str]
    graded: Graded
    accuracies: Sequence[Accuracy]


def report_accuracy(
    runs: Sequence[GradedRun], out: Path, *, confidence: float, formats: Sequence[str] = USUAL, title: str = ""
) -> None:
    """Print and write the accuracy of runs.

    Args:
        runs: The runs.
        out: Folder for ``accuracy.json``, ``grades.jsonl`` and the table.
        confidence: Level of the intervals.
        formats: How the table is written.
        title: Title of the table.
    """
    notes = remarks(runs)
    table = accuracy_table(runs, title, confidence)
    console = terminal.console()
    console.print(terminal.render(table, terminal.Frame.NARROW))
    terminal.say(console, *notes)
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        {"run": run.folder.as_posix(), "settings": " ".join(run.settings), **asdict(each)}
        for run in runs
        for each in run.accuracies
    ]
    contents = {"title": title, "confidence": confidence, "notes": notes, "rows": rows}
    (out / "accuracy.json").write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_grades(out / "grades.jsonl", {run.folder.as_posix(): run.graded.grades for run in runs})
    table.notes = [*table.notes, *notes]
    text = "\n".join([markdown.render(table), *(f"- {note}" for note in table.notes)]) + "\n"
    written = write_formats(formats, out, "accuracy", document=text, table=table, figures=lambda: _figures(rows))
    terminal.list_written(console, [*written, out / "accuracy.json", out / "grades.jsonl"])


def accuracy_table(runs: Sequence[GradedRun], title: str, confidence: float) -> Table:
    """A row per benchmark, temperature, method and k of every run."""
    columns = (
        Column("benchmark", "left"),
        Column("T"),
        Column("method and settings", "left", fold=True, min_width=18),
        Column("prompts;\nsamples"),
        Column("k"),
        Column("pass@k"),
        Column("difference\nfrom plain"),
        Column("better;\nworse"),
    )
    notes = [f"intervals at {confidence:.0%}, over prompts", "the difference is paired: in percentage points"]
    table = Table(columns, title, notes)
    listed = [(run, each) for run in runs for each in run.accuracies]
    listed.sort(key=lambda item: (item[1].task, item[1].temperature))
    for number, (run, each) in enumerate(listed):
        following = listed[number + 1][1] if number + 1 < len(listed) else None
        settings = [text for text in run.settings if text != f"drafter={each.method}"]
        table.add(
            NAMES.get(each.task, each.task),
            f"{each.temperature:g}",
            Cell(each.label, settings, joint=", ", emphasis=lossiness(each.exactness)),
            f"{each.prompts}; {each.samples}",
            f"{each.k}",
            _share(each.accuracy, each.interval, sign=""),
            Cell(NOTHING) if each.difference is None else _share(each.difference, each.difference_interval, sign="+"),
            NOTHING if each.better is None else f"{each.better}; {each.worse}",
            end_section=following is None or (following.task, following.temperature) != (each.task, each.temperature),
        )
    return table


def remarks(runs: Sequence[GradedRun]) -> list[str]:
    """Sentences that a reader of the table needs."""
    notes = []
    waiting = sum(run.graded.not_executed for run in runs)
    if waiting:
        notes.append(f"{waiting} outputs are programs, and were not graded: {EXECUTE}")
    if any(run.graded.no_network is False for run in runs):
        notes.append("This system does not let a process give up the network: the programs could have used it.")
    failed = max((each.left_out for run in runs for each in run.accuracies), default=0)
    if failed:
        notes.append(f"Up to {failed} prompts are left out of a row, because a decoding of them failed or never ended.")
    return notes


EXECUTE = (
    "execute=true runs what the model wrote, each program in a process with limits on time, memory and files, "
    "and without network where the system permits"
)


def _share(value: float, bounds: Interval | None, *, sign: str) -> Cell:
    unit = "" if sign else "%"
    more = () if bounds is None else (f"[{100 * bounds[0]:{sign}.1f}, {100 * bounds[1]:{sign}.1f}]",)
    return Cell(f"{100 * value:{sign}.1f}{unit}", more)


def _figures(rows: Sequence[Mapping[str, Any]]) -> "pandas.DataFrame":
    import pandas  # when asked for: it takes a while

    flat = []
    for row in rows:
        single = {name: value for name, value in row.items() if not name.endswith("interval")}
        for name in ("interval", "difference_interval"):
            low, high = row[name] or (None, None)
            prefix = "difference" if name.startswith("difference") else "accuracy"
            single |= {f"{prefix}_low": low, f"{prefix}_high": high}
        flat.append(single)
    return pandas.DataFrame(flat)
