"""Pictures of a run, readable without the code: titles, units, what a bar means, what the verifier promises."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.reporting import style
from experiments.reporting.run_tables import label_of, shown_categories, stage_milliseconds
from experiments.reporting.verdicts import warning
from experiments.results.records import PLAIN
from experiments.results.statistics import Interval
from experiments.results.summary import CategorySummary, MethodSummary, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGE_COLORS = {
    "ingestion": "#d55e00",
    "prefill": "#999999",
    "draft": "#e69f00",
    "verify": "#0072b2",
    "accept": "#009e73",
    "commit": "#cc79a7",
    "completion": "#56b4e9",
    "other": "#dddddd",
}
LENGTH = "mean acceptance length (tokens per target forward)"
SPEEDUP = "tokens/s over plain decoding's"
FEW = 10
"""Rounds from which on a share of rounds is drawn in full: a share of fewer is faint, and says of how many."""
_FAMILY = ": "
"""Stands in a label between the family, which is a line in pictures, and its member."""


@style.styled()
def acceptance_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Acceptance by draft position, a panel per temperature; None if nothing was drafted.

    Bars are shares of all rounds that drafted this far, diamonds of those that accepted everything before. Both have
    the method's colour, and a diamond stands above the middle of its own bar, on a stem of that colour. A share of few
    rounds is faint, and their number stands beside it.
    """
    from matplotlib.lines import Line2D

    drafting = [method for method in summary.methods if method.acceptance_by_position.rounds]
    if not drafting:
        return None
    temperatures = sorted({method.temperature for method in drafting})
    names = list(dict.fromkeys(method.label for method in drafting))
    deepest = max(len(method.acceptance_by_position.rounds) for method in drafting)
    across = 2 if deepest * len(names) <= 40 else 1
    figure, panels = style.by_temperature(temperatures, per_panel=2.1, more=0.9, across=across)
    if deepest * len(names) > 10:
        figure.set_figwidth(style.PAGE)
    few = False
    for temperature, panel in panels.items():
        for method in drafting:
            if method.temperature == temperature:
                few |= _accepted(panel, method, names.index(method.label), len(names))
        style.positions(panel)
        panel.set_xticks(range(1, deepest + 1))
        panel.set_ylim(0, 1.1)
        panel.set_ylabel("rounds that accepted it" if panel in list(panels.values())[::across] else "")
    handles = [Line2D([], [], color=style.color(index), linewidth=6) for index in range(len(names))]
    handles.append(Line2D([], [], **_diamond("black"), linestyle="none"))
    labels = [*names, "of rounds that accepted all tokens before it"]
    if few:
        handles.append(Line2D([], [], linestyle="none"))
        labels.append(f"faint, with their number: of fewer than {FEW} rounds")
    style.legend(figure, handles, labels)
    plot_title(figure, "Acceptance by position, of all rounds that drafted this far", subtitle, summary)
    return style.save(figure, path)


def _diamond(color: str) -> dict[str, Any]:
    line = {"markeredgecolor": color, "markeredgewidth": 1.1, "color": color}
    return {"marker": "D", "markersize": 4, "markerfacecolor": "white", **line}


def _accepted(axes: "Axes", method: MethodSummary, index: int, series: int) -> bool:
    """Draw a method's bars and diamonds; returns whether any is of few rounds."""
    by, width, color, few = method.acceptance_by_position, 0.84 / series, style.color(index), False
    # Rounds that accepted everything before a position, of which its diamond is a share.
    before = [*by.rounds[:1], *(round(n * share) for n, share in zip(by.rounds, by.unconditional, strict=True))]
    for place, (low, high) in enumerate(zip(by.unconditional, by.conditional, strict=True)):
        x = place + 1 - 0.42 + width * (index + 0.5)
        axes.bar(x, low, width * 0.9, color=color, alpha=1.0 if by.rounds[place] >= FEW else 0.4)
        if high is None:
            continue
        rare = min(before[place], by.rounds[place]) < FEW
        axes.vlines(x, low, high, color=color, linewidth=0.8, alpha=0.4 if rare else 1.0)
        axes.plot([x], [high], **_diamond(color), alpha=0.4 if rare else 1.0)
        if rare:
            few = True
            number = f"{min(before[place], by.rounds[place])}"
            style.note(axes, number, (x, high), (0, 7), ha="center", color=color)
    return few


@style.styled()
def time_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Wall time per emitted token by stage, a bar per method; None if stages were not timed."""
    timed = [method for method in summary.methods if method.stage_seconds and method.tokens_per_second]
    if not timed:
        return None
    figure = style.new_figure(style.PAGE, 1.35 + 0.24 * len(timed))
    axes = figure.subplots()
    left = [0.0] * len(timed)
    for stage, color in STAGE_COLORS.items():
        values = [stage_milliseconds(method, stage) or 0.0 for method in timed]
        if any(values):
            axes.barh(range(len(timed)), values, left=left, color=color, label=stage, edgecolor="white", linewidth=0.5)
            left = [start + value for start, value in zip(left, values, strict=True)]
    for row, total in enumerate(left):
        style.note(axes, f"{total:.2f} ms", (total, row), (3, 0))
    style.name_rows(axes, names_of(timed), 30, lines=False)
    axes.set_xlim(0, max(left) * 1.15)
    axes.set_xlabel("wall time per emitted token (ms)")
    axes.grid(axis="x")
    style.legend(figure, *axes.get_legend_handles_labels(), ncols=4)
    plot_title(figure, "Where the time goes", subtitle, summary)
    return style.save(figure, path)


@style.styled()
def speedup_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Speedup over plain decoding with its interval, a bar per method and temperature; None if that is one bar."""
    compared = [method for method in summary.methods if method.speedup is not None]
    if len(compared) < 2:
        return None
    names = list(dict.fromkeys(method.label for method in compared))
    temperatures = sorted({method.temperature for method in compared})
    wide = len(names) * len(temperatures) > 4 or max(map(len, names)) > 10
    figure = style.new_figure(style.PAGE if wide else style.COLUMN, 2.9)
    axes = figure.subplots()
    width, top = 0.84 / len(temperatures), 1.0
    for index, temperature in enumerate(temperatures):
        methods = [method for method in compared if method.temperature == temperature]
        places = [names.index(method.label) - 0.42 + width * (index + 0.5) for method in methods]
        heights = [method.speedup or 0.0 for method in methods]
        axes.bar(places, heights, width * 0.92, color=style.color(index), label=f"temperature {temperature:g}")
        for x, height, method in zip(places, heights, methods, strict=True):
            low, high = method.speedup_interval or (height, height)
            axes.vlines(x, low, high, color="black", linewidth=1.2)
            length = method.mean_acceptance_length
            text = f"{height:.2f}x" + ("" if length is None else f"\nlength {length:.2f}")
            style.note(axes, text, (x, high), (0, 3), ha="center", va="bottom")
            top = max(top, high)
    line = style.baseline(axes)
    axes.set_xticks(range(len(names)), [style.wrapped(name, 16) for name in names])
    axes.set_ylim(0, top * 1.28)
    axes.set_ylabel(SPEEDUP)
    axes.grid(axis="y")
    words = [*(f"temperature {t:g}" for t in temperatures), "plain decoding (length 1)"]
    style.legend(figure, [*axes.containers, line], words)
    confidence = f"{summary.confidence:.0%} intervals; length: mean acceptance length, tokens per target forward"
    plot_title(figure, f"Speedup over plain decoding, with {confidence}", subtitle, summary)
    return style.save(figure, path)


@style.styled()
def category_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Speedup and mean acceptance length by category, a bar per method; None if there is nothing to tell apart."""
    names = shown_categories(summary)
    methods = [method for method in summary.methods if method.method != PLAIN]
    if not names or not methods:
        return None
    figure = style.new_figure(style.PAGE, 1.2 + (0.08 + 0.15 * len(methods)) * len(names))
    panels = figure.subplots(1, 2, sharey=True)
    thickness = 0.8 / len(methods)
    for axes, field, text in zip(panels, ("mean_acceptance_length", "speedup"), (LENGTH, SPEEDUP), strict=True):
        for index, (method, label) in enumerate(zip(methods, names_of(methods), strict=True)):
            known = [(row, method.by_category[name]) for row, name in enumerate(names) if name in method.by_category]
            points = [(row - 0.4 + thickness * (index + 0.5), *_figure(found, field)) for row, found in known]
            points = [(y, value, bounds) for y, value, bounds in points if value is not None]
            color, values = style.color(index), [value for _, value, _ in points]
            axes.barh([y for y, _, _ in points], values, thickness * 0.92, color=color, label=label)
            for y, value, bounds in points:
                low, high = bounds or (value, value)
                axes.hlines(y, low, high, color="black", linewidth=1.2)
                style.note(axes, f"{value:.2f}", (high, y), (3, 0))
        style.baseline(axes, vertical=True)
        axes.set_xlabel(text)
        axes.set_xlim(0, max(1.0, axes.get_xlim()[1]) * 1.08)
        axes.grid(axis="x")
    style.name_rows(panels[0], names, 30, lines=False)
    style.legend(figure, *panels[0].get_legend_handles_labels())
    plot_title(figure, f"By category, with {summary.confidence:.0%} intervals", subtitle, summary)
    return style.save(figure, path)


@style.styled()
def methods_plot(summary: Summary, path: Path, subtitle: str, labels: Mapping[str, str]) -> Path | None:
    """Draw mean acceptance length and speedup of every method, with intervals; returns None if nothing was drafted."""
    drafting = [(label_of(method, labels), method) for method in summary.methods if method.method != PLAIN]
    return length_and_speedup(
        drafting,
        path,
        f"What each drafter brings, with {summary.confidence:.0%} intervals",
        conditions(subtitle, summary),
        alarm=warning([label for label, method in drafting if method.not_lossless]),
    )


def length_and_speedup(
    entries: Sequence[tuple[str, MethodSummary]], path: Path, title: str, subtitle: str, *, alarm: str = ""
) -> Path | None:
    """Draw mean acceptance length and speedup as dots, a line per method; None where nothing was accepted or counted.

    Args:
        entries: Names, and figures at one temperature; entries of the same name share a line.
        path: The PNG. An SVG is written beside it.
        title: What the picture shows.
        subtitle: The conditions.
        alarm: What a reader must not miss.
    """
    entries = [(name, method) for name, method in entries if method.mean_acceptance_length is not None]
    if not entries:
        return None
    names = list(dict.fromkeys(name for name, _ in entries))
    temperatures = sorted({method.temperature for _, method in entries})
    figure = style.new_figure(style.PAGE, 1.1 + (0.12 + 0.13 * len(temperatures)) * len(names))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, field, text in zip(panels, ("mean_acceptance_length", "speedup"), (LENGTH, SPEEDUP), strict=True):
        for index, temperature in enumerate(temperatures):
            offset = 0.0 if len(temperatures) == 1 else -0.26 + 0.52 * index / (len(temperatures) - 1)
            points = [(names.index(n) + offset, *_figure(m, field)) for n, m in entries if m.temperature == temperature]
            style.dots(axes, points, index, f"temperature {temperature:g}")
        style.baseline(axes, vertical=True)
        axes.set_xlabel(text)
        axes.margins(x=0.14)
        axes.grid(axis="x")
    style.name_rows(panels[0], names, 34)
    for row in range(len(names) - 1):
        panels[1].axhline(row + 0.5, color=style.SEPARATOR, linewidth=0.6)
    style.legend(figure, *panels[0].get_legend_handles_labels())
    style.title(figure, title, subtitle, alarm=alarm)
    return style.save(figure, path)


@style.styled()
def nodes_plot(summary: Summary, path: Path, subtitle: str, labels: Mapping[str, str]) -> Path | None:
    """Draw tokens per round by drafted nodes per round, a panel per temperature, each point with its number.

    A label's part before the colon is its family: its members have one colour, and a line joins those that differ in
    their size alone (``EAGLE-3: chain of 4``, ``EAGLE-3: chain of 8``). Returns None if nothing was drafted.
    """
    drafting = [
        (label_of(method, labels), method)
        for method in summary.methods
        if method.proposed_nodes_per_round and method.mean_acceptance_length is not None
    ]
    if not drafting:
        return None
    names = list(dict.fromkeys(label for label, _ in drafting))
    families = list(dict.fromkeys(name.partition(_FAMILY)[0] for name in names))
    temperatures = sorted({method.temperature for _, method in drafting})
    # A panel above the other: numbers and intervals need the page's width to stay apart.
    lines = -(-len(names) // 3)
    figure, panels = style.by_temperature(temperatures, per_panel=2.6, more=1.0 + 0.14 * lines, across=1)
    figure.set_figwidth(style.PAGE)
    for temperature, panel in panels.items():
        chosen = [(label, method) for label, method in drafting if method.temperature == temperature]
        _nodes_panel(panel, chosen, names, families)
        panel.set_ylabel("tokens per round")
    list(panels.values())[-1].set_xlabel("drafted nodes per round")
    handles, words = [], []
    for number, name in enumerate(names, start=1):
        index = families.index(name.partition(_FAMILY)[0])
        handles.append(_point_handle(index))
        words.append(f"{number}  {name}")
    style.legend(figure, handles, words)
    plot_title(figure, f"What drafted nodes bring, with {summary.confidence:.0%} intervals", subtitle, summary)
    return style.save(figure, path)


def _point_handle(index: int) -> object:
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="none", **style.looks(index))


def _nodes_panel(
    panel: "Axes", chosen: Sequence[tuple[str, MethodSummary]], names: Sequence[str], families: Sequence[str]
) -> None:
    groups: dict[tuple[int, str], list[MethodSummary]] = {}
    points = []
    for label, method in chosen:
        x, y = method.proposed_nodes_per_round or 0.0, method.mean_acceptance_length or 0.0
        family, _, member = label.partition(_FAMILY)
        index = families.index(family)
        low, high = method.mean_acceptance_length_interval or (y, y)
        panel.vlines(x, low, high, color=style.color(index), linewidth=0.9)
        panel.plot([x], [y], linestyle="none", **style.looks(index))
        points.append((x, y, str(names.index(label) + 1), style.color(index)))
        # Members that differ in their size alone are of one kind.
        kind = "".join(letter for letter in member if not letter.isdigit())
        groups.setdefault((index, kind), []).append(method)
    for (index, _), methods in groups.items():
        methods.sort(key=lambda method: method.proposed_nodes_per_round or 0.0)
        places = [(m.proposed_nodes_per_round, m.mean_acceptance_length) for m in methods]
        panel.plot(*zip(*places, strict=True), color=style.color(index), alpha=0.6, linewidth=0.9)
    panel.set_xscale("log", base=2)
    style.plain_log(panel.xaxis, [2**power for power in range(13)])
    panel.margins(x=0.06, y=0.1)
    panel.grid()
    # Points that are close to each other have their numbers on different sides.
    for number, (x, y, text, color) in enumerate(sorted(points)):
        place, side = ((5, 4), "left") if number % 2 else ((-5, 4), "right")
        style.note(panel, text, (x, y), place, ha=side, color=color, bbox=None, fontweight="bold")


def _figure(found: MethodSummary | CategorySummary, field: str) -> tuple[float | None, Interval | None]:
    return getattr(found, field), getattr(found, f"{field}_interval")


def names_of(methods: Sequence[MethodSummary]) -> list[str]:
    """The methods' names, with their temperatures where there are several."""
    several = len({method.temperature for method in methods}) > 1
    return [method.label + (f", T={method.temperature:g}" if several else "") for method in methods]


def plot_title(figure: "Figure", title: str, subtitle: str, summary: Summary) -> None:
    """Title a picture: what it shows, the run's conditions, the kind of rule, and whether the run is complete."""
    style.title(figure, title, conditions(subtitle, summary), alarm=warning(summary.not_lossless))


def conditions(subtitle: str, summary: Summary) -> str:
    """The second line of a title: the run's conditions, the kind of rule, and whether the run is complete."""
    rules = sorted({method.exactness for method in summary.methods if method.exactness is not None})
    notes = [subtitle, f"acceptance rule: {', '.join(rules)}" if rules else ""]
    if not summary.complete:
        notes.append("INCOMPLETE RUN")
    if summary.noise is not None and summary.noise.noisy:
        notes.append("NOISY TIMINGS")
    return "; ".join(note for note in notes if note)


RUN_PLOTS = {"speedup.png": speedup_plot, "acceptance_by_position.png": acceptance_plot, "time.png": time_plot}
"""The pictures of every run, by file name."""
