"""A measurement from its first record to its last picture, whatever happens in between."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from experiments.reporting import terminal
from experiments.reporting.device import above_roof, utilization_table
from experiments.reporting.progress import Every, PromptProgress
from experiments.reporting.requests import warnings_of
from experiments.reporting.run_tables import print_divergences, print_failures, print_noise
from experiments.reporting.table import Table
from experiments.reporting.verdicts import print_verdicts, sentence
from experiments.results.limits import Terms
from experiments.results.manifest import MANIFEST, note_in_manifest
from experiments.results.plain_json import json_text
from experiments.results.records import RECORDS, Record, RecordWriter, replace_records
from experiments.results.runs import SUMMARY
from experiments.results.statistics import Bootstrap
from experiments.results.summary import Summary, summarize
from experiments.tracing.trace import FOLDER, shards
from experiments.tracking.mirror import Mirror

TABLES = "tables.txt"
"""What a run shows at its end, in its folder."""

Plot = Callable[[Summary, Path, str], Path | None]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measurement: takes records as they come, and writes and shows everything at its end.

    Attributes:
        folder: Takes ``records.jsonl`` as it goes, then ``summary.json`` and the pictures.
        planned: Records that every method is to have at every temperature.
        series: Methods times temperatures: each method at one temperature is a series of records.
        bootstrap: Settings of the intervals.
        mirror: Mirrors the results to a tracker.
        tables: Makes the tables.
        title: Title of the tables, and the second line of the pictures' titles.
        plots: Functions that draw the pictures, by file name.
        compared_with: The method that all others are compared with, besides plain decoding; None for none.
        terms: Limits on latencies, and a price.
        before: Records of prompts that cannot run, which are written first.
        kept: Records that an earlier attempt left in the file; None if this run does not go on from one.
        passed: Prompts that the earlier attempt has done.
        progress_every: How often a line of progress is written where there is no terminal.
        closing: More tables for the end, made of the summary and the records; what it writes beside them may be listed.
        peaks: What the device does at best, by name; None where it was not measured.
        peaks_again: Measures that again at the end and returns the better of both: the machine may have been busy for
            the moment that the first measurement took. None where ``peaks`` is.
        quiet: Show nothing at the end: the tables are in the folder, and the sweep says a line.
    """

    folder: Path
    planned: int
    series: int
    bootstrap: Bootstrap
    mirror: Mirror
    tables: Callable[[Summary, str], Sequence[Table]]
    title: str
    plots: dict[str, Plot]
    compared_with: str | None = None
    before: Sequence[Record] = field(default_factory=tuple)
    terms: Terms | None = None
    kept: Sequence[Record] | None = None
    passed: int = 0
    progress_every: Every | None = None
    closing: Callable[[Summary, Sequence[Record]], tuple[Sequence[Table], Sequence[Path]]] | None = None
    peaks: Mapping[str, float] | None = None
    peaks_again: Callable[[], Mapping[str, float]] | None = None
    quiet: bool = False

    def run(self, work: Callable[[Callable[[Record], None]], Iterable[int]], steps: int) -> Summary:
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
                with PromptProgress(steps, passed=self.passed, every=self.progress_every) as progress:
                    for done in work(write):
                        progress.update(done)
                        self.mirror.progress(records, done, steps)
                exit_code = 0
            except KeyboardInterrupt:
                exit_code = 130
                raise
            finally:
                summary = self._report(records, exit_code)
        check_finished(summary)
        check_lossless(summary)
        return summary

    def _report(self, records: list[Record], exit_code: int) -> Summary:
        peaks = self.peaks if self.peaks_again is None else self.peaks_again()
        summary = summarize(
            records,
            planned=self.planned,
            series=self.series,
            bootstrap=self.bootstrap,
            terms=self.terms,
            compared_with=self.compared_with,
            peaks=peaks,
        )
        text = json_text({"title": self.title, **asdict(summary)})
        (self.folder / SUMMARY).write_text(text, encoding="utf-8")
        if (self.folder / MANIFEST).exists():
            verdicts = {m.method: asdict(m.lossless) for m in summary.methods if m.lossless is not None}
            note_in_manifest(self.folder, lossless=verdicts, peaks=peaks)
        console = terminal.console(shown=not self.quiet)
        written = [self.folder / RECORDS, self.folder / SUMMARY, self.folder / TABLES]
        if any(method.finished for method in summary.methods):
            more, files = ((), ()) if self.closing is None else self.closing(summary, records)
            written += files
            used = utilization_table(summary)
            for table in [*self.tables(summary, self.title), *([used] if used is not None else []), *more]:
                console.print(terminal.render(table))
            for name, plot in self.plots.items():
                path = plot(summary, self.folder / name, self.title)
                written += [path] if path is not None else []
        print_divergences(console, summary)
        print_failures(console, summary)
        terminal.say(console, *warnings_of(summary))
        print_noise(console, summary)
        for warning in above_roof(summary):
            console.print(f"WARNING: {warning}", style="yellow", highlight=False, markup=False)
        terminal.list_written(console, written)
        print_verdicts(console, summary)
        (self.folder / TABLES).write_text(console.export_text(), encoding="utf-8")
        self.mirror.results(summary, records, [self.folder / MANIFEST, *written], shards(self.folder / FOLDER))
        self.mirror.finish(exit_code or int(bool(summary.not_lossless)))
        return summary


def check_finished(summary: Summary) -> None:
    """Refuse a run of which nothing came.

    Raises:
        ValueError: Every prompt failed with some method.
    """
    for method in summary.methods:
        if not method.finished:
            raise ValueError(f"every prompt failed with {method.method}: {next(iter(method.errors))}")


class NotLosslessError(ValueError):
    """A method whose rule is exact has emitted other greedy outputs than plain decoding, and no tie explains it."""


def check_lossless(summary: Summary) -> None:
    """End a run with an error where a method is not lossless, after its results were written.

    Raises:
        NotLosslessError: Names the methods, with the evidence.
    """
    bad = [sentence(m.method, m.lossless) for m in summary.methods if m.lossless is not None and m.not_lossless]
    if bad:
        raise NotLosslessError("; ".join(bad))
