"""Pictures of what is gained: speculation by load, and a request's time."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.bench.chapter.given import ACCEPTANCES, BATCHES, CONTEXTS, GIVEN, LONGEST, VLLM_8B
from experiments.bench.chapter.picture import Data
from experiments.bench.chapter.request import requests
from experiments.reporting import style
from specdec.physics.speculation import BestLength, best_length, speedup_of

# ---------------------------------------------------------------- what speculation brings


def speedup_data() -> Data:
    """The best draft length and its speedup, by batch and by context."""
    batches = list(BATCHES)
    by_rate = []
    for rate in ACCEPTANCES:
        found = [_best(rate, rows, GIVEN.context) for rows in batches]
        by_rate.append(
            {"name": rate, "speed": [each.speedup for each in found], "drafted": [each.drafted for each in found]}
        )
    low, fixed = GIVEN.low_acceptance, GIVEN.fixed_draft
    always = [speedup_of(VLLM_8B, low, batch=rows, drafted=fixed, context=GIVEN.context) for rows in batches]
    by_context = []
    for context in CONTEXTS:
        found = [
            best_length(VLLM_8B, GIVEN.acceptance, batch=rows, context=context, longest=LONGEST) for rows in batches
        ]
        by_context.append(_line(context, found))
    return {
        "batches": batches,
        "by_rate": by_rate,
        "always": always,
        "fixed": fixed,
        "low": low,
        "by_context": by_context,
        "context": GIVEN.context,
        "acceptance": GIVEN.acceptance,
    }


def _best(rate: float, rows: int, context: int) -> BestLength:
    return best_length(VLLM_8B, rate, batch=rows, context=context, longest=LONGEST)


def _line(name: float, found: Sequence[BestLength]) -> Data:
    return {"name": name, "speed": [each.speedup for each in found], "drafted": [each.drafted for each in found]}


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
        axes.annotate(
            "plain decoding", (batches[0], 1), (0, -3), textcoords="offset points", va="top", fontsize=style.SMALLEST
        )
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
            axes.annotate(
                str(drafted),
                (rows, speed),
                (0, 4),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=style.SMALLEST,
                color=color,
            )


def _end(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    axes.annotate(
        text,
        (x, y),
        (6, 0),
        textcoords="offset points",
        va="center",
        color=color,
        fontsize=style.SMALLEST,
        annotation_clip=False,
    )


# ---------------------------------------------------------------- a request, and what shortens it


def request_data() -> Data:
    """Least seconds of a request's parts, by what was changed."""
    rows = [[each.name, each.prefill, each.draft, each.target] for each in requests()]
    return {"rows": rows, "prompt": GIVEN.prompt, "output": GIVEN.output, "acceptance": GIVEN.acceptance}


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
        axes.annotate(
            f"{1e3 * start:,.0f} ms{faster}",
            (1e3 * start, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=style.SMALLEST,
        )
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
