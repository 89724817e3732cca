"""The picture of a plan: where speculation pays."""

from pathlib import Path

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.patches import Patch, Rectangle

from experiments.planning.measured import OUTSIDE
from experiments.planning.plan import Plan
from experiments.reporting import style
from experiments.reporting.plan import acceptance_in_words


@style.styled()
def pays(plan: Plan, path: Path) -> Path:
    """Draw the speedup of the best draft by batch and context, its length, and where a fixed draft breaks even."""
    grid, asked = plan.map, plan.asked
    assert asked.drafter is not None, "drawn for speculation alone"
    speed = np.array(grid.speedup, dtype=np.float64)  # None becomes NaN
    known = speed[~np.isnan(speed)]
    figure = style.new_figure(style.PAGE, 4.6)
    axes = figure.subplots()
    words = {
        (row, column): "-" if drafted is None else f"{drafted}\n{speed[row, column]:.2f}x" if drafted else "none"
        for row, batch in enumerate(grid.drafted)
        for column, drafted in enumerate(batch)
    }
    norm = Normalize(1.0, max(1.1, float(known.max(initial=1.0))))
    image = style.matrix(axes, speed.tolist(), words, norm, "cividis")
    axes.invert_yaxis()
    for row, column in zip(*np.nonzero(~np.isnan(speed) & ~np.array(grid.fits)), strict=True):
        looks = {"hatch": "///", "edgecolor": "white", "linewidth": 0, "alpha": 0.35}
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, **looks))
    legend: dict[str, object] = {
        "slots do not fit in the memory": Patch(facecolor="#808080", hatch="///", edgecolor="white")
    }
    if len(known) < speed.size:
        legend[OUTSIDE] = Patch(facecolor="white", edgecolor=style.FAINT)
    top = len(grid.batches) - 0.5
    even = [top if batch is None else np.log2(batch) if batch else -0.5 for batch in grid.break_even_batch]
    heights = np.where(grid.break_even_known, np.clip(even, -0.5, top), np.nan)
    if (heights < top).any():
        columns = np.arange(len(heights))
        edges = np.stack([columns - 0.5, columns + 0.5], 1).flatten()  # flat over every column
        (line,) = axes.plot(edges, heights.repeat(2), color=style.COLORS[4], linewidth=2, linestyle="--", zorder=3)
        legend[f"above: a fixed draft of {plan.fixed} is slower than plain decoding"] = line
        axes.set(xlim=(-0.5, len(heights) - 0.5), ylim=(-0.5, top))
    axes.set_xticks(range(len(grid.contexts)), [f"{n // 1024}k" if n >= 1024 else str(n) for n in grid.contexts])
    axes.set_yticks(range(len(grid.batches)), [f"{batch:,}" for batch in grid.batches])
    axes.set(xlabel="context (positions per row)", ylabel="batch (rows)")
    figure.colorbar(image, ax=axes, pad=0.01, aspect=30).set_label("speedup of the best draft")
    style.legend(figure, entries=legend)
    about = (
        f"{_short(asked.name)} on {asked.device.title}; {asked.drafter.title}; acceptance {acceptance_in_words(plan)}; "
        f"drafts of up to {plan.longest} tokens; {'least times' if asked.costs is None else 'times as measured'}"
    )
    return style.finish(figure, path, "How long to draft, and what that brings", about)


def _short(name: str) -> str:
    """Returns a name for a title: of a path its last part that says something, any other name as it is."""
    path = Path(name)
    if not name.startswith(("/", ".", "~")):
        return name
    return path.parent.name if path.name == "config.json" else path.stem
