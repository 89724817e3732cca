"""Pictures of a run, readable without the code: titles, units, what a mark means, what the verifier promises."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.reporting import style
from experiments.reporting.cells import names_of, rules_of
from experiments.reporting.run_tables import label_of, shown_categories, stage_milliseconds
from experiments.reporting.verdicts import warning
from experiments.results.records import PLAIN
from experiments.results.summary import MethodSummary, Summary

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
FIGURES = {
    "mean_acceptance_length": "mean acceptance length (tokens per target forward)",
    "speedup": "tokens/s over plain decoding's",
}
"""What is drawn of methods, with the label of its axis."""
FEW = 10
"""Rounds from which on a share of rounds is drawn in full: a share of fewer is faint, and says of how many."""
FAMILY = ": "
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
    names = list(dict.fromkeys(method.label for method in drafting))
    deepest = max(len(method.acceptance_by_position.rounds) for method in drafting)
    across = 2 if deepest * len(names) <= 40 else 1
    temperatures = sorted({method.temperature for method in drafting})
    figure, panels = style.by_temperature(temperatures, per_panel=2.1, more=0.9, across=across)
    if deepest * len(names) > 10:
        figure.set_figwidth(style.PAGE)
    for method in drafting:
        _accepted(panels[method.temperature], method, names.index(method.label), len(names))
    for panel in panels.values():
        style.positions(panel)
        panel.set(xticks=range(1, deepest + 1), ylim=(0, 1.1))
    panels[temperatures[0]].set_ylabel("rounds that accepted it")
    handles = [Line2D([], [], color=style.color(index), linewidth=6) for index in range(len(names))]
    handles.append(Line2D([], [], **_diamond("black"), linestyle="none"))
    labels = [*names, "of rounds that accepted all tokens before it"]
    if any(panel.texts for panel in panels.values()):
        handles.append(Line2D([], [], linestyle="none"))
        labels.append(f"faint, with their number: of fewer than {FEW} rounds")
    style.legend(figure, handles, labels)
    return finish(figure, path, "Acceptance by position, of all rounds that drafted this far", subtitle, summary)


def _diamond(color: str) -> dict[str, Any]:
    line = {"markeredgecolor": color, "markeredgewidth": 1.1, "color": color}
    return {"marker": "D", "markersize": 4, "markerfacecolor": "white", **line}


def _accepted(axes: "Axes", method: MethodSummary, index: int, series: int) -> None:
    """Draw a method's bars and diamonds."""
    by, width, color = method.acceptance_by_position, 0.84 / series, style.color(index)
    # Rounds that accepted everything before a position, of which its diamond is a share.
    before = [*by.rounds[:1], *(round(n * share) for n, share in zip(by.rounds, by.unconditional, strict=True))]
    for place, (low, high) in enumerate(zip(by.unconditional, by.conditional, strict=True)):
        x, count = place + 1 - 0.42 + width * (index + 0.5), min(before[place], by.rounds[place])
        axes.bar(x, low, width * 0.9, color=color, alpha=1.0 if by.rounds[place] >= FEW else 0.4)
        if high is not None:
            faint = 0.4 if count < FEW else 1.0
            axes.vlines(x, low, high, color=color, linewidth=0.8, alpha=faint)
            axes.plot([x], [high], **_diamond(color), alpha=faint)
            if count < FEW:
                style.note(axes, f"{count}", (x, high), (0, 7), ha="center", color=color)


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
    style.name_rows(axes, names_of(timed), 30)
    axes.set_xlim(0, max(left) * 1.15)
    axes.set_xlabel("wall time per emitted token (ms)")
    style.legend_of(figure, axes, ncols=4)
    return finish(figure, path, "Where the time goes", subtitle, summary)


def speedup_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """Mean acceptance length and speedup, a row per method and a mark per temperature; None if that is one mark."""
    compared = [(method.label, method) for method in summary.methods if method.speedup is not None]
    if len(compared) < 2:
        return None
    return length_and_speedup(compared, path, "Speedup over plain decoding", conditions(subtitle, summary), summary)


def methods_plot(summary: Summary, path: Path, subtitle: str, labels: Mapping[str, str]) -> Path | None:
    """The same of every method that drafts, under readable names; None if nothing was drafted."""
    drafting = [(label_of(method, labels), method) for method in summary.methods if method.method != PLAIN]
    return length_and_speedup(drafting, path, "What each drafter brings", conditions(subtitle, summary), summary)


def category_plot(summary: Summary, path: Path, subtitle: str) -> Path | None:
    """The same, a row per category and a mark per method; None if there is nothing to tell apart."""
    names = shown_categories(summary)
    methods = [method for method in summary.methods if method.method != PLAIN]
    if not names or not methods:
        return None
    series = {
        label: {row: method.by_category[name] for row, name in enumerate(names) if name in method.by_category}
        for method, label in zip(methods, names_of(methods), strict=True)
    }
    return style.rows_plot(
        path,
        names,
        {text: {label: _points(own, field) for label, own in series.items()} for field, text in FIGURES.items()},
        about=f"By category, with {summary.confidence:.0%} intervals",
        subtitle=conditions(subtitle, summary),
        alarm=warning(summary.not_lossless),
    )


def length_and_speedup(
    entries: Sequence[tuple[str, MethodSummary]], path: Path, text: str, subtitle: str, summary: Summary
) -> Path | None:
    """Draw mean acceptance length and speedup, a row per name and a mark per temperature; None without any rounds.

    ``summary`` is of a run with the intervals that all have.
    """
    alarm = warning([name for name, method in entries if method.not_lossless])
    about = f"{text}, with {summary.confidence:.0%} intervals"
    entries = [(name, method) for name, method in entries if method.mean_acceptance_length is not None]
    if not entries:
        return None
    names = list(dict.fromkeys(name for name, _ in entries))
    series: dict[str, dict[int, MethodSummary]] = {}
    for temperature in sorted({method.temperature for _, method in entries}):
        own = {names.index(name): method for name, method in entries if method.temperature == temperature}
        series[f"temperature {temperature:g}"] = own
    panels = {text: {name: _points(own, field) for name, own in series.items()} for field, text in FIGURES.items()}
    return style.rows_plot(path, names, panels, about=about, subtitle=subtitle, alarm=alarm)


def _points(by_row: Mapping[int, MethodSummary], field: str) -> list[style.Point]:
    return [(row, found[field], found[f"{field}_interval"]) for row, found in by_row.items()]


@style.styled()
def nodes_plot(summary: Summary, path: Path, subtitle: str, labels: Mapping[str, str]) -> Path | None:
    """Draw tokens per round by drafted nodes per round, a panel per temperature, each point with its number.

    A label's part before the colon is its family: its members have one colour, and a line joins those that differ in
    their size alone (``EAGLE-3: chain of 4``, ``EAGLE-3: chain of 8``). Returns None if nothing was drafted.
    """
    from matplotlib.lines import Line2D

    drafting = [
        (label_of(method, labels), method)
        for method in summary.methods
        if method.proposed_nodes_per_round and method.mean_acceptance_length is not None
    ]
    if not drafting:
        return None
    names = list(dict.fromkeys(label for label, _ in drafting))
    families = list(dict.fromkeys(name.partition(FAMILY)[0] for name in names))
    temperatures = sorted({method.temperature for _, method in drafting})
    # A panel above the other: numbers and intervals need the page's width to stay apart.
    more = 1.0 + 0.14 * -(-len(names) // 3)
    figure, panels = style.by_temperature(temperatures, per_panel=2.6, more=more, across=1)
    figure.set_figwidth(style.PAGE)
    groups: dict[tuple[float, int, str], list[tuple[float, float]]] = {}
    drafting.sort(key=lambda each: (each[1].proposed_nodes_per_round, each[1].mean_acceptance_length))
    for place, (label, method) in enumerate(drafting):
        at, panel = (method.proposed_nodes_per_round, method.mean_acceptance_length), panels[method.temperature]
        family, _, member = label.partition(FAMILY)
        index = families.index(family)
        panel.vlines(
            at[0], *(method.mean_acceptance_length_interval or at[1:] * 2), color=style.color(index), linewidth=0.9
        )
        panel.plot(*at, linestyle="none", **style.looks(index))
        # Points that are close to each other have their numbers on different sides.
        offset, side = ((5, 4), "left") if place % 2 else ((-5, 4), "right")
        number, bold = str(names.index(label) + 1), {"bbox": None, "fontweight": "bold"}
        style.note(panel, number, at, offset, ha=side, color=style.color(index), **bold)
        # Members that differ in their size alone are of one kind.
        kind = "".join(letter for letter in member if not letter.isdigit())
        groups.setdefault((method.temperature, index, kind), []).append(at)
    for (temperature, index, _), places in groups.items():
        panels[temperature].plot(*zip(*places, strict=True), color=style.color(index), alpha=0.6, linewidth=0.9)
    for panel in panels.values():
        style.plain_log(panel.xaxis, [2**power for power in range(13)], base=2)
        panel.margins(x=0.06, y=0.1)
        panel.set(xlabel="drafted nodes per round", ylabel="tokens per round")
        panel.label_outer()
    own = [families.index(name.partition(FAMILY)[0]) for name in names]
    handles = [Line2D([], [], linestyle="none", **style.looks(index)) for index in own]
    style.legend(figure, handles, [f"{number}  {name}" for number, name in enumerate(names, start=1)])
    return finish(figure, path, f"What drafted nodes bring, with {summary.confidence:.0%} intervals", subtitle, summary)


def finish(figure: "Figure", path: Path, text: str, subtitle: str, summary: Summary) -> Path:
    """``style.finish`` with the run's conditions, the kind of rule, and whether the run is complete."""
    return style.finish(figure, path, text, conditions(subtitle, summary), alarm=warning(summary.not_lossless))


def conditions(subtitle: str, summary: Summary) -> str:
    """The second line of a title: the run's conditions, the kind of rule, and whether the run is complete."""
    notes = [subtitle, rules_of(summary.methods)]
    if not summary.complete:
        notes.append("INCOMPLETE RUN")
    if summary.noise.noisy:
        notes.append("NOISY TIMINGS")
    return "; ".join(note for note in notes if note)


RUN_PLOTS = {"speedup.png": speedup_plot, "acceptance_by_position.png": acceptance_plot, "time.png": time_plot}
"""The pictures of every run, by file name."""
