"""Results by category of the prompts, where a run has several."""

from pathlib import Path

from matplotlib.axes import Axes

from experiments.reporting import cells, style
from experiments.reporting.cells import number, times, with_interval
from experiments.reporting.run_plots import plot_title
from experiments.reporting.table import Column, Table
from experiments.results.records import PLAIN
from experiments.results.summary import MethodSummary, Summary


def shown(summary: Summary) -> list[str]:
    """Categories of at least two prompts, in alphabetical order; none unless there are several.

    One prompt gives no interval, and says nothing of its category; ``summary.json`` has them all.
    """
    names = {
        name
        for method in summary.methods
        for name, found in method.by_category.items()
        if found.mean_acceptance_length_interval is not None
    }
    return sorted(names) if len(names) > 1 else []


def category_table(summary: Summary) -> Table | None:
    """A row per category, method and temperature, plain decoding left out; None if there is nothing to tell apart."""
    names = shown(summary)
    methods = [method for method in summary.methods if method.method != PLAIN]
    if not names or not methods:
        return None
    table = Table(
        [
            Column("category", "left"),
            Column("method", "left"),
            *(Column(name) for name in ("T", "prompts", "mean acceptance length", "speedup", "tokens/s")),
        ],
        "By category",
    )
    for name in names:
        for method in methods:
            found = method.by_category.get(name)
            if found is None:
                continue
            table.add(
                name,
                cells.method_name(method),
                f"{method.temperature:g}",
                str(found.prompts),
                with_interval(number(found.mean_acceptance_length), found.mean_acceptance_length_interval),
                with_interval(times(found.speedup), found.speedup_interval),
                number(found.tokens_per_second, 1),
                end_section=method is methods[-1],
            )
    return table


@style.styled()
def category_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Speedup and mean acceptance length by category, a bar per method; None if there is nothing to tell apart."""
    names = shown(summary)
    methods = [method for method in summary.methods if method.method != PLAIN]
    if not names or not methods:
        return None
    height = 0.08 + 0.15 * len(methods)
    figure = style.new_figure(style.PAGE, 1.2 + height * len(names))
    left, right = figure.subplots(1, 2, sharey=True)
    several = len({method.temperature for method in methods}) > 1
    thickness = 0.8 / len(methods)
    for index, method in enumerate(methods):
        color = style.color(index)
        name = method.label + (f", T={method.temperature:g}" if several else "")
        offset = -0.4 + thickness * (index + 0.5)
        for axes, field in ((left, "mean_acceptance_length"), (right, "speedup")):
            _bars(axes, names, method, field, offset, thickness, color, name)
    for axes, title in (
        (left, "mean acceptance length (tokens per target forward)"),
        (right, "tokens/s over plain decoding's"),
    ):
        style.baseline(axes, vertical=True)
        axes.set_xlabel(title)
        axes.set_xlim(0, max(1.0, axes.get_xlim()[1]) * 1.08)
        axes.grid(axis="x")
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    style.legend(figure, *left.get_legend_handles_labels())
    plot_title(figure, f"By category, with {summary.confidence:.0%} intervals", subtitle, summary)
    return style.save(figure, path)


def _bars(
    axes: Axes,
    names: list[str],
    method: MethodSummary,
    field: str,
    offset: float,
    thickness: float,
    color: str,
    name: str,
) -> None:
    rows = [(row, method.by_category[each]) for row, each in enumerate(names) if each in method.by_category]
    known = [(row, getattr(found, field), getattr(found, f"{field}_interval")) for row, found in rows]
    known = [(row, value, bounds) for row, value, bounds in known if value is not None]
    heights = [row + offset for row, _, _ in known]
    axes.barh(heights, [value for _, value, _ in known], thickness * 0.92, color=color, label=name)
    for y, (_, value, bounds) in zip(heights, known, strict=True):
        low, high = bounds or (value, value)
        axes.hlines(y, low, high, color="black", linewidth=1.2)
        axes.annotate(
            f"{value:.2f}", (high, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=style.SMALLEST
        )
