"""The pictures of a replay: what every rule gains on which drafts, and how far each accepts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator, PercentFormatter

from experiments.reporting import style
from experiments.results.lossless import promises_exact
from experiments.tracing.figures import DraftSetFigures, RuleFigures

_SAME = 0.005
"""Rules whose lines are nowhere further apart than this are drawn as one line with all their names."""


@style.styled()
def gain_plot(done: Sequence[DraftSetFigures], path: Path, subtitle: str, *, baseline: str) -> Path:
    """Expected accepted tokens per round: a cell per rule and drafts, a block per temperature.

    The colour of an exact rule's cell is its gain over the baseline on the same drafts, starred where the paired
    interval excludes zero. Rules that are not exact stand below, without a colour: what they accept does not compare.
    """
    temperatures = sorted({each.drafts.temperature for each in done})
    kinds = list(dict.fromkeys(each.label for each in done))
    rules = list(dict.fromkeys((row.rule, row.exactness) for each in done for row in each.rows))
    rules.sort(key=lambda rule: not promises_exact(rule[1]))  # stable: the others keep their order
    gains = [row.gain for each in done for row in each.rows if row.gain is not None and promises_exact(row.exactness)]
    # A rule far below the baseline would leave no colour for the differences among the good ones.
    largest = max([gain for gain in gains if gain > 0] or [abs(gain) for gain in gains] or [1.0]) or 1.0
    norm = TwoSlopeNorm(0.0, vmin=-largest, vmax=largest)
    height = 0.9 + (0.25 + 0.19 * len(rules)) * len(temperatures) + 0.35
    figure = style.new_figure(style.PAGE, height)
    panels = figure.subplots(len(temperatures), 1, sharex=True, squeeze=False)[:, 0]
    image: AxesImage | None = None
    for panel, temperature in zip(panels, temperatures, strict=True):
        cells: dict[tuple[str, str], dict[str, RuleFigures]] = {}
        for each in done:
            if each.drafts.temperature == temperature:
                for row in each.rows:
                    cells.setdefault((row.rule, row.exactness), {})[each.label] = row
        image = _matrix(panel, [cells.get(rule, {}) for rule in rules], kinds, norm)
        panel.set_yticks(range(len(rules)), [rule if kind == "exact" else f"{rule} ({kind})" for rule, kind in rules])
        panel.set_ylabel(f"T = {temperature:g}")
        lossy = sum(not promises_exact(kind) for _, kind in rules)
        if 0 < lossy < len(rules):
            panel.axhline(len(rules) - lossy - 0.5, color="black", linewidth=1)
    panels[-1].set_xticks(range(len(kinds)), _short(kinds))
    if image is not None:
        bar = figure.colorbar(image, ax=list(panels), shrink=0.6, pad=0.01)
        bar.set_label(f"gain over {baseline}\n(accepted tokens per round)")
    about = f"one-round expectations on identical contexts; * the interval of the gain excludes zero; {subtitle}"
    style.title(figure, "Expected accepted tokens per round, by rule and drafts", about)
    return style.save(figure, path)


def _matrix(panel: Axes, rows: Sequence[dict[str, RuleFigures]], kinds: Sequence[str], norm: TwoSlopeNorm) -> AxesImage:
    colors = np.full((len(rows), len(kinds)), np.nan)
    for y, found in enumerate(rows):
        for x, kind in enumerate(kinds):
            row = found.get(kind)
            if row is not None and promises_exact(row.exactness):
                colors[y, x] = row.gain or 0.0
    image = panel.imshow(colors, cmap="PuOr", norm=norm, aspect="auto")
    for y, found in enumerate(rows):
        for x, kind in enumerate(kinds):
            row = found.get(kind)
            if row is None:
                panel.text(x, y, "-", ha="center", va="center", color=style.FAINT)
                continue
            exact = promises_exact(row.exactness)
            sure = exact and _sure(row)
            dark = exact and abs(norm(row.gain or 0.0) - 0.5) > 0.36  # where black would be hard to read
            panel.text(
                x,
                y,
                f"{row.accepted:.2f}{'*' if sure else ''}",
                ha="center",
                va="center",
                fontsize=style.SMALLEST,
                color="white" if dark else "black" if exact else style.FAINT,
                style="normal" if exact else "italic",
            )
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    return image


@style.styled()
def reach_plot(each: DraftSetFigures, path: Path, subtitle: str) -> Path:
    """Probability of accepting so far, by position, for the exact rules on one kind of drafts.

    Rules that accept alike share a line. The bound of any lossless rule stands at the first position, the only one for
    which it is known. It is an average over draws, so it has an interval: on the drafts that happened to be drawn a
    rule may lie above its mean. Rules that are not exact may lie above it anyway, and are left out.
    """
    rows = [row for row in each.rows if promises_exact(row.exactness) and row.reach]
    groups = _alike(rows)
    figure = style.new_figure(style.COLUMN, 2.4 + 0.14 * (len(groups) + 1))
    axes = figure.subplots()
    for index, together in enumerate(groups):
        axes.plot(
            range(1, len(together[0].reach) + 1),
            together[0].reach,
            color=style.color(index),
            marker=style.marker(index),
            label=style.wrapped(" = ".join(row.rule for row in together), 60),
        )
    if each.bound is not None:
        low, high = each.bound_interval or (each.bound, each.bound)
        axes.fill_between([0.8, 1.2], low, high, color="black", alpha=0.15, linewidth=0)
        label = "bound of any lossless rule, position 1, with its interval"
        axes.hlines(each.bound, 0.8, 1.2, color="black", linewidth=1.6, label=label)
    axes.set_xlabel("position in the draft (1 = first drafted token)")
    axes.set_ylabel("rounds that accepted so far")
    axes.set_ylim(0, 1.04)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid()
    style.legend(figure, *axes.get_legend_handles_labels(), ncols=1)
    style.title(figure, f"{each.label}, T = {each.drafts.temperature:g}", subtitle)
    return style.save(figure, path)


def _sure(row: RuleFigures) -> bool:
    """Whether a rule's gain is beyond chance, and large enough to be seen in the figures."""
    interval = row.gain_interval
    return interval is not None and not interval[0] <= 0 <= interval[1] and abs(row.gain or 0.0) >= _SAME


def _alike(rows: Sequence[RuleFigures]) -> list[list[RuleFigures]]:
    """Rules whose lines could not be told apart, together."""
    groups: list[list[RuleFigures]] = []
    for row in rows:
        for group in groups:
            if len(group[0].reach) == len(row.reach) and np.allclose(group[0].reach, row.reach, atol=_SAME, rtol=0):
                group.append(row)
                break
        else:
            groups.append([row])
    return groups


def _short(kinds: Sequence[str]) -> list[str]:
    """What tells the drafts apart, a line for each part; the method only where it differs."""
    parts = [
        kind.replace("drafter.shape=", "").replace("without replacement", "without\nreplacement") for kind in kinds
    ]
    several = len({part.partition(", ")[0] for part in parts}) > 1
    shown = parts if several else [part.partition(", ")[2] or part for part in parts]
    return [part.replace(", ", "\n") for part in shown]
