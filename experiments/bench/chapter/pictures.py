"""The chapter's pictures: their figures, how they are drawn, and a digest that tells whether a file is current."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.bench.chapter.figures import LLAMA, SERVED_8B, figures
from experiments.bench.chapter.models import A100, GIVEN, H100, HALF, LLAMA_8B, VLLM_8B, Example, this_machine
from experiments.bench.chapter.tables import KV_MODELS
from experiments.reporting import style
from specdec.physics import heads
from specdec.physics.bounds import Roof
from specdec.physics.capacity import kv_bytes_per_position
from specdec.physics.precision import Precision
from specdec.physics.rounds import DraftModel, RoofRounds
from specdec.physics.speculation import best_length, chain_tokens, speedup_of
from specdec.physics.work import prefill_work

Data = dict[str, Any]
"""The texts and numbers that a picture shows."""


@dataclass(frozen=True)
class Picture:
    """A picture of the chapter: a function that returns what it shows, and one that draws that."""

    data: Callable[[], Data]
    draw: Callable[[Data], Figure]

    def digest(self) -> str:
        """Return what tells apart two pictures of different figures."""
        return hashlib.sha256(json.dumps(_rounded(self.data()), sort_keys=True).encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Draw it into a file."""
        with style.styled():
            self.draw(self.data()).savefig(path, metadata={"Description": self.digest()})


def _rounded(found: Any) -> Any:
    """Return data without its last digits, which differ between machines."""
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_rounded(value) for value in found]
    return float(f"{found:.9g}") if isinstance(found, float) else found


def _note(axes: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **look: Any) -> None:
    """Write a text beside a point, so many printer's points from it."""
    axes.annotate(text, point, offset, textcoords="offset points", **{"fontsize": style.SMALLEST, **look})


# ---------------------------------------------------------------- the roofline


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
        _note(
            axes,
            f"{device['title'].removeprefix('NVIDIA ')}\n{_rate(flops)}",
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
    f = figures()
    rows.append(["DeepSeek-V3 without latents", f"MHA, {f.latent_heads} heads", f.latent_equivalent])
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
        _note(axes, f"{size / 1024:,.0f} KiB" if size >= 1e4 else f"{size:,.0f} B", (size, place), (7, 0), va="center")
    axes.set_yticks(range(len(data["rows"])), [f"{name}  ({kind})" for name, kind, _ in data["rows"]])
    axes.set_xscale("log")
    axes.set_xlim(8e3, 1.2e7)
    axes.set_xlabel("bytes of keys and values per token (16 bits)")
    axes.grid(True, axis="x")
    style.title(figure, "What one token leaves in the cache", "all heads (MHA), groups (GQA), one (MQA), latents (MLA)")
    return figure


# ---------------------------------------------------------------- what speculation brings


def speedup_data() -> Data:
    """The best draft length and its speedup, by batch and by context."""

    def line(name: float, rate: float, context: int) -> Data:
        found = [best_length(VLLM_8B, rate, batch=rows, context=context, longest=GIVEN.longest) for rows in GIVEN.loads]
        return {"name": name, "speed": [each.speedup for each in found], "drafted": [each.drafted for each in found]}

    low, fixed, context = GIVEN.low_acceptance, GIVEN.fixed_draft, GIVEN.context
    return {
        "batches": list(GIVEN.loads),
        "by_rate": [line(rate, rate, context) for rate in GIVEN.acceptances],
        "always": [speedup_of(VLLM_8B, low, batch=rows, drafted=fixed, context=context) for rows in GIVEN.loads],
        "fixed": fixed,
        "low": low,
        "by_context": [line(each, GIVEN.acceptance, each) for each in GIVEN.contexts],
        "context": context,
        "acceptance": GIVEN.acceptance,
    }


def draw_speedup(data: Data) -> Figure:
    """Lines over the batch; numbers at the points are draft lengths."""
    figure = style.new_figure(style.PAGE, 3.9)
    left, right = figure.subplots(1, 2)
    batches = data["batches"]
    left.plot(batches, data["always"], color=style.color(0), linestyle=":", linewidth=1.3, marker="x", zorder=2)
    _end(left, batches[-1], data["always"][-1], f"{data['low']}, always {data['fixed']}", style.color(0))
    _lines(left, batches, data["by_rate"], [str(line["name"]) for line in data["by_rate"]])
    _lines(right, batches, data["by_context"], [f"{line['name']:,}" for line in data["by_context"]])
    left.set_title(f"by acceptance; {data['context']:,} positions per row")
    right.set_title(f"by positions per row; acceptance {data['acceptance']}")
    for axes, ticks in ((left, (1, 1.5, 2, 3, 4)), (right, (1, 1.25, 1.5, 2, 2.5))):
        style.baseline(axes)
        _note(axes, "plain decoding", (batches[0], 1), (0, -3), va="top")
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(rows) for rows in batches])
        axes.set_yscale("log")
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(0.9, ticks[-1] * (1.3 if axes is left else 1.06))
        axes.set_xlabel("rows of the batch")
        axes.grid(True, axis="y")
    left.set_ylabel("speedup over plain decoding")
    style.title(
        figure,
        "What the best draft length brings; numbers at the points are drafted tokens",
        "Llama-3.1-8B with an EAGLE head in vLLM on an H100, by constants that others fitted to measured steps",
    )
    return figure


def _lines(axes: Axes, batches: Sequence[int], lines: Sequence[Data], names: Sequence[str]) -> None:
    """Draw a line per setting, with its name at its end and draft lengths where there is room."""
    written: list[tuple[int, float]] = []
    for number, (line, name) in reversed(list(enumerate(zip(lines, names, strict=True)))):
        color = style.color(number)
        axes.plot(batches, line["speed"], color=color, marker=style.marker(number), zorder=3)
        _end(axes, batches[-1], line["speed"][-1], name, color)
        for rows, speed, drafted in zip(batches, line["speed"], line["drafted"], strict=True):
            if any(rows == other and speed > 0.93 * above for other, above in written):
                continue
            written.append((rows, speed))
            _note(axes, str(drafted), (rows, speed), (0, 4), ha="center", va="bottom", color=color)


def _end(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    _note(axes, text, (x, y), (6, 0), va="center", color=color, annotation_clip=False)


# ---------------------------------------------------------------- a request, and what shortens it


def request_data() -> Data:
    """Least seconds of a request's prefill, drafting and target's steps, by what was changed.

    It is the short request of Llama-3.1-8B on an A100, served alone, with one thing changed at a time, and with two.
    """
    roof = A100.roof("float16")
    int4 = Precision.of("float16", weights="int4", group=GIVEN.group, output="float16")
    rows = [
        _request("as it is", roof, HALF),
        _request("twice the FLOP/s", replace(roof, flops=2 * roof.flops), HALF),
        _request("twice the bandwidth", replace(roof, bandwidth=2 * roof.bandwidth), HALF),
        _request("weights in int4", roof, int4),
        _request("speculation", roof, HALF, drafting=True),
        _request("int4 and speculation", roof, int4, drafting=True),
    ]
    return {"rows": rows, "prompt": GIVEN.prompt, "output": GIVEN.output, "acceptance": GIVEN.acceptance}


def _request(name: str, roof: Roof, precision: Precision, *, drafting: bool = False) -> list[Any]:
    """Return a name, and the seconds of prefill, drafting and the target's steps."""
    prefill = prefill_work(LLAMA_8B, precision, tokens=GIVEN.prompt).by_parts(roof)
    head = DraftModel(shape=heads.eagle3(LLAMA_8B), precision=HALF)
    cost = RoofRounds(shape=LLAMA_8B, precision=precision, roof=roof, drafter=head)
    at = {"batch": 1, "context": GIVEN.prompt + GIVEN.output / 2}  # what rows have halfway
    if not drafting:
        return [name, prefill, 0.0, GIVEN.output * cost.verify(drafted=0, **at)]
    drafted = best_length(cost, GIVEN.acceptance, longest=GIVEN.longest, **at).drafted
    rounds = GIVEN.output / chain_tokens(GIVEN.acceptance, drafted)
    draft, verify = cost.draft(drafted=drafted, **at), cost.verify(drafted=drafted, **at)
    return [f"{name}, {drafted} drafted", prefill, rounds * draft, rounds * verify]


def draw_request(data: Data) -> Figure:
    """A bar of three parts per change."""
    figure = style.new_figure(style.PAGE, 2.7)
    axes = figure.subplots()
    parts = (("prefill", style.COLORS[1]), ("drafting", style.COLORS[2]), ("the target's steps", style.COLORS[0]))
    whole = sum(data["rows"][0][1:])
    for place, (_, *seconds) in enumerate(data["rows"]):
        start = 0.0
        for (_, color), part in zip(parts, seconds, strict=True):
            axes.barh(place, 1e3 * part, left=1e3 * start, height=0.62, color=color)
            start += part
        faster = f"  ({whole / start:.2f}x)" if place else ""
        _note(axes, f"{1e3 * start:,.0f} ms{faster}", (1e3 * start, place), (5, 0), va="center")
    axes.set_yticks(range(len(data["rows"])), [row[0] for row in data["rows"]])
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * whole * 1.12)
    axes.set_xlabel("milliseconds")
    axes.grid(True, axis="x")
    style.legend(figure, [Patch(facecolor=color) for _, color in parts], [name for name, _ in parts], ncols=3)
    style.title(
        figure,
        f"A request of {data['prompt']:,} prompt and {data['output']} output tokens, alone, and what shortens it",
        f"Llama-3.1-8B in 16 bits on an A100; an EAGLE-3 head with an acceptance of {data['acceptance']}; least times",
    )
    return figure


PICTURES = {
    "chapter_roofline": Picture(roofline_data, draw_roofline),
    "chapter_step": Picture(step_data, draw_step),
    "chapter_kv": Picture(kv_data, draw_kv),
    "chapter_speedup": Picture(speedup_data, draw_speedup),
    "chapter_request": Picture(request_data, draw_request),
}
"""Every picture, by the name of its file in ``docs/images``."""
