"""The same prompts at several batch sizes: latency against throughput, its knee, and where speculation stops paying."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.reporting import style
from experiments.reporting.cells import EMPTY, number, speedup
from experiments.reporting.comparison import conditions_of
from experiments.reporting.formats import document, publish
from experiments.reporting.requests import CLOSED, in_flight, milliseconds
from experiments.reporting.table import Table, left
from experiments.reporting.verdicts import warning
from experiments.results.comparison import dataset_name, make_rows
from experiments.results.frame import Figures
from experiments.results.records import PLAIN
from experiments.results.runs import Run
from experiments.results.summary import MethodSummary

SETTING = "engine.max_batch_size"
_ABOUT_KNEES = "knee: the largest throughput for its latency (all users' tokens/s over the median TPOT)"
_RING: dict[str, Any] = {"linestyle": "none", "marker": "o", "markerfacecolor": "none", "markeredgecolor": "black"}


def report_batch_sweep(runs: Sequence[Run], folder: Path, missing: Sequence[str] = ()) -> list[Figures]:
    """Print the table and the sentences, and write them with the picture and the figures into a folder."""
    found = curves(runs)
    if not found:
        raise ValueError(
            "a picture over batch sizes needs runs at two of them, and times of requests: "
            "give engine.max_batch_size=1,2,4"
        )
    said, about = sentences(found), [*conditions_of(runs, dataset_name), CLOSED]
    made = table(found, notes=[*missing, *about, _ABOUT_KNEES])
    publish(
        folder,
        "batch_sweep",
        tables=[made],
        document=document(f"{'; '.join(made.notes)}.", made, said),
        figures={"curves": [{name: value for name, value in each.items() if name != "top"} for each in found]},
        said=said,
        drawn=lambda: [batch_sweep_plot(found, folder / "batch_sweep.png", "; ".join(about))],
    )
    return found


def curves(runs: Sequence[Run]) -> list[Figures]:
    """Return a curve per method and temperature, plain decoding's first; those with a single batch size are left out.

    Where several runs have one batch size, each has measured plain decoding: the first one's is taken.
    """
    points: dict[tuple[float, str], dict[int, Figures]] = {}
    for row in make_rows(runs):
        batch = int(row.run.manifest["config"]["engine"]["max_batch_size"])
        others = [part for part in row.name[1:] if not part.startswith(f"{SETTING}=")]
        entries = [(", ".join([row.name[0], *others]), row.method)]
        if row.plain is not None and row.plain is not row.method:
            entries.insert(0, (PLAIN, row.plain))
        for name, method in entries:
            found = method.requests
            if found is not None and found.tpot is not None and found.tpot.p50:
                points.setdefault((method.temperature, name), {}).setdefault(batch, _point(batch, method))
    made = [
        curve(name, temperature, [own[batch] for batch in sorted(own)])
        for (temperature, name), own in points.items()
        if len(own) > 1
    ]
    return sorted(made, key=lambda each: (each.temperature, each.method != PLAIN))


def _point(batch: int, method: MethodSummary) -> Figures:
    own = {name: method[name] for name in ("speedup", "speedup_interval", "not_lossless", "requests")}
    speed, tpot = method.requests.output_tokens_per_second, method.requests.tpot.p50
    return Figures(batch=batch, tokens_per_second=speed, tpot=tpot, **own)


def curve(name: str, temperature: float, points: Sequence[Figures]) -> Figures:
    """Return a method at several batch sizes, in their order.

    ``top`` is the point of the largest ratio of throughput to latency (the power of Kleinrock 1979), of equal ones that
    of the smallest batch. ``knee`` is its batch size; None if no larger one was tried, because the curve may still
    rise. ``crossings`` are where the speedup over plain decoding passes 1, on a straight line over the logarithm of
    the batch size: ``certain`` if the intervals of both sides leave out 1.
    """
    top = max(points, key=lambda point: (point.tokens_per_second / point.tpot, -point.batch))
    crossings = []
    for below, above in pairwise(point for point in points if point.speedup):
        if (below.speedup > 1) == (above.speedup > 1):
            continue
        share = (below.speedup - 1) / (below.speedup - above.speedup)
        at = math.exp(math.log(below.batch) + share * (math.log(above.batch) - math.log(below.batch)))
        bounds = (below.speedup_interval, above.speedup_interval)
        certain = all(each is not None and not each[0] <= 1 <= each[1] for each in bounds)
        stops = below.speedup > 1
        crossings.append(Figures(before=below.batch, after=above.batch, at=at, stops=stops, certain=certain))
    knee = None if top is points[-1] else top.batch
    return Figures(method=name, temperature=temperature, knee=knee, crossings=crossings, points=points, top=top)


def table(found: Sequence[Figures], *, notes: Sequence[str] = ()) -> Table:
    """A row per method and batch size."""
    return Table.of(
        [(each, point) for each in found for point in each.points],
        [
            ("T", lambda row: f"{row[0].temperature:g}"),
            (left("method", fold=True, min_width=16), lambda row: _name(row[0])),
            ("batch", lambda row: str(row[1].batch)),
            ("in flight,\nmean", lambda row: in_flight(row[1].requests, 1).partition(";")[0]),
            ("TTFT, ms\np50; p99", lambda row: milliseconds(row[1].requests.ttft)),
            ("TPOT, ms\np50; p99", lambda row: milliseconds(row[1].requests.tpot)),
            ("tokens/s,\none user", lambda row: number(row[1].requests.user_tokens_per_second, 1)),
            ("tokens/s,\nall users", lambda row: number(row[1].tokens_per_second, 1)),
            ("speedup", lambda row: EMPTY if row[0].method == PLAIN else speedup(row[1], best=False)),
            (left(""), lambda row: "knee" if row[1].batch == row[0].knee else ""),
        ],
        title="Latency and throughput by batch size",
        notes=notes,
        section=lambda row: id(row[0]),
    )


def sentences(found: Sequence[Figures]) -> list[str]:
    """Where each curve has its knee, and where speculation stops paying."""
    said = []
    several = len({each.temperature for each in found}) > 1
    for each in found:
        name, top = _name(each) + (f" at temperature {each.temperature:g}" if several else ""), each.top
        at = f"batch {top.batch}, {top.tokens_per_second:.0f} tokens/s at {1000 * top.tpot:.1f} ms per token"
        known = each.knee is not None
        said.append(f"{name}: knee at {at}" if known else f"{name}: no knee up to {at}; larger batches may bring more")
        if each.method != PLAIN:
            said.append(f"{name}: {_crossing_words(each)}")
    return said


def _name(each: Figures) -> str:
    return "plain decoding" if each.method == PLAIN else each.method


def _crossing_words(each: Figures) -> str:
    known = [point for point in each.points if point.speedup]
    if not known:
        return "no speedup is known"
    if not each.crossings:
        side = "faster" if known[0].speedup > 1 else "slower"
        return f"{side} than plain decoding at every batch size from {known[0].batch} to {known[-1].batch}"
    parts = []
    for crossing in each.crossings:
        verb = "stops to be faster" if crossing.stops else "begins to be faster"
        doubt = "" if crossing.certain else ", as far as the intervals tell: one of them holds 1"
        between = f"between batch {crossing.before} and {crossing.after}, at about {crossing.at:.1f}"
        parts.append(f"{verb} than plain decoding {between}{doubt}")
    return "; ".join(parts)


@style.styled()
def batch_sweep_plot(found: Sequence[Figures], path: Path, subtitle: str) -> Path:
    """Draw throughput over latency with the knees, and the speedup by batch size with the crossings."""
    several = len({each.temperature for each in found}) > 1
    figure = style.new_figure(style.PAGE, 3.5 + 0.13 * (len(found) // 3))
    left_, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    for index, each in enumerate(found):
        plain, color = each.method == PLAIN, style.color(index)
        label = style.wrapped(_name(each) + (f", T={each.temperature:g}" if several else ""), 40)
        x, y = [1000 * point.tpot for point in each.points], [point.tokens_per_second for point in each.points]
        left_.plot(x, y, **style.looks(index), linestyle="--" if plain else "-", label=label)
        # The curves are often close to each other.
        place, side = ((7, -12), "left") if plain else ((-7, 6), "right")
        for point, *at in zip(each.points, x, y, strict=True):
            style.note(left_, str(point.batch), (at[0], at[1]), place, color=color, ha=side, bbox=None)
        if each.knee is not None:
            at = ([1000 * each.top.tpot], [each.top.tokens_per_second])
            left_.plot(*at, **_RING, markersize=12, label="knee: largest throughput for its latency")
        if plain:
            continue
        points = [(point.batch, point.speedup, point.speedup_interval) for point in each.points if point.speedup]
        style.curve(right, points, index)
        for crossing in each.crossings:
            crossed = "speculation stops paying, or begins to"
            right.axvline(crossing.at, color=color, linestyle=":", linewidth=0.9, label=crossed)
            # At the bottom of the panel, where no curve is.
            style.note(
                right, f"{crossing.at:.1f}", (crossing.at, 0.03), xycoords=("data", "axes fraction"), color=color
            )
    left_.set(xlabel="time per further token of one user (ms, median)", ylabel="output tokens/s of all users")
    left_.set_title("numbers: batch size; up and left is better")
    left_.margins(0.12)
    left_.set_ylim(bottom=0)
    style.plain_log(right.xaxis, sorted({point.batch for each in found for point in each.points}), base=2)
    right.set(xlabel="batch size", ylabel="tokens/s over plain decoding's", title="above 1, speculation pays")
    style.baseline(right)
    right.set_ylim(0, max(1.1, right.get_ylim()[1]))
    style.legend_of(figure, left_, right)
    bad = [each.method for each in found if any(point.not_lossless for point in each.points)]
    text = "Latency and throughput by batch size, and where speculation pays, with intervals over prompts"
    return style.finish(figure, path, text, subtitle, alarm=warning(bad))
