"""A measurement from its first record to its last picture, whatever happens in between."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.config.sections import bootstrap_of, in_sweep, plain_whole
from experiments.contenders.base import OtherEngine
from experiments.measuring.conditions import recordings_of
from experiments.measuring.measure import Contender
from experiments.measuring.meters import process_bytes
from experiments.reporting import run_tables, terminal
from experiments.reporting.progress import Progress
from experiments.reporting.table import Table
from experiments.reporting.verdicts import print_verdicts, sentence
from experiments.results.frame import frame_of
from experiments.results.limits import Terms
from experiments.results.manifest import MANIFEST, note_in_manifest
from experiments.results.origin import read_manifest
from experiments.results.records import RECORDS, Record, begin_records, keep_record
from experiments.results.runs import Run
from experiments.results.summary import summarize
from experiments.session.engines import peaks_of
from experiments.session.policies import keep_calibrations
from experiments.tracing.trace import FOLDER, shards
from experiments.tracking.mirror import Mirror
from specdec.engine.engine import Engine

TABLES = "tables.txt"
"""What a run shows at its end, in its folder."""

Plot = Callable[[Run, Path, str], Path | None]
Tables = Sequence[Table | None]
"""Tables, and None for those that would say nothing."""
Shown = tuple[Tables, Sequence[Path]]
"""Tables, and files that were written."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A measurement at its end, for studies of it; the first contender is the baseline."""

    run: Run
    records: Sequence[Record]
    contenders: Sequence[Contender]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The tables, pictures and studies that a measurement ends with."""

    tables: Callable[[Run, str], Tables]
    plots: Mapping[str, Plot]
    studies: Sequence[Callable[[Ended], Shown]] = ()


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measurement: takes records as they come, and writes and shows everything at its end.

    Attributes:
        title: Title of the tables, and the second line of the pictures' titles.
        held: The bytes that the engines hold, by what they are for, and the program had before.
        before: Records of prompts that cannot run, which are written first.
        kept: Records that an earlier attempt left in the file; None if this run does not go on from one.
        passed: Prompts that the earlier attempt has done.
    """

    config: DictConfig
    facts: Mapping[str, Any]
    contenders: Sequence[Contender]
    report: Report
    title: str
    mirror: Mirror
    held: dict[str, int]
    kept: Sequence[Record] | None = None
    passed: int = 0

    @property
    def folder(self) -> Path:
        """Takes ``records.jsonl`` as the measurement goes, then ``summary.json`` and the pictures."""
        return Path(self.config.out)

    def run(self, work: Callable[[Callable[[Record], None]], Iterable[int]], steps: int) -> Run:
        """Do the work, and report what is finished also if it is interrupted or fails.

        Args:
            work: Given a function that takes records, does the measuring and yields how much of it is done.
            steps: The last number that ``work`` yields.

        Raises:
            ValueError: Every prompt failed with some method.
            NotLosslessError: An exact method's greedy outputs are not plain decoding's. All is written before.
        """
        records: list[Record] = []
        exit_code = 1
        path = self.folder / RECORDS
        begin_records(path, self.kept)
        records += self.kept or ()

        def write(record: Record) -> None:
            keep_record(path, record)
            records.append(record)

        try:
            with Progress(steps, passed=self.passed) as progress:
                for done in work(write):
                    progress.update(done)
                    self.mirror.progress(records, done, steps)
            exit_code = 0
        except KeyboardInterrupt:
            exit_code = 130
            raise
        finally:
            run = self._report(records, exit_code)
        check_finished(run)
        check_lossless(run)
        return run

    def _report(self, records: list[Record], exit_code: int) -> Run:
        peaks = self.facts["peaks"]
        if peaks is not None:  # the machine may have been busy for the moment that the first measurement took
            peaks = peaks_of(self.contenders[0].engine.target, peaks)
        outputs = frame_of(records, self.folder.as_posix())
        frame = summarize(
            outputs,
            planned=self.facts["planned"],
            series=self.facts["series"],
            bootstrap=bootstrap_of(self.config),
            terms=Terms.of(plain_whole(self.config)),
            compared_with=self.config.get("compared_with"),
            peaks=peaks,
        )
        others = {each.method: each.engine for each in self.contenders if isinstance(each.engine, OtherEngine)}
        noted: dict[str, Any] = {"contenders": {name: other.about for name, other in others.items()}, "peaks": peaks}
        noted["start_seconds"] = {name: other.start_seconds for name, other in others.items()}
        recordings = {c.method: recordings_of(c.engine) for c in self.contenders if isinstance(c.engine, Engine)}
        known = (self.folder / MANIFEST).exists()
        run = Run(self.folder, (read_manifest(self.folder) if known else {}) | noted, frame, outputs)
        title = self.title + beside(others.values())
        summary = run.write(title)
        if known:
            verdicts = {row["method"]: row["lossless"] for row in run.rows if row["lossless"] is not None}
            note_in_manifest(self.folder, lossless=verdicts, recordings=recordings, **noted)
        console = terminal.console(shown=not in_sweep())  # a sweep says a line, and the tables are in the folder
        written = [self.folder / RECORDS, summary, self.folder / TABLES]
        if any(row["finished"] for row in run.rows):
            more, files = self._closing(run, records)
            written += files
            tables = [*self.report.tables(run, title), run_tables.utilization_table(run), *more]
            terminal.show(console, *tables, stacked=False)
            for name, plot in self.report.plots.items():
                path = plot(run, self.folder / name, title)
                written += [path] if path is not None else []
        run_tables.print_troubles(console, run)
        for warning in run_tables.not_recorded(recordings):
            console.print(f"WARNING: {warning}", style="yellow", highlight=False, markup=False)
        terminal.list_written(console, written)
        print_verdicts(console, run)
        (self.folder / TABLES).write_text(console.export_text(), encoding="utf-8")
        self.mirror.results(run.rows, records, [self.folder / MANIFEST, *written], shards(self.folder / FOLDER))
        self.mirror.finish(exit_code or int(bool(run.not_lossless)))
        return run

    def _closing(self, run: Run, records: Sequence[Record]) -> Shown:
        """More tables for the end, and the files of what policies have learned."""
        engines = {each.method: each.engine for each in self.contenders[1:] if isinstance(each.engine, Engine)}
        files: Sequence[Path] = keep_calibrations(engines, self.folder)
        tables: Tables = [run_tables.memory_table(self.held | process_bytes())]
        ended = Ended(run=run, records=records, contenders=self.contenders)
        for study in self.report.studies:
            more, written = study(ended)
            tables, files = [*tables, *more], [*files, *written]
        return tables, files


def beside(others: Iterable[OtherEngine]) -> str:
    """The versions of other engines, behind the conditions of a run, and that their start is not counted."""
    starts = [other.start_seconds for other in others if other.start_seconds is not None]
    said = list(dict.fromkeys(other.about for other in others if other.about))
    said += [f"their start ({sum(starts):.0f} s) is not counted"] if starts else []
    return "".join(f"; {each}" for each in said)


def check_finished(run: Run) -> None:
    """Refuse a run of which nothing came."""
    for row in run.rows:
        if not row["finished"]:
            raise ValueError(f"every prompt failed with {row['method']}: {next(iter(run_tables.errors_of(run, row)))}")


class NotLosslessError(ValueError):
    """A method whose rule is exact has emitted other greedy outputs than plain decoding, and no tie explains it."""


def check_lossless(run: Run) -> None:
    """End a run with an error where a method is not lossless, after its results were written."""
    bad = [sentence(row["method"], row, run) for row in run.rows if row["not_lossless"]]
    if bad:
        raise NotLosslessError("; ".join(bad))
