"""The chapter's pictures: their figures, how they are drawn, and a digest that tells whether a file is current."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.bench.chapter.figures import LLAMA, SERVED_8B
from experiments.bench.chapter.models import A100, GIVEN, H100, LLAMA_8B, Example, this_machine
from experiments.reporting import style
from specdec.physics.precision import Precision

Data = dict[str, Any]
"""The texts and numbers that a picture shows."""


def digest(data: Data) -> str:
    """Return what tells apart two pictures of different figures; their last digits differ between machines."""

    def rounded(found: Any) -> Any:
        if isinstance(found, dict):
            return {key: rounded(value) for key, value in found.items()}
        if isinstance(found, list | tuple):
            return [rounded(value) for value in found]
        return float(f"{found:.9g}") if isinstance(found, float) else found

    return hashlib.sha256(json.dumps(rounded(data), sort_keys=True).encode()).hexdigest()


def save(name: str, path: Path) -> None:
    """Draw a picture into a file, which keeps its digest."""
    data, draw = PICTURES[name]
    found = data()
    with style.styled():
        draw(found).savefig(path, metadata={"Description": digest(found)})


def _note(axes: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **look: Any) -> None:
    """Write a text beside a point, so many printer's points from it."""
    axes.annotate(text, point, offset, textcoords="offset points", **{"fontsize": style.SMALLEST, **look})


def roofline_data() -> Data:
    """Three roofs, and Llama-3.1-8B's forwards under each."""
    context, drafted, devices = GIVEN.context, GIVEN.fixed_draft, []
    for device, dtype in ((H100, "float16"), (A100, "float16"), (this_machine(), "float32")):
        roof = device.roof(dtype)
        example = Example(LLAMA_8B, roof, Precision.of(dtype))
        forwards = [("prefill", f"{context:,}", example.prefill(context))]
        forwards += [("decode", str(rows), example.decode(rows, context)) for rows in (1, 32, 128)]
        forwards += [("verify", str(rows), example.decode(rows, context, drafted)) for rows in (1, 32, 128)]
        points = [[kind, label, each.intensity, each.flops_rate] for kind, label, each in forwards]
        peaks = {"bandwidth": roof.bandwidth, "flops": roof.flops, "ridge": roof.ridge}
        devices.append({"title": device.title, **peaks, "points": points})
    return {"devices": devices, "context": context, "drafted": drafted}


def draw_roofline(data: Data) -> Figure:
    """Rates over operations per byte, one roof per device."""
    figure = style.new_figure(style.PAGE, 4.2)
    axes = figure.subplots()
    lowest = min(point[3] for device in data["devices"] for point in device["points"]) / 1e12 / 6
    low, high = 0.25, 3000.0
    grid = np.geomspace(low, high, 300)
    kinds = {"prefill": "s", "decode": "o", "verify": "^"}
    for number, device in enumerate(data["devices"]):
        color, flops, ridge = style.color(number), device["flops"], device["ridge"]
        axes.plot(grid, np.minimum(flops, grid * device["bandwidth"]) / 1e12, color=color, linewidth=1.6, zorder=2)
        axes.plot([ridge, ridge], [lowest, flops / 1e12], color=color, linewidth=0.7, linestyle=":", zorder=1)
        _note(axes, f"ridge {ridge:.3g}", (ridge, lowest), (3, 4), rotation=90, color=color)
        rate = f"{flops / 1e12:,.4g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.3g} GFLOP/s"
        _note(
            axes,
            f"{device['title'].removeprefix('NVIDIA ')}\n{rate}",
            (high, flops / 1e12),
            (5, 2 - 4 * number),
            va="bottom" if number == 0 else "top" if number == 1 else "center",
            color=color,
            annotation_clip=False,
            fontsize=None,
        )
        for kind, label, x, y in device["points"]:
            axes.plot(x, y / 1e12, kinds[kind], color=color, markersize=6, markeredgecolor="white", zorder=4)
            if number == 0 and kind != "prefill":
                _note(axes, label, (x, y / 1e12), (-3, 5), ha="right", color=color)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(lowest, 3e3))
    axes.set(xlabel="arithmetic intensity (FLOP per byte)", ylabel="most that the device allows (TFLOP/s)")
    named = {
        "prefill": f"prefill of {data['context']:,} tokens",
        "decode": "decode, by rows",
        "verify": f"verify {data['drafted']} drafted tokens, by rows",
    }
    handles = [axes.plot([], [], kinds[kind], color=style.FAINT, markersize=6)[0] for kind in named]
    style.legend(figure, handles, list(named.values()), ncols=3)
    style.title(
        figure,
        "Llama-3.1-8B under three roofs",
        f"{data['context']:,} positions per row; 16 bits on the GPUs, float32 on the processor. Where a roof slopes, "
        f"memory is the limit; where it is flat, arithmetic",
    )
    return figure


def step_data() -> Data:
    """Seconds of the parts of a step of Llama-3.1-8B on an H100, by rows."""
    roof, batches, panels = LLAMA.roof, sorted({round(2 ** (power / 6)) for power in range(55)}), []
    for context in (GIVEN.context, GIVEN.long_prompt):
        parts: dict[str, list[float]] = {"weights": [], "cache": [], "compute": [], "seconds": []}
        for rows in batches:
            work, kv = LLAMA.decode(rows, context).work, rows * context * LLAMA.kv
            parts["weights"].append((work.bytes - kv) / roof.bandwidth)
            parts["cache"].append(kv / roof.bandwidth)
            parts["compute"].append(work.flops / roof.flops)
            parts["seconds"].append(roof.least_seconds(work))
        fits = SERVED_8B.most_rows(GIVEN.usable * H100.memory, length=context)
        panels.append({"context": context, **parts, "fits": fits})
    return {"batches": batches, "panels": panels}


def draw_step(data: Data) -> Figure:
    """Stacked reads, and the arithmetic as a line; a panel per context."""
    figure = style.new_figure(style.PAGE, 3.3)
    panels = figure.subplots(1, len(data["panels"]), sharey=True)
    batches = data["batches"]
    handles: list[object] = []
    for axes, panel in zip(panels, data["panels"], strict=True):
        weights, cache = 1e3 * np.array(panel["weights"]), 1e3 * np.array(panel["cache"])
        first = axes.fill_between(batches, 0, weights, color=style.COLORS[0], alpha=0.75, linewidth=0)
        second = axes.fill_between(batches, weights, weights + cache, color=style.COLORS[5], alpha=0.75, linewidth=0)
        (line,) = axes.plot(batches, 1e3 * np.array(panel["compute"]), color=style.COLORS[4], linewidth=2, zorder=2.5)
        axes.axvspan(panel["fits"], batches[-1], facecolor="white", alpha=0.7, linewidth=0, zorder=3)
        limit = axes.axvline(panel["fits"], color="black", linestyle="--", linewidth=0.9, zorder=5)
        _note(
            axes,
            f"{panel['fits']} slots fit",
            (panel["fits"], 1),
            (-3, -2),
            xycoords=("data", "axes fraction"),
            ha="right",
            va="top",
            rotation=90,
        )
        axes.set_xscale("log", base=2)
        ticks = [2**power for power in range(10)]
        axes.set_xticks(ticks, [str(rows) for rows in ticks])
        axes.minorticks_off()
        axes.set(xlim=(batches[0], batches[-1]), ylim=(0, 27), xlabel="rows of the batch")
        axes.set_title(f"{panel['context']:,} positions per row")
        axes.xaxis.grid(False)
        handles = [first, second, line, limit]
    panels[0].set_ylabel("milliseconds of a step")
    labels = ["reading the weights", "reading keys and values", "computing", "the memory is full"]
    style.legend(figure, handles, labels, ncols=4)
    style.title(
        figure,
        "A decoding step takes as long as the higher of both: reading (areas) or computing (line)",
        "Llama-3.1-8B in 16 bits on an H100; least times",
    )
    return figure


PICTURES: dict[str, tuple[Callable[[], Data], Callable[[Data], Figure]]] = {
    "chapter_roofline": (roofline_data, draw_roofline),
    "chapter_step": (step_data, draw_step),
}
"""Every picture, by the name of its file in ``docs/images``: what it shows, and how that is drawn."""
