"""The pictures of a run: its points under the device's roof, and what verifying more nodes costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.bench.engine.figures import Results
from experiments.reporting import style
from specdec.physics.bounds import Roof, Work


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw what the results have points for; returns the pictures' paths."""
    made = []
    with style.styled():
        if results.get("steps"):
            made.append(_roofline(results, folder / "roofline.png"))
            made.append(_verify_cost(results, folder / "verify_cost.png"))
    return made


def _subtitle(results: Results) -> str:
    device, model = results["device"], results["model"]
    threads = "" if device["type"] == "cuda" else f", CPU threads: {device['threads']}"
    return f"{model['title']} in {model['dtype']}, {device['name']}{threads}"


def _roofline(results: Results, path: Path) -> Path:
    """Operations per second against operations per byte, on logarithmic axes."""
    device = results["device"]
    copy, roof = Roof(device["copy"], device["flops"]), Roof(max(device["copy"], device["read"]), device["flops"])
    figure = style.new_figure(style.PAGE, 3.6)
    axes = figure.subplots()
    series: dict[str, list[tuple[float, float]]] = {}
    for step in _best_steps(results["steps"]):
        kind = "plain steps" if step["nodes"] == 1 else "verify steps"
        rows = f"{step['batch']} row{'s' if step['batch'] > 1 else ''}"
        point = Work(step["bytes"], step["flops"]).intensity, step["flops"] / step["seconds"]
        series.setdefault(f"{kind}, {rows}", []).append(point)
    for each in results.get("prefill", []):
        point = Work(each["bytes"], each["flops"]).intensity, each["flops"] / each["seconds"]
        series.setdefault("prefill", []).append(point)
    everything = [x for points in series.values() for x, _ in points]
    grid = np.geomspace(min(everything) / 2, max(*everything, roof.ridge) * 3, 200)
    axes.plot(grid, [roof.attainable(x) / 1e12 for x in grid], color="black", label="roof, measured")
    if copy != roof:
        axes.plot(grid, [copy.attainable(x) / 1e12 for x in grid], color="black", linestyle=":", label="roof of copies")
    for number, (name, points) in enumerate(series.items()):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, [y / 1e12 for y in ys], style.marker(number), color=style.color(number), label=name)
    axes.set_xscale("log")
    _logarithmic(axes)
    axes.set_xlabel("operations per byte of weights and KV")
    axes.set_ylabel("TFLOP/s")
    axes.grid(which="major")
    style.title(figure, "Steps and prefill under the device's roof", _subtitle(results))
    style.legend(figure, *axes.get_legend_handles_labels())
    return style.save(figure, path)


def _verify_cost(results: Results, path: Path) -> Path:
    """The time of a verify step over a plain one, against nodes, with a line per batch size."""
    steps = _best_steps(results["steps"])
    base = results["grid"]["context"][0]
    batches = sorted({step["batch"] for step in steps if step["context"] == base})
    figure = style.new_figure(style.PAGE, 3.2)
    left, right = figure.subplots(1, 2)
    highest = [1.0]
    for number, batch in enumerate(batches):
        points = sorted((s for s in steps if s["batch"] == batch and s["context"] == base), key=lambda s: s["nodes"])
        plain = next((s["seconds"] for s in points if s["nodes"] == 1), None)
        if plain is None:
            continue
        nodes = [s["nodes"] for s in points]
        look = {"color": style.color(number), "marker": style.marker(number)}
        name = f"{batch} row{'s' if batch > 1 else ''}"
        left.plot(nodes, [1000 * s["seconds"] for s in points], label=name, **look)
        left.plot(nodes, [1000 * s["least_seconds"] for s in points], color=style.color(number), linestyle=":")
        highest.append(max(s["seconds"] for s in points) / plain)
        right.plot(nodes, [s["seconds"] / plain for s in points], label=name, **look)
    handles, labels = left.get_legend_handles_labels()
    dotted = left.plot([], [], color="black", linestyle=":")
    for axes, label in ((left, "one forward (ms)"), (right, "verify / plain step")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("nodes per row, root included")
        axes.set_ylabel(label)
        axes.grid()
    _logarithmic(left)
    if max(highest) > 10:
        _logarithmic(right)
    else:
        right.set_ylim(bottom=0)
    right.axhline(1.0, color="black", linewidth=0.9, linestyle="--", zorder=1)
    style.title(figure, f"What verifying more nodes costs, context {base}", _subtitle(results))
    style.legend(figure, [*handles, *dotted], [*labels, "least possible"])
    return style.save(figure, path)


def _logarithmic(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with numbers at 1, 2 and 5 of every decade."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=30))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _best_steps(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the fastest step of every size, over backends and executors."""
    best: dict[tuple[int, int, int], dict[str, Any]] = {}
    for step in steps:
        size = step["batch"], step["nodes"], step["context"]
        if size not in best or step["seconds"] < best[size]["seconds"]:
            best[size] = step
    return list(best.values())
