"""A sweep over batch sizes as a table, a picture and sentences."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from experiments.reporting import markdown, style, terminal
from experiments.reporting.cells import NOTHING, number, times, with_interval
from experiments.reporting.requests import CLOSED
from experiments.reporting.table import Cell, Column, Table
from experiments.reporting.verdicts import warning
from experiments.results.batch_sweep import Curve, curves
from experiments.results.comparison import dataset_name
from experiments.results.plain_json import json_text
from experiments.results.requests import Spread
from experiments.results.runs import Run

COLUMNS = (
    Column("T"),
    Column("method", "left", fold=True, min_width=16),
    Column("batch"),
    Column("in flight,\nmean"),
    Column("TTFT, ms\np50; p99"),
    Column("TPOT, ms\np50; p99"),
    Column("tokens/s,\none user"),
    Column("tokens/s,\nall users"),
    Column("speedup"),
    Column("", "left"),
)
_KNEE = "knee"
_ABOUT_KNEES = "knee: the largest throughput for its latency (all users' tokens/s over the median TPOT)"


def report_batch_sweep(runs: Sequence[Run], folder: Path) -> list[Curve]:
    """Print the table and the sentences, and write them with the picture and the figures into a folder.

    Raises:
        ValueError: No method has figures at two batch sizes.
    """
    found = curves(runs)
    if not found:
        raise ValueError(
            "a picture over batch sizes needs runs at two of them, and times of requests: "
            "give engine.max_batch_size=1,2,4"
        )
    console = terminal.console()
    said = sentences(found)
    notes = [*_conditions(runs), CLOSED, _ABOUT_KNEES]
    made = table(found, notes=notes)
    console.print(terminal.render(made, terminal.Frame.NARROW))
    terminal.say(console, *said)
    document = [f"{'; '.join(notes)}.", "", markdown.render(made).rstrip(), "", *(f"- {each}" for each in said)]
    text, figures = folder / "batch_sweep.md", folder / "batch_sweep.json"
    text.write_text("\n".join(document) + "\n", encoding="utf-8")
    figures.write_text(json_text({"curves": [_figures(curve) for curve in found]}), encoding="utf-8")
    picture = batch_sweep_plot(found, folder / "batch_sweep.png", "; ".join([*_conditions(runs), CLOSED]))
    terminal.list_written(console, [text, figures, picture])
    return found


def table(found: Sequence[Curve], *, notes: Sequence[str] = ()) -> Table:
    """Returns a row per method and batch size."""
    made = Table(COLUMNS, "Latency and throughput by batch size", notes)
    for curve in found:
        for point in curve.points:
            felt = point.method.requests
            assert felt is not None, "it has times"
            made.add(
                f"{curve.temperature:g}",
                "plain decoding" if curve.plain else curve.name,
                str(point.batch),
                NOTHING if felt.concurrency is None else f"{felt.concurrency.running:.1f}",
                _milliseconds(felt.ttft),
                _milliseconds(felt.tpot),
                number(felt.user_tokens_per_second, 1),
                number(point.tokens_per_second, 1),
                Cell(NOTHING) if curve.plain else with_interval(times(point.speedup), point.speedup_interval),
                _KNEE if point is curve.knee and curve.knee_is_inside else "",
                end_section=point is curve.points[-1],
            )
    return made


def sentences(found: Sequence[Curve]) -> list[str]:
    """Returns where each curve has its knee, and where speculation stops paying."""
    said = []
    temperatures = {curve.temperature for curve in found}
    for curve in found:
        name = "plain decoding" if curve.plain else curve.name
        name += f" at temperature {curve.temperature:g}" if len(temperatures) > 1 else ""
        knee = curve.knee
        at = f"{knee.tokens_per_second:.0f} tokens/s at {1000 * knee.tpot:.1f} ms per token"
        if curve.knee_is_inside:
            said.append(f"{name}: knee at batch {knee.batch}, {at}")
        else:
            said.append(f"{name}: no knee up to batch {knee.batch}, {at}; larger batches may bring more")
        if not curve.plain:
            said.append(f"{name}: {_crossing_words(curve)}")
    return said


def _crossing_words(curve: Curve) -> str:
    known = [point for point in curve.points if point.speedup]
    if not known:
        return "no speedup is known"
    if not curve.crossings:
        side = "faster" if (known[0].speedup or 0) > 1 else "slower"
        return f"{side} than plain decoding at every batch size from {known[0].batch} to {known[-1].batch}"
    parts = []
    for crossing in curve.crossings:
        verb = "stops to be faster" if crossing.stops else "begins to be faster"
        doubt = "" if crossing.certain else ", as far as the intervals tell: one of them holds 1"
        parts.append(
            f"{verb} than plain decoding between batch {crossing.before} and {crossing.after}, "
            f"at about {crossing.at:.1f}{doubt}"
        )
    return "; ".join(parts)


@style.styled()
def batch_sweep_plot(found: Sequence[Curve], path: Path, subtitle: str) -> Path:
    """Draw throughput over latency with the knees, and the speedup by batch size with the crossings."""
    several = len({curve.temperature for curve in found}) > 1
    figure = style.new_figure(style.PAGE, 3.5 + 0.13 * (len(found) // 3))
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    handles, labels = [], []
    for index, curve in enumerate(found):
        looks = {"color": style.color(index), "marker": style.marker(index)}
        x = [1000 * point.tpot for point in curve.points]
        y = [point.tokens_per_second for point in curve.points]
        (line,) = left.plot(x, y, **looks, linestyle="--" if curve.plain else "-")
        for point, latency, rate in zip(curve.points, x, y, strict=True):
            beside = (7, -12) if curve.plain else (-7, 6)  # the curves are often close to each other
            place: dict[str, Any] = {"xytext": beside, "textcoords": "offset points", "fontsize": style.SMALLEST}
            place["ha"] = "left" if curve.plain else "right"
            left.annotate(str(point.batch), (latency, rate), color=style.color(index), **place)
        if curve.knee_is_inside:
            knee = curve.knee
            ring = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "markeredgecolor": "black"}
            left.plot([1000 * knee.tpot], [knee.tokens_per_second], linestyle="none", **ring)
        name = "plain decoding" if curve.plain else curve.name
        handles.append(line)
        labels.append(style.wrapped(name + (f", T={curve.temperature:g}" if several else ""), 40))
        if not curve.plain:
            _speedups(right, curve, index)
    _finish(left, right, sorted({point.batch for curve in found for point in curve.points}))
    if any(curve.knee_is_inside for curve in found):
        ring = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgecolor": "black"}
        handles.append(Line2D([], [], linestyle="none", **ring))
        labels.append("knee: largest throughput for its latency")
    if any(curve.crossings for curve in found):
        handles.append(Line2D([], [], color="black", linestyle=":", linewidth=0.9))
        labels.append("speculation stops paying, or begins to")
    style.legend(figure, handles, labels)
    bad = [curve.name for curve in found if any(point.method.not_lossless for point in curve.points)]
    text = "Latency and throughput by batch size, and where speculation pays, with intervals over prompts"
    style.title(figure, text, subtitle, alarm=warning(bad))
    return style.save(figure, path)


def _speedups(axes: Axes, curve: Curve, index: int) -> None:
    known = [(point.batch, point.speedup, point.speedup_interval) for point in curve.points if point.speedup]
    looks: dict[str, Any] = {"color": style.color(index), "marker": style.marker(index)}
    axes.plot([batch for batch, _, _ in known], [speedup for _, speedup, _ in known], **looks)
    for batch, _, interval in known:
        if interval is not None:
            axes.vlines(batch, *interval, color=style.color(index), linewidth=0.9)
    for crossing in curve.crossings:
        axes.axvline(crossing.at, color=style.color(index), linestyle=":", linewidth=0.9)
        # At the bottom of the panel, where no curve is.
        where: dict[str, Any] = {
            "xy": (crossing.at, 0.02),
            "xycoords": ("data", "axes fraction"),
            "fontsize": style.SMALLEST,
        }
        axes.annotate(f" {crossing.at:.1f}", **where, color=style.color(index))


def _finish(left: Axes, right: Axes, batches: Sequence[int]) -> None:
    left.set_xlabel("time per further token of one user (ms, median)")
    left.set_ylabel("output tokens/s of all users")
    left.set_title("numbers: batch size; up and left is better")
    left.margins(0.12)
    left.set_ylim(bottom=0)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_locator(FixedLocator(list(batches)))
    right.xaxis.set_minor_locator(NullLocator())
    right.xaxis.set_major_formatter(ScalarFormatter())
    right.set_xlabel("batch size")
    right.set_ylabel("tokens/s over plain decoding's")
    right.set_title("above 1, speculation pays")
    style.baseline(right)
    right.set_ylim(0, max(1.1, right.get_ylim()[1]))
    for axes in (left, right):
        axes.grid()


def _conditions(runs: Sequence[Run]) -> list[str]:
    """What all runs share, in words; each run's own value where they differ."""
    facts = [
        {run.manifest["target"]["name"] for run in runs},
        {run.manifest["dtype"] for run in runs},
        {run.manifest["device"] for run in runs},
        {dataset_name(run) for run in runs},
    ]
    said = [" or ".join(sorted(values)) for values in facts]
    noisy = sum(run.summary.noise is not None and run.summary.noise.noisy for run in runs)
    return [*said, *([f"NOISY TIMINGS in {noisy} of {len(runs)} runs"] if noisy else [])]


def _figures(curve: Curve) -> dict[str, object]:
    return {
        "method": curve.name,
        "temperature": curve.temperature,
        "knee": curve.knee.batch if curve.knee_is_inside else None,
        "crossings": [asdict(crossing) for crossing in curve.crossings],
        "points": [
            {
                "batch": point.batch,
                "tokens_per_second": point.tokens_per_second,
                "speedup": point.speedup,
                "speedup_interval": point.speedup_interval,
                "requests": None if point.method.requests is None else asdict(point.method.requests),
            }
            for point in curve.points
        ],
    }


def _milliseconds(spread: Spread | None) -> str:
    return NOTHING if spread is None else f"{1000 * spread.p50:.1f}; {1000 * spread.p99:.1f}"
