"""A sweep over batch sizes as a table, a picture and sentences."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.reporting import style, terminal
from experiments.reporting.cells import EMPTY, NOTHING, number, speedup
from experiments.reporting.comparison import conditions_of
from experiments.reporting.formats import document, write_texts
from experiments.reporting.requests import CLOSED, milliseconds
from experiments.reporting.table import Table, left
from experiments.reporting.verdicts import warning
from experiments.results.batch_sweep import Curve, Point, curves
from experiments.results.comparison import dataset_name
from experiments.results.plain_json import json_text
from experiments.results.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ABOUT_KNEES = "knee: the largest throughput for its latency (all users' tokens/s over the median TPOT)"
_RING: dict[str, Any] = {"linestyle": "none", "marker": "o", "markerfacecolor": "none", "markeredgecolor": "black"}


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
    console, said = terminal.console(), sentences(found)
    about = [*conditions_of(runs, dataset_name), CLOSED]
    made = table(found, notes=[*about, _ABOUT_KNEES])
    console.print(terminal.render(made, terminal.Frame.NARROW))
    terminal.say(console, *said)
    texts = {
        "batch_sweep.md": document(f"{'; '.join(made.notes)}.", made, said),
        "batch_sweep.json": json_text({"curves": [_figures(curve) for curve in found]}),
    }
    written = write_texts(folder, texts)
    picture = batch_sweep_plot(found, folder / "batch_sweep.png", "; ".join(about))
    terminal.list_written(console, [*written, picture])
    return found


def table(found: Sequence[Curve], *, notes: Sequence[str] = ()) -> Table:
    """A row per method and batch size."""

    def in_flight(row: tuple[Curve, Point]) -> str:
        felt = row[1].method.requests
        return NOTHING if felt is None or felt.concurrency is None else f"{felt.concurrency.running:.1f}"

    def user_speed(row: tuple[Curve, Point]) -> str:
        felt = row[1].method.requests
        return number(None if felt is None else felt.user_tokens_per_second, 1)

    return Table.of(
        [(curve, point) for curve in found for point in curve.points],
        [
            ("T", lambda row: f"{row[0].temperature:g}"),
            (left("method", fold=True, min_width=16), lambda row: _name(row[0])),
            ("batch", lambda row: str(row[1].batch)),
            ("in flight,\nmean", in_flight),
            ("TTFT, ms\np50; p99", lambda row: milliseconds(row[1].method.requests and row[1].method.requests.ttft)),
            ("TPOT, ms\np50; p99", lambda row: milliseconds(row[1].method.requests and row[1].method.requests.tpot)),
            ("tokens/s,\none user", user_speed),
            ("tokens/s,\nall users", lambda row: number(row[1].tokens_per_second, 1)),
            ("speedup", lambda row: EMPTY if row[0].plain else speedup(row[1].method)),
            (left(""), lambda row: "knee" if row[1] is row[0].knee and row[0].knee_is_inside else ""),
        ],
        title="Latency and throughput by batch size",
        notes=notes,
        section=lambda row: id(row[0]),
    )


def sentences(found: Sequence[Curve]) -> list[str]:
    """Where each curve has its knee, and where speculation stops paying."""
    said = []
    several = len({curve.temperature for curve in found}) > 1
    for curve in found:
        name, knee = _name(curve) + (f" at temperature {curve.temperature:g}" if several else ""), curve.knee
        at = f"{knee.tokens_per_second:.0f} tokens/s at {1000 * knee.tpot:.1f} ms per token"
        if curve.knee_is_inside:
            said.append(f"{name}: knee at batch {knee.batch}, {at}")
        else:
            said.append(f"{name}: no knee up to batch {knee.batch}, {at}; larger batches may bring more")
        if not curve.plain:
            said.append(f"{name}: {_crossing_words(curve)}")
    return said


def _name(curve: Curve) -> str:
    return "plain decoding" if curve.plain else curve.name


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
        between = f"between batch {crossing.before} and {crossing.after}, at about {crossing.at:.1f}"
        parts.append(f"{verb} than plain decoding {between}{doubt}")
    return "; ".join(parts)


@style.styled()
def batch_sweep_plot(found: Sequence[Curve], path: Path, subtitle: str) -> Path:
    """Draw throughput over latency with the knees, and the speedup by batch size with the crossings."""
    from matplotlib.lines import Line2D

    several = len({curve.temperature for curve in found}) > 1
    figure = style.new_figure(style.PAGE, 3.5 + 0.13 * (len(found) // 3))
    left_, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    handles: list[object] = []
    labels = []
    for index, curve in enumerate(found):
        x, y = [1000 * point.tpot for point in curve.points], [point.tokens_per_second for point in curve.points]
        (line,) = left_.plot(x, y, **style.looks(index), linestyle="--" if curve.plain else "-")
        # The curves are often close to each other.
        place, side = ((7, -12), "left") if curve.plain else ((-7, 6), "right")
        for point, latency, rate in zip(curve.points, x, y, strict=True):
            style.note(left_, str(point.batch), (latency, rate), place, color=style.color(index), ha=side, bbox=None)
        if curve.knee_is_inside:
            left_.plot([1000 * curve.knee.tpot], [curve.knee.tokens_per_second], **_RING, markersize=12)
        handles.append(line)
        labels.append(style.wrapped(_name(curve) + (f", T={curve.temperature:g}" if several else ""), 40))
        if not curve.plain:
            _speedups(right, curve, index)
    left_.set(xlabel="time per further token of one user (ms, median)", ylabel="output tokens/s of all users")
    left_.set_title("numbers: batch size; up and left is better")
    left_.margins(0.12)
    left_.set_ylim(bottom=0)
    right.set_xscale("log", base=2)
    style.plain_log(right.xaxis, sorted({point.batch for curve in found for point in curve.points}))
    right.set(xlabel="batch size", ylabel="tokens/s over plain decoding's", title="above 1, speculation pays")
    style.baseline(right)
    right.set_ylim(0, max(1.1, right.get_ylim()[1]))
    for axes in (left_, right):
        axes.grid()
    if any(curve.knee_is_inside for curve in found):
        handles.append(Line2D([], [], **_RING, markersize=9))
        labels.append("knee: largest throughput for its latency")
    if any(curve.crossings for curve in found):
        handles.append(Line2D([], [], color="black", linestyle=":", linewidth=0.9))
        labels.append("speculation stops paying, or begins to")
    style.legend(figure, handles, labels)
    bad = [curve.name for curve in found if any(point.method.not_lossless for point in curve.points)]
    text = "Latency and throughput by batch size, and where speculation pays, with intervals over prompts"
    style.title(figure, text, subtitle, alarm=warning(bad))
    return style.save(figure, path)


def _speedups(axes: "Axes", curve: Curve, index: int) -> None:
    known = [point for point in curve.points if point.speedup]
    color = style.color(index)
    axes.plot([point.batch for point in known], [point.speedup or 0.0 for point in known], **style.looks(index))
    for point in known:
        if point.speedup_interval is not None:
            axes.vlines(point.batch, *point.speedup_interval, color=color, linewidth=0.9)
    for crossing in curve.crossings:
        axes.axvline(crossing.at, color=color, linestyle=":", linewidth=0.9)
        # At the bottom of the panel, where no curve is.
        at, where = (crossing.at, 0.03), ("data", "axes fraction")
        style.note(axes, f"{crossing.at:.1f}", at, xycoords=where, color=color)


def _figures(curve: Curve) -> dict[str, object]:
    return {
        "method": curve.name,
        "temperature": curve.temperature,
        "knee": curve.knee.batch if curve.knee_is_inside else None,
        "crossings": [asdict(crossing) for crossing in curve.crossings],
        "points": [
            {
                **{
                    name: getattr(point, name) for name in ("batch", "tokens_per_second", "speedup", "speedup_interval")
                },
                "requests": None if point.method.requests is None else asdict(point.method.requests),
            }
            for point in curve.points
        ],
    }
