"""Pictures across runs."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import MaxNLocator, PercentFormatter

from experiments.reporting import style
from experiments.reporting.dots import length_and_speedup
from experiments.reporting.verdicts import warning
from experiments.results.comparison import Row

_LINES = ("-", "--", ":")


@style.styled()
def comparison_plot(rows: Sequence[Row], path: Path, subtitle: str) -> Path | None:
    """Mean acceptance length and speedup with their intervals, a line per method and settings; None without any."""
    if not rows:
        return None
    confidence = rows[0].run.summary.confidence
    return length_and_speedup(
        [(", ".join(row.name), row.method) for row in rows],
        path,
        f"Acceptance and speed over plain decoding, with {confidence:.0%} intervals",
        subtitle,
        alarm=_alarm(rows),
    )


@style.styled()
def acceptance_lines(rows: Sequence[Row], path: Path, subtitle: str) -> Path | None:
    """Acceptance by draft position, a panel per temperature and a line per method and settings; None without drafts."""
    rows = [row for row in rows if row.method.acceptance_by_position.rounds]
    if not rows:
        return None
    names = list(dict.fromkeys(row.name for row in rows))
    temperatures = sorted({row.method.temperature for row in rows})
    across = min(2, len(temperatures))
    down = -(-len(temperatures) // across)
    figure = style.new_figure(
        style.PAGE if across > 1 else style.COLUMN, 0.8 + 2.2 * down + 0.13 * -(-len(names) // across)
    )
    panels = figure.subplots(down, across, sharey=True, sharex=True, squeeze=False)
    for panel in panels.flat[len(temperatures) :]:
        panel.set_visible(False)
    handles = {}
    for panel, temperature in zip(panels.flat, temperatures, strict=False):
        for row in rows:
            if row.method.temperature != temperature:
                continue
            index = names.index(row.name)
            values = row.method.acceptance_by_position.unconditional
            (handles[row.name],) = panel.plot(
                range(1, len(values) + 1),
                values,
                color=style.color(index),
                marker=style.marker(index),
                linestyle=_LINES[index // len(style.COLORS) % len(_LINES)],
            )
        panel.set_title(f"temperature {temperature:g}")
        panel.set_xlabel("position in the draft")
        panel.set_ylim(0, 1.04)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.grid()
    for panel in panels[:, 0]:
        panel.set_ylabel("rounds that accepted so far,\nof those that drafted so far")
    listed = [name for name in names if name in handles]
    style.legend(figure, [handles[name] for name in listed], [", ".join(name) for name in listed])
    style.title(figure, "Acceptance by position in the draft (1 = first drafted token)", subtitle, alarm=_alarm(rows))
    return style.save(figure, path)


def _alarm(rows: Sequence[Row]) -> str:
    return warning([", ".join(row.name) for row in rows if row.method.not_lossless])
