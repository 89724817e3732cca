"""A study: the runs of a sweep as one frame, shown by columns, panels and sentences that a specification lists."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.reporting import style
from experiments.reporting.columns import conditions_of
from experiments.reporting.formats import document, publish
from experiments.reporting.style import Panel as Panel
from experiments.reporting.table import Col, Table
from experiments.reporting.verdicts import warning
from experiments.results.comparison import distinguishing
from experiments.results.frame import Frame
from experiments.results.records import PLAIN
from experiments.results.rows import RUNS, rows_of, typed
from experiments.results.runs import Run

SERIES = ["temperature", "name"]
"""A line of a picture and a section of a table: the method with the settings in which its run differs from others."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """The report of a sweep over ``x``.

    Attributes:
        name: Of its files.
        give: What to sweep over, said where a series has fewer than two values of ``x``.
        derive: Adds columns, given the frame and the runs by their names in the column ``run``.
        sentences: What the frame shows in words.
        plain: Plain decoding is a series of its own.
        facts: What the notes say of the runs besides target, dtype and device.
    """

    name: str
    title: str
    x: str
    give: str
    columns: Sequence[Col]
    panels: Sequence[Panel]
    derive: Callable[[Frame, Mapping[str, Run]], Frame] = lambda frame, runs: frame
    sentences: Callable[[Frame], list[str]] = lambda frame: []
    notes: Sequence[str] = ()
    facts: Sequence[Callable[[Run], str]] = ()
    plain: bool = True

    def __call__(self, runs: Sequence[Run], folder: Path, missing: Sequence[str] = ()) -> Frame:
        """Print the table and the sentences, write them with the figures and the picture, and return the frame.

        Raises:
            ValueError: No method was run at two values of ``x``.
        """
        frame = self.frame(runs)
        about, sentences = conditions_of(runs, *self.facts), self.sentences(frame)
        rows = rows_of(frame)
        notes = [*missing, *about, *self.notes, f"brackets: {rows[0]['confidence']:.0%} intervals over prompts"]
        table = Table.of(
            rows, self.columns, title=self.title, notes=notes, section=lambda row: [row[name] for name in SERIES]
        )
        publish(
            folder,
            self.name,
            tables=[table],
            document=document(f"{'; '.join(notes)}.", table, sentences),
            figures={"rows": [{name: value for name, value in row.items() if value is not None} for row in rows]},
            said=sentences,
            drawn=lambda: [self.draw(frame, folder / f"{self.name}.png", "; ".join(about))],
        )
        return frame

    def frame(self, runs: Sequence[Run]) -> Frame:
        """The rows of all runs with a name for each series, sorted, and the derived columns."""
        rows, setting = [], self.x.removeprefix("config.")
        for run, given in zip(runs, distinguishing([run.manifest for run in runs]), strict=True) if runs else ():
            for row in run.described:
                if row["method"] == PLAIN and not self.plain:
                    continue
                said = (f"drafter={row['method']}", f"{setting}=", "sampling.temperature=")
                others = [part for part in given if part != said[0] and not part.startswith(said[1:])]
                name = row["label"] if row["method"] == PLAIN else ", ".join([row["label"], *others])
                rows.append(row | {"name": name})
        frame = typed(rows, {"name": "string", **RUNS})
        if self.x in frame:
            frame = frame[frame[self.x].notna()]
            # Where several runs have one value of x, each has measured plain decoding: the first one's is taken.
            frame = frame.drop_duplicates([*SERIES, self.x])
            frame = frame[frame.groupby(SERIES)[self.x].transform("nunique") > 1]
        if self.x not in frame or frame.empty:
            raise ValueError(f"{self.name} needs runs of a method at two values of {setting} or more: give {self.give}")
        last = frame.method != PLAIN
        frame = frame.assign(drafts=last).sort_values(["temperature", "drafts", "name", self.x]).drop(columns="drafts")
        return self.derive(frame.reset_index(drop=True), {run.folder.as_posix(): run for run in runs})

    def draw(self, frame: Frame, path: Path, subtitle: str) -> Path:
        """Draw the panels side by side, with one legend below."""
        several = frame.temperature.nunique() > 1
        series = {
            f"{name}, T={temperature:g}" if several else str(name): rows_of(own)
            for (temperature, name), own in frame.groupby(SERIES, sort=False)
        }
        alarm = warning(list(dict.fromkeys(frame.label[frame.not_lossless.fillna(False)])))
        return style.lines(path, self.panels, series, about=self.title, subtitle=subtitle, alarm=alarm)
