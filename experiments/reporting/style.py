"""One style for all pictures: they are read in a paper's column, in colour or not, by everybody.

Sizes are those at which a picture is printed: a column of 3.4 inches or a page of 7. No letter is smaller than 7 points
there. Colours are those of Okabe and Ito (2008), which colour-blind readers can tell apart; whatever has a colour has a
marker or a place of its own as well. Every picture is written twice, as PNG and as SVG with its text kept as text.
"""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure

COLUMN, PAGE = 3.4, 7.0
"""Widths in inches: one column of a two-column paper, and both."""

SMALLEST = 7.0
"""The smallest letters, in points."""

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#000000")
MARKERS = "osD^vPX<>*"
FAINT = "#606060"
WRONG = "#d00000"
"""For what a reader must not miss."""

_RC: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": SMALLEST,
    "ytick.labelsize": SMALLEST,
    "legend.fontsize": SMALLEST,
    "legend.frameon": False,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "specdec",  # the same picture is the same file
}
_CHARACTERS_PER_INCH = 16.5
"""At 8 points, in the mean."""


@contextmanager
def styled() -> Iterator[None]:
    """During the ``with`` block, figures are made and saved in this style."""
    with mpl.rc_context(_RC):
        yield


def color(index: int) -> str:
    """The colour of the series with this number."""
    return COLORS[index % len(COLORS)]


def marker(index: int) -> str:
    """The marker of the series with this number."""
    return MARKERS[index % len(MARKERS)]


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches, as it will be printed."""
    return Figure(figsize=(width, height), layout="constrained")


def title(figure: Figure, text: str, subtitle: str, *, alarm: str = "") -> None:
    """Title a picture: what it shows, and under which conditions, in as many lines as that takes.

    Args:
        figure: The picture, with its panels.
        text: What it shows.
        subtitle: The conditions.
        alarm: What a reader must not miss: a red line above the title.
    """
    width = round(figure.get_figwidth() * _CHARACTERS_PER_INCH)
    lines = [*textwrap.wrap(text, width), *textwrap.wrap(subtitle, width)]
    if not alarm:
        figure.suptitle("\n".join(lines), fontsize=8)
        return
    # The title has a single color: its first line is left free, and the warning stands there.
    made = figure.suptitle("\n".join([" ", *lines]), fontsize=8)
    note = figure.axes[0].annotate(
        alarm,
        xy=(0.5, 1.0),
        xycoords=made,
        ha="center",
        va="top",
        color=WRONG,
        fontsize=9,
        fontweight="bold",
        annotation_clip=False,
    )
    note.set_in_layout(False)  # the title has its place already: the panel must not make room again


def legend(figure: Figure, handles: Sequence[object], labels: Sequence[str], *, ncols: int | None = None) -> None:
    """One legend below all panels, so that it hides nothing; as many columns as the width allows."""
    if ncols is None:
        longest = max(map(len, labels), default=1) + 6
        ncols = max(1, min(len(labels), int(figure.get_figwidth() * _CHARACTERS_PER_INCH * 1.1 // longest)))
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols)  # pyright: ignore[reportArgumentType]


def wrapped(text: str, width: int) -> str:
    """The text in lines of at most so many characters."""
    return "\n".join(textwrap.wrap(text, width))


def ink(colors: Colormap, share: float) -> str:
    """Black or white, whichever has the stronger contrast to a colour (relative luminance as WCAG 2 defines it)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colors(share)[:3]]
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "black" if luminance > 0.179 else "white"


def baseline(axes: Axes, *, vertical: bool = False) -> object:
    """Draw the line of plain decoding at 1, and return it for the legend."""
    draw = axes.axvline if vertical else axes.axhline
    return draw(1.0, color="black", linewidth=0.9, linestyle="--", zorder=1, label="plain decoding")


def save(figure: Figure, path: Path) -> Path:
    """Write the picture as PNG, and as SVG beside it; returns the PNG's path."""
    figure.savefig(path)
    figure.set_layout_engine("none")  # everything has its place, which takes long to find
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return path
