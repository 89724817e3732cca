"""A study: the runs of a sweep as one frame, shown by columns, panels and sentences that a specification lists."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.reporting import style
from experiments.reporting.columns import Col
from experiments.reporting.comparison import conditions_of
from experiments.reporting.formats import document, publish
from experiments.reporting.table import Cell, Column, Table
from experiments.reporting.verdicts import warning
from experiments.results.comparison import distinguishing
from experiments.results.data import described
from experiments.results.frame import Frame
from experiments.results.records import PLAIN
from experiments.results.rows import RUNS, Row, interval, rows_of, typed
from experiments.results.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES = ["temperature", "name"]
"""A line of a picture and a section of a table: the method with the settings in which its run differs from others."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of a picture: a line per series over ``x``, with intervals where the frame has them.

    Attributes:
        y: One column, or several in different strokes.
        labels: Those of the axes.
        scale: Factors of x and y.
        at: A value of y to compare with: plain decoding's.
        log: The axis of x has a logarithmic scale with the values that occur.
        beside: A column whose values stand beside the points.
        ring: A column of texts; points that have one are ringed.
    """

    x: str
    y: str | Sequence[str]
    labels: tuple[str, str]
    scale: tuple[float, float] = (1.0, 1.0)
    at: float | None = None
    log: bool = False
    beside: str | None = None
    ring: str | None = None


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
    columns: Sequence[Col | tuple[Column | str, Callable[[Row], Cell | str]]]
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
            for row in described(run):
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

    @style.styled()
    def draw(self, frame: Frame, path: Path, subtitle: str) -> Path:
        """Draw the panels side by side, with one legend below."""
        figure = style.new_figure(style.PAGE, 3.5)
        axes = figure.subplots(1, len(self.panels), squeeze=False)[0]
        several = frame.temperature.nunique() > 1
        for index, ((temperature, name), own) in enumerate(frame.groupby(SERIES, sort=False)):
            label = style.wrapped(f"{name}, T={temperature:g}" if several else str(name), 40)
            for panel, place in zip(self.panels, axes, strict=True):
                self._line(place, panel, rows_of(own), index, label)
        for panel, place in zip(self.panels, axes, strict=True):
            if panel.at is not None:
                style.baseline(place)
            if panel.log:
                style.plain_log(place.xaxis, sorted(set(frame[panel.x])), base=2)
            place.set(xlabel=panel.labels[0], ylabel=panel.labels[1])
            place.margins(0.12)
            place.set_ylim(bottom=0)
        style.legend_of(figure, *axes)
        bad = list(dict.fromkeys(frame.label[frame.not_lossless.fillna(False)]))
        return style.finish(figure, path, self.title, subtitle, alarm=warning(bad))

    def _line(self, axes: "Axes", panel: Panel, rows: Sequence[Row], index: int, label: str) -> None:
        for name, stroke in zip([panel.y] if isinstance(panel.y, str) else panel.y, ("-", ":", "--"), strict=False):
            known = [row for row in rows if row.get(panel.x) is not None and row.get(name) is not None]
            points = [(panel.scale[0] * row[panel.x], row[name], interval(row, name)) for row in known]
            style.curve(axes, points, index, label, scale=panel.scale[1], linestyle=stroke)
            for row, (x, y, _) in zip(known, points, strict=True):
                at = (x, panel.scale[1] * y)
                if panel.beside is not None:
                    style.note(axes, f"{row[panel.beside]:g}", at, (-7, 6), color=style.color(index), bbox=None)
                if panel.ring is not None and row[panel.ring]:
                    looks = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "markeredgecolor": "black"}
                    axes.plot(*at, linestyle="none", label=row[panel.ring], **looks)
