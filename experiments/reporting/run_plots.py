"""Pictures of runs, readable without the code: titles, units, what a mark means, what the verifier promises."""

from collections.abc import Sequence
from pathlib import Path

from experiments.reporting import style
from experiments.reporting.columns import labels_of, rules_of
from experiments.reporting.run_tables import stage_milliseconds, stages_of
from experiments.reporting.style import Panel
from experiments.reporting.table import three_digits
from experiments.reporting.verdicts import warning
from experiments.results.records import PLAIN
from experiments.results.rows import Row, family, interval, positions
from experiments.results.runs import Run

STAGE_COLORS = {
    "ingestion": "#d55e00", "prefill": "#999999", "draft": "#e69f00", "verify": "#0072b2", "accept": "#009e73",
    "commit": "#cc79a7", "completion": "#56b4e9", "other": "#dddddd",
}  # fmt: skip
FIGURES = {
    "mean_acceptance_length": "mean acceptance length (tokens per target forward)",
    "speedup": "tokens/s over plain decoding's",
}
"""What is drawn of methods, with the label of its axis."""
Named = Sequence[tuple[str, Row]]
"""Rows of the frame, each under the name that a picture shows."""


@style.styled()
def length_and_speedup(
    named: Named, path: Path, text: str, subtitle: str, figures: Sequence[str] = tuple(FIGURES)
) -> Path | None:
    """Draw mean acceptance length and speedup, a line per name and a mark per temperature; None without any rounds."""
    drawn = [(name, row) for name, row in named if row["mean_acceptance_length"] is not None]
    names = list(dict.fromkeys(name for name, _ in drawn))
    series: dict[str, dict[int, Row]] = {}
    for name, row in sorted(drawn, key=lambda pair: pair[1]["temperature"]):
        series.setdefault(f"temperature {row['temperature']:g}", {})[names.index(name)] = row
    if not names:
        return None
    figure = style.new_figure(1.1 + (0.17 + 0.13 * len(series)) * len(names))
    panels = figure.subplots(1, len(figures), sharey=True, squeeze=False)[0]
    for axes, field in zip(panels, figures, strict=True):
        for index, (about, rows) in enumerate(series.items()):
            offset = 0.0 if len(series) == 1 else -0.3 + 0.6 * index / (len(series) - 1)
            known = {place + offset: row for place, row in rows.items() if row[field] is not None}
            values = [row[field] for row in known.values()]
            look = style.looks(index)
            axes.plot(values, list(known), label=about, linestyle="none", **look)
            for (y, row), value in zip(known.items(), values, strict=True):
                low, high = interval(row, field) or (value, value)
                axes.hlines(y, low, high, color=look["color"], linewidth=1.3)
                style.note(axes, three_digits(value), (max(value, high), y), color=look["color"])
        axes.axvline(1.0, color="black", label="plain decoding", **style.BASELINE)
        axes.set_xlabel(FIGURES[field])
        axes.margins(x=0.18)  # room for the last number
    style.name_rows(panels[0], names, 34)
    style.legend(figure, panels[0])
    title = f"{text}, with {drawn[0][1]['confidence']:.0%} intervals"
    return style.finish(figure, path, title, subtitle, alarm=alarm_of(named))


def alarm_of(named: Named) -> str:
    """The warning of a picture: which of its methods are not lossless."""
    return warning(list(dict.fromkeys(name for name, row in named if row["not_lossless"])))


def acceptance_lines(named: Named, path: Path, subtitle: str) -> Path | None:
    """Acceptance by draft position, a panel per temperature and a line per name; None if nothing was drafted."""
    named = [(name, row) for name, row in named if family(row, "rounds_at")]
    if not named:
        return None
    series: dict[str, list[Row]] = {}
    for name, row in named:
        points = series.setdefault(name, [])
        points += [{"position": at, f"T={row['temperature']:g}": share} for at, share in enumerate(positions(row), 1)]
    axes = ("position in the draft", "rounds that accepted so far,\nof those that drafted so far")
    panels = [
        Panel(x="position", y=f"T={t:g}", labels=axes, title=f"temperature {t:g}", shares=True)
        for t in sorted({row["temperature"] for _, row in named})
    ]
    about = "Acceptance by position in the draft"
    return style.lines(path, panels, series, about=about, subtitle=subtitle, alarm=alarm_of(named))


def conditions(subtitle: str, run: Run) -> str:
    """The second line of a title: the run's conditions, the kind of rule, and whether the run is complete."""
    notes = [subtitle, rules_of(run.rows), "" if run.complete else "INCOMPLETE RUN", "NOISY TIMINGS" * run.noisy]
    return "; ".join(note for note in notes if note)


def _named(run: Run) -> list[tuple[str, Row]]:
    return [(row["label"], row) for row in run.rows if row["method"] != PLAIN]


def acceptance_plot(run: Run, path: Path, subtitle: str) -> Path | None:
    """Acceptance by draft position; None if nothing was drafted."""
    return acceptance_lines(_named(run), path, conditions(subtitle, run))


def speedup_plot(run: Run, path: Path, subtitle: str) -> Path | None:
    """Mean acceptance length and speedup, a line per method; None if that is one mark."""
    compared = [(name, row) for name, row in _named(run) if row["speedup"] is not None]
    told = conditions(subtitle, run)
    return length_and_speedup(compared, path, "Speedup over plain decoding", told) if len(compared) > 1 else None


@style.styled()
def time_plot(run: Run, path: Path, subtitle: str) -> Path | None:
    """Wall time per emitted token by stage, a bar per method; None if stages were not timed."""
    timed = [row for row in run.rows if family(row, "stage_seconds") and row["tokens_per_second"]]
    if not timed:
        return None
    figure = style.new_figure(1.35 + 0.24 * len(timed))
    axes = figure.subplots()
    left = [0.0] * len(timed)
    for stage in stages_of(timed):
        values = [stage_milliseconds(row, stage) or 0.0 for row in timed]
        looks = {"color": STAGE_COLORS.get(stage, style.FAINT), "edgecolor": "white", "linewidth": 0.5}
        axes.barh(range(len(timed)), values, left=left, label=stage, **looks)
        left = [start + value for start, value in zip(left, values, strict=True)]
    for place, total in enumerate(left):
        style.note(axes, f"{total:.2f} ms", (total, place), (3, 0))
    style.name_rows(axes, labels_of(timed), 30)
    axes.set(xlim=(0, max(left) * 1.15), xlabel="wall time per emitted token (ms)")
    style.legend(figure, axes)
    alarm = alarm_of(_named(run))
    return style.finish(figure, path, "Where the time goes", conditions(subtitle, run), alarm=alarm)


RUN_PLOTS = {"speedup.png": speedup_plot, "acceptance_by_position.png": acceptance_plot, "time.png": time_plot}
"""The pictures of every run, by file name."""
