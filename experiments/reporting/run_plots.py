"""Pictures of a run, readable without the code: titles, units, what a mark means, what the verifier promises."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.reporting import style
from experiments.reporting.columns import CLOSED, FAMILY, label_of, labels_of, rules_of
from experiments.reporting.run_tables import REQUESTS, shown_categories, stage_milliseconds, stages_of
from experiments.reporting.verdicts import warning
from experiments.results.records import PLAIN
from experiments.results.requests import LEVELS
from experiments.results.rows import Row, family, interval, positions
from experiments.results.runs import Run

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


@style.styled()
def acceptance_plot(run: Run, path: Path, subtitle: str) -> Path | None:
    """Acceptance by draft position, a panel per temperature; None if nothing was drafted.

    Bars are shares of all rounds that drafted this far, diamonds of those that accepted everything before. Both have
    the method's colour, and a diamond stands above the middle of its own bar, on a stem of that colour.
    """
    from matplotlib.lines import Line2D

    drafting = [row for row in run.rows if family(row, "rounds_at")]
    if not drafting:
        return None
    names = list(dict.fromkeys(row["label"] for row in drafting))
    deepest = max(len(positions(row)) for row in drafting)
    temperatures = sorted({row["temperature"] for row in drafting})
    across = 2 if deepest * len(names) <= 40 else 1
    figure, panels = style.by_temperature(temperatures, per_panel=2.1, more=0.9, across=across)
    if deepest * len(names) > 10:
        figure.set_figwidth(style.PAGE)
    width, diamond = 0.84 / len(names), {"marker": "D", "markersize": 4, "markerfacecolor": "white"}
    for row in drafting:
        index, panel = names.index(row["label"]), panels[row["temperature"]]
        places = [place + 0.58 + width * (index + 0.5) for place in range(len(positions(row)))]
        panel.bar(places, positions(row), width * 0.9, color=style.color(index))
        for x, share, high in zip(places, positions(row), positions(row, "conditional_acceptance_at"), strict=True):
            if high is not None:
                panel.vlines(x, share, high, color=style.color(index), linewidth=0.8)
                panel.plot([x], [high], color=style.color(index), **diamond)
    for panel in panels.values():
        style.positions(panel)
        panel.set(xticks=range(1, deepest + 1), ylim=(0, 1.1))
    panels[temperatures[0]].set_ylabel("rounds that accepted it")
    handles = [Line2D([], [], color=style.color(index), linewidth=6) for index in range(len(names))]
    handles.append(Line2D([], [], color="black", linestyle="none", **diamond))
    style.legend(figure, handles, [*names, "of rounds that accepted all tokens before it"])
    return finish(figure, path, "Acceptance by position, of all rounds that drafted this far", subtitle, run)


@style.styled()
def time_plot(run: Run, path: Path, subtitle: str) -> Path | None:
    """Wall time per emitted token by stage, a bar per method; None if stages were not timed."""
    timed = [row for row in run.rows if family(row, "stage_seconds") and row["tokens_per_second"]]
    if not timed:
        return None
    figure = style.new_figure(style.PAGE, 1.35 + 0.24 * len(timed))
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
    axes.set_xlim(0, max(left) * 1.15)
    axes.set_xlabel("wall time per emitted token (ms)")
    style.legend_of(figure, axes, ncols=4)
    return finish(figure, path, "Where the time goes", subtitle, run)


def speedup_plot(run: Run, path: Path, subtitle: str) -> Path | None:
    """Mean acceptance length and speedup, a row per method and a mark per temperature; None if that is one mark."""
    compared = [(row["label"], row) for row in run.rows if row["speedup"] is not None]
    if len(compared) < 2:
        return None
    return length_and_speedup(compared, path, "Speedup over plain decoding", conditions(subtitle, run))


def methods_plot(run: Run, path: Path, subtitle: str, labels: Mapping[str, str]) -> Path | None:
    """The same of every method that drafts, under readable names; None if nothing was drafted."""
    drafting = [(label_of(row, labels), row) for row in run.rows if row["method"] != PLAIN]
    return length_and_speedup(drafting, path, "What each drafter brings", conditions(subtitle, run))


def category_plot(run: Run, path: Path, subtitle: str) -> Path | None:
    """The same, a row per category and a mark per method; None if there is nothing to tell apart."""
    names = shown_categories(run)
    rows = [row for row in run.rows if row["method"] != PLAIN]
    if not names or not rows:
        return None
    series = {}
    for row, label in zip(rows, labels_of(rows), strict=True):
        parts = [p for p in run.parts if (p["method"], p["temperature"]) == (row["method"], row["temperature"])]
        series[label] = {names.index(part["category"]): part for part in parts if part["category"] in names}
    return style.rows_plot(
        path,
        names,
        {text: {label: _points(own, field) for label, own in series.items()} for field, text in FIGURES.items()},
        about=f"By category, with {rows[0]['confidence']:.0%} intervals",
        subtitle=conditions(subtitle, run),
        alarm=warning(run.not_lossless),
    )


def length_and_speedup(entries: Sequence[tuple[str, Row]], path: Path, text: str, subtitle: str) -> Path | None:
    """Draw mean acceptance length and speedup, a row per name and a mark per temperature; None without any rounds."""
    alarm = warning([name for name, row in entries if row["not_lossless"]])
    entries = [(name, row) for name, row in entries if row["mean_acceptance_length"] is not None]
    if not entries:
        return None
    names = list(dict.fromkeys(name for name, _ in entries))
    series: dict[str, dict[int, Row]] = {}
    for temperature in sorted({row["temperature"] for _, row in entries}):
        own = {names.index(name): row for name, row in entries if row["temperature"] == temperature}
        series[f"temperature {temperature:g}"] = own
    panels = {label: {name: _points(own, field) for name, own in series.items()} for field, label in FIGURES.items()}
    about = f"{text}, with {entries[0][1]['confidence']:.0%} intervals"
    return style.rows_plot(path, names, panels, about=about, subtitle=subtitle, alarm=alarm)


def _points(by_place: Mapping[int, Row], field: str) -> list[style.Point]:
    return [(place, row[field], interval(row, field)) for place, row in by_place.items()]


@style.styled()
def nodes_plot(run: Run, path: Path, subtitle: str, labels: Mapping[str, str]) -> Path | None:
    """Draw tokens per round by drafted nodes per round, a panel per temperature, each point with its number.

    A label's part before the colon is its family: its members have one colour, and a line joins those that differ in
    their size alone (``EAGLE-3: chain of 4``, ``EAGLE-3: chain of 8``). Returns None if nothing was drafted.
    """
    from matplotlib.lines import Line2D

    drafting = [
        (label_of(row, labels), row)
        for row in run.rows
        if row["proposed_nodes_per_round"] and row["mean_acceptance_length"] is not None
    ]
    if not drafting:
        return None
    names = list(dict.fromkeys(label for label, _ in drafting))
    families = list(dict.fromkeys(name.partition(FAMILY)[0] for name in names))
    temperatures = sorted({row["temperature"] for _, row in drafting})
    # A panel above the other: numbers and intervals need the page's width to stay apart.
    more = 1.0 + 0.14 * -(-len(names) // 3)
    figure, panels = style.by_temperature(temperatures, per_panel=2.6, more=more, across=1)
    figure.set_figwidth(style.PAGE)
    groups: dict[tuple[float, int, str], list[tuple[float, float]]] = {}
    drafting.sort(key=lambda each: (each[1]["proposed_nodes_per_round"], each[1]["mean_acceptance_length"]))
    for place, (label, row) in enumerate(drafting):
        at, panel = (row["proposed_nodes_per_round"], row["mean_acceptance_length"]), panels[row["temperature"]]
        family, _, member = label.partition(FAMILY)
        index = families.index(family)
        low, high = interval(row, "mean_acceptance_length") or (at[1], at[1])
        panel.vlines(at[0], low, high, color=style.color(index), linewidth=0.9)
        panel.plot(*at, linestyle="none", **style.looks(index))
        # Points that are close to each other have their numbers on different sides.
        offset, side = ((5, 4), "left") if place % 2 else ((-5, 4), "right")
        number, bold = str(names.index(label) + 1), {"bbox": None, "fontweight": "bold"}
        style.note(panel, number, at, offset, ha=side, color=style.color(index), **bold)
        # Members that differ in their size alone are of one kind.
        kind = "".join(letter for letter in member if not letter.isdigit())
        groups.setdefault((row["temperature"], index, kind), []).append(at)
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
    about = f"What drafted nodes bring, with {run.rows[0]['confidence']:.0%} intervals"
    return finish(figure, path, about, subtitle, run)


@style.styled()
def requests_plot(run: Run, path: Path, subtitle: str) -> Path | None:
    """Draw the percentiles of three latencies, a line per method; returns None if nothing is known of any."""
    known = [row for row in run.rows if row.get("ttft.p50") is not None]
    if not known:
        return None
    figure = style.new_figure(style.PAGE, 1.35 + 0.26 * len(known))
    panels = figure.subplots(1, 3, sharey=True)
    texts = {"ttft": "time to first token (ms)", "tpot": "time per further token (ms)", "e2e": "arrival to end (ms)"}
    for axes, (field, text) in zip(panels, texts.items(), strict=True):
        _percentiles(axes, known, field)
        axes.set_xlabel(text)
    style.name_rows(panels[0], labels_of(known), 26)
    style.legend(figure, *panels[0].get_legend_handles_labels(), ncols=5)
    return finish(figure, path, f"{REQUESTS}: percentiles over requests; {CLOSED}", subtitle, run)


def _percentiles(axes: "Axes", rows: Sequence[Row], field: str) -> None:
    from matplotlib.ticker import MaxNLocator

    for place, row in enumerate(rows):
        if row.get(f"{field}.p50") is None:
            continue
        values = [1000 * row[f"{field}.p{level}"] for level in LEVELS]
        axes.hlines(place, values[0], values[-1], color=style.color(0), linewidth=1.3)
        for index, (level, value) in enumerate(zip(LEVELS, values, strict=True)):
            axes.plot([value], [place], label=f"p{level}", linestyle="none", **style.looks(index))
        if (bounds := interval(row, f"{field}.p50")) is not None:
            low, high = (1000 * end for end in bounds)
            axes.hlines(place + 0.22, low, high, color=style.FAINT, linewidth=1.0, label="interval of p50")
    axes.set_xlim(0, 1.06 * axes.get_xlim()[1])
    axes.xaxis.set_major_locator(MaxNLocator(5))


def finish(figure: "Figure", path: Path, text: str, subtitle: str, run: Run) -> Path:
    """``style.finish`` with the run's conditions, the kind of rule, and whether the run is complete."""
    return style.finish(figure, path, text, conditions(subtitle, run), alarm=warning(run.not_lossless))


def conditions(subtitle: str, run: Run) -> str:
    """The second line of a title: the run's conditions, the kind of rule, and whether the run is complete."""
    notes = [subtitle, rules_of(run.rows), "" if run.complete else "INCOMPLETE RUN", "NOISY TIMINGS" * run.noisy]
    return "; ".join(note for note in notes if note)


RUN_PLOTS = {"speedup.png": speedup_plot, "acceptance_by_position.png": acceptance_plot, "time.png": time_plot}
"""The pictures of every run, by file name."""
