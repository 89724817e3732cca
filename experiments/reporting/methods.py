"""The table and the pictures of a run of several methods, readable without its configuration."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import ScalarFormatter

from experiments.reporting import markdown, style
from experiments.reporting.cells import (
    NOTHING,
    lossiness,
    number,
    percent,
    times,
    with_interval,
)
from experiments.reporting.dots import length_and_speedup
from experiments.reporting.run_plots import conditions, plot_title
from experiments.reporting.run_tables import BOLD
from experiments.reporting.table import Cell, Column, Emphasis, Table
from experiments.reporting.verdicts import warning
from experiments.results.comparison import commit_of, dataset_name
from experiments.results.records import PLAIN
from experiments.results.runs import Run
from experiments.results.summary import MethodSummary, Summary

COLUMNS = (
    Column("T"),
    Column("method", "left", fold=True, min_width=24),
    Column("tokens\nper round"),
    Column("drafted nodes\nper round"),
    Column("drafting,\nshare of time"),
    Column("speedup"),
    Column("tokens/s"),
)
_SEPARATOR = ": "
"""Stands in a label between the family, which is a line in pictures, and its member."""


def methods_table(summary: Summary, title: str, labels: Mapping[str, str]) -> Table:
    """Returns a row per method and temperature, by temperature.

    Args:
        summary: All figures of the run.
        title: The title.
        labels: What methods are called, by name; others are called by their names.
    """
    gains = [method.gain for method in summary.methods if method.gain is not None]
    notes = _notes(summary)
    columns = list(COLUMNS)
    if gains:
        over = labels.get(gains[0].over, gains[0].over)
        columns.insert(3, Column("difference\nin tokens"))
        notes.append(f"difference: from {over} on the same prompts, given the drafts")
    table = Table(columns, title, notes)
    for temperature in sorted({method.temperature for method in summary.methods}):
        rows = [method for method in summary.methods if method.temperature == temperature]
        for method in rows:
            cells = [
                f"{temperature:g}",
                Cell(_label(method, labels), _failed(method), joint=", ", emphasis=lossiness(method.exactness)),
                with_interval(
                    number(method.mean_acceptance_length),
                    method.mean_acceptance_length_interval if method.method != PLAIN else None,
                    emphasis=_best(method, "mean_acceptance_length"),
                ),
                number(method.proposed_nodes_per_round, 1),
                percent(drafting_share(method)) if method.method != PLAIN else NOTHING,
                with_interval(
                    times(method.speedup),
                    method.speedup_interval,
                    emphasis=_best(method, "speedup"),
                ),
                number(method.tokens_per_second, 1),
            ]
            if gains:
                cells.insert(3, _gain(method))
            table.add(*cells, end_section=method is rows[-1])
    return table


def methods_document(run: Run) -> str:
    """Returns the table of a finished run in Markdown, and the sentences that say what made it."""
    manifest = run.manifest
    config = manifest["config"]
    text = markdown.render(methods_table(run.summary, "", config["labels"]))
    cost = f" at the cost of a {config['target']['inflate']} model" if config["target"].get("inflate") else ""
    facts = [
        f"{manifest['target']['name']}{cost}",
        manifest["dtype"],
        dataset_name(run),
        f"{config['sampling']['max_new_tokens']} new tokens",
        f"batch {config['engine']['max_batch_size']}",
        f"{manifest['threads']} thread{'s' if manifest['threads'] != 1 else ''} of {manifest['device']}",
        f"commit {commit_of(manifest)}",
    ]
    given = " ".join(each for each in manifest["overrides"] if not each.startswith("out="))
    notes = [
        f"Difference: from {config['labels'].get(gain.over, gain.over)} on the same prompts, given the drafts."
        for gain in [method.gain for method in run.summary.methods if method.gain is not None][:1]
    ]
    if run.summary.noise is not None and run.summary.noise.noisy:
        notes.append("NOISY TIMINGS: other programs ran meanwhile.")
    level = f"{run.summary.confidence:.0%}"
    lines = [
        f"`python -m experiments.run {given}`: {', '.join(facts)}. Brackets are {level} intervals over prompts.",
        "",
        text.rstrip(),
        *(["", *notes] if notes else []),
    ]
    return "\n".join(lines) + "\n"


def drafting_share(method: MethodSummary) -> float | None:
    """Returns the share of a method's wall time that its drafter took to propose; None where stages were not timed."""
    spent = method.stage_seconds.get("draft")
    total = sum(method.stage_seconds.values())
    return spent / total if spent is not None and total else None


@style.styled()
def methods_plot(summary: Summary, path: Path, subtitle: str, labels: Mapping[str, str]) -> Path | None:
    """Draw mean acceptance length and speedup of every method, with intervals; returns None if nothing was drafted."""
    drafting = [(_label(method, labels), method) for method in summary.methods if method.method != PLAIN]
    bad = [label for label, method in drafting if method.not_lossless]
    return length_and_speedup(
        drafting,
        path,
        f"What each drafter brings, with {summary.confidence:.0%} intervals",
        conditions(subtitle, summary),
        alarm=warning(bad),
    )


@style.styled()
def nodes_plot(summary: Summary, path: Path, subtitle: str, labels: Mapping[str, str]) -> Path | None:
    """Draw tokens per round by drafted nodes per round, a panel per temperature and a line per family.

    A label's part before the colon is its family. Returns None if nothing was drafted.
    """
    drafting = [
        (_label(method, labels), method)
        for method in summary.methods
        if method.proposed_nodes_per_round and method.mean_acceptance_length is not None
    ]
    if not drafting:
        return None
    families = list(dict.fromkeys(label.partition(_SEPARATOR)[0] for label, _ in drafting))
    temperatures = sorted({method.temperature for _, method in drafting})
    figure = style.new_figure(style.PAGE, 3.4 + 0.13 * (len(families) // 3))
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for panel, temperature in zip(panels, temperatures, strict=True):
        chosen = [(label, method) for label, method in drafting if method.temperature == temperature]
        _nodes_panel(panel, chosen, families)
        panel.set_title(f"temperature {temperature:g}")
        panel.set_xlabel("drafted nodes per round")
    panels[0].set_ylabel("tokens per round")
    lines = [Line2D([], [], color=style.color(i), marker=style.marker(i)) for i in range(len(families))]
    style.legend(figure, lines, families)
    plot_title(figure, f"What drafted nodes bring, with {summary.confidence:.0%} intervals", subtitle, summary)
    return style.save(figure, path)


def _nodes_panel(panel: Axes, chosen: Sequence[tuple[str, MethodSummary]], families: Sequence[str]) -> None:
    for index, family in enumerate(families):
        own = [method for label, method in chosen if label.partition(_SEPARATOR)[0] == family]
        points = sorted(own, key=lambda method: method.proposed_nodes_per_round or 0.0)
        nodes = [method.proposed_nodes_per_round or 0.0 for method in points]
        lengths = [method.mean_acceptance_length or 0.0 for method in points]
        panel.plot(nodes, lengths, color=style.color(index), marker=style.marker(index))
        for x, method in zip(nodes, points, strict=True):
            if method.mean_acceptance_length_interval is not None:
                panel.vlines(x, *method.mean_acceptance_length_interval, color=style.color(index), linewidth=0.9)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(ScalarFormatter())
    panel.grid()


def _label(method: MethodSummary, labels: Mapping[str, str]) -> str:
    name = "plain decoding" if method.method == PLAIN else labels.get(method.method, method.method)
    return method.label.replace(method.method, name, 1)


def _failed(method: MethodSummary) -> tuple[str, ...]:
    return (f"{method.failed} failed",) if method.failed else ()


def _gain(method: MethodSummary) -> Cell:
    if method.gain is None:
        return Cell(NOTHING)
    bounds = method.gain.interval
    return Cell(f"{method.gain.tokens:+.2f}", () if bounds is None else (f"[{bounds[0]:+.2f}, {bounds[1]:+.2f}]",))


def _best(method: MethodSummary, figure: str) -> Emphasis:
    return Emphasis.BEST if figure in method.best_in else Emphasis.NONE


def _notes(summary: Summary) -> list[str]:
    done = min((method.finished + method.failed for method in summary.methods), default=0)
    incomplete = [] if summary.complete else [f"INCOMPLETE: {done} of {summary.planned} prompts"]
    rules = sorted({method.exactness for method in summary.methods if method.exactness is not None})
    return [
        *incomplete,
        f"acceptance rule: {', '.join(rules)}",
        "a round is one forward of the target; plain decoding emits one token in it",
        f"brackets: {summary.confidence:.0%} intervals over prompts",
        *([BOLD] if any(method.best_in for method in summary.methods) else []),
        *(summary.noise.notes if summary.noise is not None else []),
    ]
