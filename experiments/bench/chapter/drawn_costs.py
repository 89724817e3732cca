"""Pictures of what forwards cost: the roofline, a step by its batch, the cache by architecture."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.bench.chapter.examples import Example
from experiments.bench.chapter.figures import Figures
from experiments.bench.chapter.given import GIVEN
from experiments.bench.chapter.models import A100, H100, HALF, LLAMA_8B
from experiments.bench.chapter.picture import Data
from experiments.bench.chapter.tables import KV_MODELS
from experiments.reporting import style
from specdec.physics.capacity import kv_bytes_per_position
from specdec.physics.precision import Precision

# ---------------------------------------------------------------- the roofline


def roofline_data() -> Data:
    """Three roofs, and Llama-3.1-8B's forwards under each."""
    devices = []
    machine = Figures().machine
    for device, dtype in ((H100, "float16"), (A100, "float16"), (machine, "float32")):
        roof = device.roof(dtype)
        example = Example(LLAMA_8B, roof, Precision.of(dtype))
        context, drafted = GIVEN.context, GIVEN.fixed_draft
        forwards = [("prefill", f"{context:,}", example.prefill(context))]
        forwards += [("decode", str(rows), example.decode(rows, context)) for rows in (1, 32, 128)]
        forwards += [("verify", str(rows), example.decode(rows, context, drafted)) for rows in (1, 32, 128)]
        points = [[kind, label, each.intensity, each.flops_rate] for kind, label, each in forwards]
        devices.append(
            {
                "title": device.title,
                "bandwidth": roof.bandwidth,
                "flops": roof.flops,
                "ridge": roof.ridge,
                "points": points,
            }
        )
    return {"devices": devices, "context": GIVEN.context, "drafted": GIVEN.fixed_draft}


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
        axes.annotate(
            f"ridge {ridge:.3g}",
            (ridge, lowest),
            (3, 4),
            textcoords="offset points",
            rotation=90,
            fontsize=style.SMALLEST,
            color=color,
        )
        axes.annotate(
            f"{device['title'].removeprefix('NVIDIA ')}\n{_rate(flops)}",
            (high, flops / 1e12),
            (5, 2 - 4 * number),
            textcoords="offset points",
            va="bottom" if number == 0 else "top" if number == 1 else "center",
            color=color,
            annotation_clip=False,
        )
        for kind, label, x, y in device["points"]:
            axes.plot(x, y / 1e12, kinds[kind], color=color, markersize=6, markeredgecolor="white", zorder=4)
            if number == 0 and kind != "prefill":
                axes.annotate(
                    label,
                    (x, y / 1e12),
                    (-3, 5),
                    textcoords="offset points",
                    ha="right",
                    fontsize=style.SMALLEST,
                    color=color,
                )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(lowest, 3e3)
    axes.set_xlabel("arithmetic intensity (FLOP per byte)")
    axes.set_ylabel("most that the device allows (TFLOP/s)")
    axes.grid(True, which="major")
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


def _rate(flops: float) -> str:
    return f"{flops / 1e12:,.4g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.3g} GFLOP/s"


# ---------------------------------------------------------------- a step by its batch


def step_data() -> Data:
    """Seconds of the parts of a step of Llama-3.1-8B on an H100, by rows."""
    example, roof = Figures.llama, Figures.llama.roof
    batches = sorted({round(2 ** (power / 6)) for power in range(55)})
    panels = []
    for context in (GIVEN.context, GIVEN.long_prompt):
        weights, cache, compute, seconds = [], [], [], []
        for rows in batches:
            work = example.decode(rows, context).work
            kv = rows * context * example.kv
            weights.append((work.bytes - kv) / roof.bandwidth)
            cache.append(kv / roof.bandwidth)
            compute.append(work.flops / roof.flops)
            seconds.append(roof.least_seconds(work))
        served = Figures().served_8b
        panels.append(
            {
                "context": context,
                "weights": weights,
                "cache": cache,
                "compute": compute,
                "seconds": seconds,
                "fits": served.most_rows(Figures.usable * H100.memory, length=context),
            }
        )
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
        axes.annotate(
            f"{panel['fits']} slots fit",
            (panel["fits"], 1),
            (-3, -2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right",
            va="top",
            rotation=90,
            fontsize=style.SMALLEST,
        )
        axes.set_xscale("log", base=2)
        ticks = [2**power for power in range(10)]
        axes.set_xticks(ticks, [str(rows) for rows in ticks])
        axes.minorticks_off()
        axes.set_xlim(batches[0], batches[-1])
        axes.set_ylim(0, 27)
        axes.set_title(f"{panel['context']:,} positions per row")
        axes.set_xlabel("rows of the batch")
        axes.grid(True, axis="y")
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


# ---------------------------------------------------------------- the cache by architecture


def kv_data() -> Data:
    """Bytes per position and model."""
    rows: list[list[Any]] = [[name, kind, kv_bytes_per_position(shape, HALF)] for name, kind, shape in KV_MODELS]
    figures = Figures()
    rows.append(["DeepSeek-V3 without latents", f"MHA, {figures.latent_heads} heads", figures.latent_equivalent])
    return {"rows": sorted(rows, key=lambda row: row[2])}


def draw_kv(data: Data) -> Figure:
    """A line per model, on a logarithmic scale."""
    figure = style.new_figure(style.PAGE, 2.9)
    axes = figure.subplots()
    kinds = {"MHA": 4, "GQA": 0, "MQA": 2, "MLA": 3}
    for place, (_, kind, size) in enumerate(data["rows"]):
        number = kinds[kind[:3]]
        axes.plot([8e3, size], [place, place], color=style.color(number), linewidth=2.4, zorder=2)
        axes.plot(size, place, style.marker(number), color=style.color(number), markersize=6, zorder=3)
        axes.annotate(
            f"{size / 1024:,.0f} KiB" if size >= 1e4 else f"{size:,.0f} B",
            (size, place),
            (7, 0),
            textcoords="offset points",
            va="center",
            fontsize=style.SMALLEST,
        )
    axes.set_yticks(range(len(data["rows"])), [f"{name}  ({kind})" for name, kind, _ in data["rows"]])
    axes.set_xscale("log")
    axes.set_xlim(8e3, 1.2e7)
    axes.set_xlabel("bytes of keys and values per token (16 bits)")
    axes.grid(True, axis="x")
    style.title(figure, "What one token leaves in the cache", "all heads (MHA), groups (GQA), one (MQA), latents (MLA)")
    return figure
