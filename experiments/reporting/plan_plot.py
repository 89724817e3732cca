"""The pictures of a plan: its forwards under the device's roof, and where speculation pays."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.patches import Patch, Rectangle

from experiments.planning.measured import OUTSIDE
from experiments.planning.plan import Plan
from experiments.reporting import style
from experiments.reporting.plan import acceptance_in_words

_KINDS = ("prefill", "decode", "draft", "verify")


def draw(plan: Plan, folder: Path) -> list[Path]:
    """Draw all pictures of a plan into a folder, and return their files."""
    made = [roofline(plan, folder / "roofline.png")]
    if plan.asked.drafter is not None:
        made.append(pays(plan, folder / "where_it_pays.png"))
    return made


@style.styled()
def roofline(plan: Plan, path: Path) -> Path:
    """Every forward at its operations per byte, at the rate that the device allows there."""
    asked, roof = plan.asked, plan.asked.roof
    figure = style.new_figure(style.PAGE, 3.9)
    axes = figure.subplots()
    points = [(phase.intensity, phase.flops / phase.seconds / 1e12) for phase in plan.phases]
    low = min(0.5, *(0.6 * x for x, _ in points))
    high = max(10 * roof.ridge, *(2 * x for x, _ in points))
    grid = np.geomspace(low, high, 200)
    axes.fill_between(grid[grid < roof.ridge], 1e-6, 1e6, color=style.COLORS[5], alpha=0.10, linewidth=0)
    axes.fill_between(grid[grid >= roof.ridge], 1e-6, 1e6, color=style.COLORS[1], alpha=0.10, linewidth=0)
    axes.plot(grid, [roof.attainable(x) / 1e12 for x in grid], color="black", linewidth=1.5, zorder=2)
    axes.axvline(roof.ridge, color=style.FAINT, linewidth=0.7, linestyle=":", zorder=1)
    seen: dict[str, object] = {}
    lowest = min(y for _, y in points)
    for phase, (x, y) in zip(plan.phases, points, strict=True):
        number = _KINDS.index(phase.kind)
        looks = {**style.looks(number), "linestyle": "none", "zorder": 3}
        (dot,) = axes.plot(x, y, **looks, markersize=6, markeredgecolor="white")
        seen.setdefault(phase.kind, dot)
        # The number of rows: above a decode, below what drafts and verifies.
        place, side = ((-4, 5), "right") if phase.kind in ("decode", "prefill") else ((4, -10), "left")
        style.note(axes, f"{phase.batch:,}", (x, y), place, ha=side, va="baseline", color=looks["color"], bbox=None)
        if phase.predicted_seconds is not None:
            rate = phase.flops / phase.predicted_seconds / 1e12
            lowest = min(lowest, rate)
            axes.plot(x, rate, **looks, markersize=5, fillstyle="none")
            axes.plot([x, x], [rate, y], color=looks["color"], linewidth=0.6, alpha=0.5, zorder=2)
    if asked.costs is not None:
        (seen["hollow: as measured"],) = axes.plot([], [], "o", color=style.FAINT, markersize=5, fillstyle="none")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(lowest / 3, roof.flops / 1e12 * 2.5)
    axes.text(roof.ridge / 1.1, lowest / 2.5, "bound by memory", color=style.COLORS[0], ha="right")
    axes.text(roof.ridge * 1.1, lowest / 2.5, "bound by compute", color=style.COLORS[4])
    axes.text(roof.ridge * 1.1, lowest, f"ridge {roof.ridge:.3g}", color=style.FAINT, fontsize=style.SMALLEST)
    axes.set_xlabel("arithmetic intensity (FLOP per byte)")
    axes.set_ylabel("most that the device allows (TFLOP/s)")
    style.legend(figure, list(seen.values()), list(seen))
    about = (
        f"{asked.device.title}, {roof.bandwidth / 1e12:.4g} TB/s and {roof.flops / 1e12:.4g} TFLOP/s; "
        f"{asked.context:,} positions per row; numbers at the points are rows. A point below the roof has a part bound "
        f"by memory and one by compute, which take turns"
    )
    return style.finish(figure, path, f"Forwards of {_short(asked.name)} under the roof", about)


@style.styled()
def pays(plan: Plan, path: Path) -> Path:
    """The speedup of the best draft by batch and context, its length, and where a fixed draft breaks even."""
    grid, asked = plan.map, plan.asked
    speed = np.array(grid.speedup, dtype=np.float64)  # None becomes NaN
    known = speed[~np.isnan(speed)]
    figure = style.new_figure(style.PAGE, 4.6)
    axes = figure.subplots()
    norm = Normalize(1.0, max(1.1, float(known.max(initial=1.0))))
    image = style.matrix(
        axes,
        speed.tolist(),
        {
            (row, column): "-" if drafted is None else f"{drafted}\n{speed[row, column]:.2f}x" if drafted else "none"
            for row, batch in enumerate(grid.drafted)
            for column, drafted in enumerate(batch)
        },
        norm,
        "cividis",
    )
    axes.invert_yaxis()
    for row, column in zip(*np.nonzero(~np.isnan(speed) & ~np.array(grid.fits)), strict=True):
        corner, looks = (column - 0.5, row - 0.5), {"hatch": "///", "edgecolor": "white", "linewidth": 0, "alpha": 0.35}
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, **looks))
    handles: list[object] = [Patch(facecolor="#808080", hatch="///", edgecolor="white")]
    labels = ["slots do not fit in the memory"]
    if len(known) < speed.size:
        handles.append(Patch(facecolor="white", edgecolor=style.FAINT))
        labels.append(OUTSIDE)
    line = _break_even(axes, plan)
    if line is not None:
        handles.append(line)
        labels.append(f"above: a fixed draft of {plan.fixed} is slower than plain decoding")
    axes.set_xticks(range(len(grid.contexts)), [f"{n // 1024}k" if n >= 1024 else str(n) for n in grid.contexts])
    axes.set_yticks(range(len(grid.batches)), [f"{each:,}" for each in grid.batches])
    axes.set_xlabel("context (positions per row)")
    axes.set_ylabel("batch (rows)")
    figure.colorbar(image, ax=axes, pad=0.01, aspect=30).set_label("speedup of the best draft")
    style.legend(figure, handles, labels)
    assert asked.drafter is not None
    about = (
        f"{_short(asked.name)} on {asked.device.title}; {asked.drafter.title}; acceptance {acceptance_in_words(plan)}; "
        f"drafts of up to {plan.longest} tokens; {'least times' if asked.costs is None else 'times as measured'}"
    )
    return style.finish(figure, path, "How long to draft, and what that brings", about)


def _break_even(axes: Axes, plan: Plan) -> object | None:
    """Draw the line above which a fixed draft loses; None if it is nowhere in the map."""
    grid = plan.map
    top = len(grid.batches) - 0.5
    heights = []
    for batch, known in zip(grid.break_even_batch, grid.break_even_known, strict=True):
        place = top if batch is None else -0.5 if batch == 0 else float(np.log2(batch))
        heights.append(min(max(place, -0.5), top) if known else np.nan)
    if all(not height < top for height in heights):
        return None
    edges = [column + side for column in range(len(heights)) for side in (-0.5, 0.5)]  # flat over every column
    steps = [height for height in heights for _ in range(2)]
    (line,) = axes.plot(edges, steps, color=style.COLORS[4], linewidth=2, linestyle="--", zorder=3)
    axes.set_ylim(-0.5, top)
    axes.set_xlim(-0.5, len(heights) - 0.5)
    return line


def _short(name: str) -> str:
    """Returns a name for a title: of a path its last part that says something, any other name as it is."""
    if not name.startswith(("/", ".", "~")):
        return name
    path = Path(name)
    return path.parent.name if path.name == "config.json" else path.stem
