"""A measurement from its first record to its last picture, whatever happens in between."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import Progress

from experiments.records import RECORDS, Record, RecordWriter, replace_records
from experiments.report import print_divergences, print_failures
from experiments.results import SUMMARY
from experiments.summary import Bootstrap, MethodSummary, Summary, summarize
from experiments.tracking import Tracker
from specdec import metrics

PIPE_WIDTH = 120

Plot = Callable[[Summary, Path, str], Path | None]


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a measurement is told, and what it leaves behind.

    Attributes:
        folder: Takes ``records.jsonl`` as it goes, then ``summary.json`` and the pictures.
        planned: Records that every method is to have at every temperature.
        groups: Methods times temperatures.
        bootstrap: Settings of the intervals.
        tracker: A mirror.
        table: Makes the table.
        title: Of the table, and under those of the pictures.
        plots: Pictures, by file name.
        before: Records that exist already: of prompts that cannot run.
        kept: Those that an earlier attempt has left in the file, if this one goes on from it.
    """

    folder: Path
    planned: int
    groups: int
    bootstrap: Bootstrap
    tracker: Tracker
    table: Callable[[Summary, str], RenderableType]
    title: str
    plots: dict[str, Plot]
    before: Sequence[Record] = field(default_factory=tuple)
    kept: Sequence[Record] | None = None

    def run(self, work: Callable[[Callable[[Record], None]], Iterable[int]], steps: int) -> Summary:
        """Do the work, and report what is finished also if it is interrupted or fails.

        Args:
            work: Given a function that takes records, does the measuring and yields how much of it is done.
            steps: What ``work`` yields at its end.

        Raises:
            ValueError: Every prompt failed with some method.
        """
        records: list[Record] = []
        exit_code = 1
        path = self.folder / RECORDS
        if self.kept is not None:
            records += [*self.before, *self.kept]
            replace_records(path, records)
        with RecordWriter(path, append=self.kept is not None) as writer:

            def write(record: Record) -> None:
                writer.write(record)
                records.append(record)

            for record in self.before if self.kept is None else ():
                write(record)
            try:
                screen = Console(stderr=True)
                with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
                    bar = progress.add_task("prompts", total=steps)
                    for done in work(write):
                        progress.update(bar, completed=done)
                exit_code = 0
            except KeyboardInterrupt:
                exit_code = 130
                raise
            finally:
                summary = self._report(records, exit_code)
        check(summary)
        return summary

    def _report(self, records: list[Record], exit_code: int) -> Summary:
        summary = summarize(records, planned=self.planned, groups=self.groups, bootstrap=self.bootstrap)
        text = json.dumps({"title": self.title, **asdict(summary)}, indent=2, ensure_ascii=False)
        (self.folder / SUMMARY).write_text(text + "\n", encoding="utf-8")
        console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
        written = [self.folder / RECORDS, self.folder / SUMMARY]
        if any(method.finished for method in summary.methods):
            console.print(self.table(summary, self.title))
            for name, plot in self.plots.items():
                path = plot(summary, self.folder / name, self.title)
                written += [path] if path is not None else []
        print_divergences(console, summary)
        print_failures(console, summary)
        text = "\n".join(["wrote", *(f"  {short(path)}" for path in written)])
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        self.tracker.summary(figures(summary))
        self.tracker.table("prompts", *prompt_table(records))
        self.tracker.finish(exit_code)
        return summary


def check(summary: Summary) -> None:
    """Refuse a run of which nothing came.

    Raises:
        ValueError: Every prompt failed with some method.
    """
    for method in summary.methods:
        if not method.finished:
            raise ValueError(f"every prompt failed with {method.method}: {next(iter(method.errors))}")


def figures(summary: Summary) -> dict[str, float]:
    """All single numbers of a summary, by a name such as ``model/T=0/speedup``."""
    flat: dict[str, float] = {"complete": float(summary.complete), "planned": summary.planned}
    for method in summary.methods:
        prefix = f"{method.method}/T={method.temperature:g}"
        flat |= {f"{prefix}/{name}": value for name, value in _numbers(method).items()}
    return flat


def _numbers(method: MethodSummary) -> dict[str, float]:
    flat: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}/{key}", inner)
        elif isinstance(value, tuple | list):
            names = ("low", "high") if name.endswith("_interval") else [str(i + 1) for i in range(len(value))]
            for key, inner in zip(names, value, strict=True):
                add(f"{name}/{key}", inner)
        elif isinstance(value, int | float):
            flat[name] = value

    for name, value in asdict(method).items():
        if name not in ("errors", "divergences"):
            add(name, value)
    return flat


def prompt_table(records: Sequence[Record]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a table with one row per record."""
    columns = ["prompt", "turn", "category", "sample", "method", "exactness", "temperature"]
    columns += ["prompt_tokens", "tokens", "batch_seconds", "rounds", "mean_acceptance_length"]
    columns += ["finish_reason", "equals_plain", "divergence", "margin", "error", "text"]
    rows = [
        [
            *(record.prompt, record.turn, record.category, record.sample),
            *(record.method, record.exactness, record.temperature),
            *(record.prompt_tokens, len(record.token_ids), record.seconds),
            *(len(record.accepted), metrics.mean_acceptance_length(record.steps()), record.finish_reason),
            *(record.equals_plain, record.divergence, record.margin, record.error, record.text),
        ]
        for record in records
    ]
    return columns, rows


def short(path: Path) -> str:
    """As seen from here, where it is below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
