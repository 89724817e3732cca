"""One style for all pictures: they are read in a paper's column, in colour or not, by everybody.

Sizes are those at which a picture is printed: a column of 3.4 inches or a page of 7. No letter is smaller than 7 points
there. Colours are those of Okabe and Ito (2008), which colour-blind readers can tell apart; whatever has a colour has a
marker or a place of its own as well. Every picture is written twice, as PNG and as SVG with its text kept as text.

Matplotlib is imported when something is drawn: it takes a while.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

COLUMN, PAGE = 3.4, 7.0
"""Widths in inches: one column of a two-column paper, and both."""

SMALLEST = 7.0
"""The smallest letters, in points."""

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#000000")
MARKERS = "osD^vPX<>*"
FAINT = "#606060"
SEPARATOR = "#dddddd"
"""Lines between rows."""
WRONG = "#d00000"
"""For what a reader must not miss."""

TITLES: ContextVar[bool] = ContextVar("titles", default=True)
"""Whether pictures have titles. A paper's have none: its captions say the same. Alarms stay."""

_STYLE = Path(__file__).with_name("pictures.mplstyle")
_CHARACTERS_PER_INCH = 16.5
"""At 8 points, in the mean."""


@contextmanager
def styled() -> Iterator[None]:
    """During the ``with`` block, figures are made and saved in this style."""
    import matplotlib as mpl

    with mpl.rc_context(fname=_STYLE):
        yield


def color(index: int) -> str:
    """The colour of the series with this number."""
    return COLORS[index % len(COLORS)]


def looks(index: int) -> dict[str, Any]:
    """Colour and marker of the series with this number."""
    return {"color": color(index), "marker": MARKERS[index % len(MARKERS)]}


def new_figure(width: float, height: float) -> "Figure":
    """A figure of this size in inches, as it will be printed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def title(figure: "Figure", text: str, subtitle: str, *, alarm: str = "") -> None:
    """Title a picture: what it shows, and under which conditions, in as many lines as that takes.

    The alarm is what a reader must not miss: a red line above the title, which stands there without a title too.
    """
    width = round(figure.get_figwidth() * _CHARACTERS_PER_INCH)
    lines = [*textwrap.wrap(text, width), *textwrap.wrap(subtitle, width)] if TITLES.get() else []
    if not alarm:
        if lines:
            figure.suptitle("\n".join(lines), fontsize=8)
        return
    # The title has a single color: its first line is left free, and the warning stands there.
    made = figure.suptitle("\n".join([" ", *lines]), fontsize=8)
    looks: dict[str, Any] = {"color": WRONG, "fontsize": 9, "fontweight": "bold", "ha": "center", "va": "top"}
    note = figure.axes[0].annotate(alarm, (0.5, 1.0), xycoords=made, annotation_clip=False, **looks)
    note.set_in_layout(False)  # the title has its place already: the panel must not make room again


def legend(figure: "Figure", handles: Sequence[object], labels: Sequence[str], *, ncols: int | None = None) -> None:
    """One legend below all panels, so that it hides nothing; as many columns as the width allows, each label once."""
    listed = dict(zip(labels, handles, strict=True))
    if ncols is None:
        longest = max((len(line) for label in listed for line in label.splitlines()), default=1) + 6
        ncols = max(1, min(len(listed), int(figure.get_figwidth() * _CHARACTERS_PER_INCH * 1.1 // longest)))
    figure.legend(list(listed.values()), list(listed), loc="outside lower center", ncols=ncols)  # pyright: ignore[reportArgumentType]


def legend_of(figure: "Figure", *panels: "Axes", ncols: int | None = None) -> None:
    """The same, of all that has a label in some panels."""
    found = [zip(*panel.get_legend_handles_labels(), strict=True) for panel in panels]
    listed = {label: handle for pairs in found for handle, label in pairs}
    legend(figure, list(listed.values()), list(listed), ncols=ncols)


def wrapped(text: str, width: int) -> str:
    """The text in lines of at most so many characters, broken between words.

    A word that is too long by itself, such as a path or a setting, is broken behind a sign, never inside a name.
    """
    lines = [""]
    for word in text.split():
        parts = [word] if len(word) <= width else re.findall(r"[^,=/_:;.|-]*(?:[,=/_:;.|-]+|$)", word)
        for number, part in enumerate(filter(None, parts)):
            space = " " if number == 0 and lines[-1] else ""
            if lines[-1] and len(lines[-1]) + len(space) + len(part) > width:
                lines.append(part)
            else:
                lines[-1] += space + part
    return "\n".join(lines)


def ink(colors: "Colormap", share: float) -> str:
    """Black or white, whichever has the stronger contrast to a colour (relative luminance as WCAG 2 defines it)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colors(share)[:3]]
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "black" if luminance > 0.179 else "white"


def baseline(axes: "Axes", *, vertical: bool = False) -> object:
    """Draw the line of plain decoding at 1, and return it for the legend."""
    draw = axes.axvline if vertical else axes.axhline
    return draw(1.0, color="black", linewidth=0.9, linestyle="--", zorder=1, label="plain decoding")


def save(figure: "Figure", path: Path) -> Path:
    """Write the picture as PNG, and as SVG beside it; returns the PNG's path."""
    figure.savefig(path)
    figure.set_layout_engine("none")  # everything has its place, which takes long to find
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return path


def finish(figure: "Figure", path: Path, text: str, subtitle: str, *, alarm: str = "") -> Path:
    """Title a picture and write it; returns the PNG's path."""
    title(figure, text, subtitle, alarm=alarm)
    return save(figure, path)


# ---------------------------------------------------------------- kinds of pictures


def note(axes: "Axes", text: str, at: tuple[float, float], place: tuple[float, float] = (4, 0), **more: Any) -> None:
    """Write small letters beside a point, on white paper so that lines behind them do not disturb."""
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.85}
    settings: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": SMALLEST, "bbox": paper}
    axes.annotate(text, at, xytext=place, **{**settings, **more})


Point = tuple[float, float | None, tuple[float, float] | None]
"""A row, or x, its value and the value's interval; None where it is not known."""


def dots(
    axes: "Axes", points: Iterable[Point], index: int, label: str = "", *, numbers: bool = True, **more: Any
) -> None:
    """Draw values with their intervals along rows, each with its figure behind it."""
    drawn = {**looks(index), **more}
    known = [(y, value, bounds or (value, value)) for y, value, bounds in points if value is not None]
    axes.plot([value for _, value, _ in known], [y for y, _, _ in known], label=label, linestyle="none", **drawn)
    for y, value, (low, high) in known:
        axes.hlines(y, low, high, color=drawn["color"], linewidth=1.3)
        if numbers:
            note(axes, f"{value:.2f}", (max(value, high), y), color=drawn["color"])


def curve(
    axes: "Axes", points: Iterable[Point], index: int, label: str = "", *, scale: float = 1.0, linestyle: str = "-"
) -> None:
    """Draw values over x as a line with markers, each with its interval, all of them times ``scale``."""
    known = [(x, scale * value, bounds) for x, value, bounds in points if value is not None]
    stroke = {"label": label, "linestyle": linestyle, **looks(index)}
    axes.plot([x for x, _, _ in known], [value for _, value, _ in known], **stroke)
    for x, _, bounds in known:
        if bounds is not None:
            axes.vlines(x, scale * bounds[0], scale * bounds[1], color=color(index), linewidth=1.0)


@styled()
def rows_plot(
    path: Path,
    names: Sequence[str],
    panels: Mapping[str, Mapping[str, Sequence[Point]]],
    *,
    about: str,
    subtitle: str,
    alarm: str = "",
    numbers: bool = True,
    one_scale: bool = False,
) -> Path:
    """Draw figures with their intervals along named rows, beside the line of plain decoding at 1.

    ``panels`` has the series of every panel by name, by the label of the panel's axis. With ``one_scale`` all panels
    show the same quantity.
    """
    count = max(map(len, panels.values()))
    figure = new_figure(PAGE, 1.1 + (0.12 + 0.13 * count) * len(names))
    drawn = figure.subplots(1, len(panels), sharey=True, sharex=one_scale, squeeze=False)[0]
    for axes, (label, series) in zip(drawn, panels.items(), strict=True):
        for index, (name, points) in enumerate(series.items()):
            offset = 0.0 if count == 1 else -0.3 + 0.6 * index / (count - 1)
            moved = [(row + offset, value, bounds) for row, value, bounds in points]
            dots(axes, moved, index, name, numbers=numbers)
        baseline(axes, vertical=True)
        axes.set_xlabel(label)
        axes.margins(x=0.08 + 0.05 * len(panels))  # a narrow panel has less room for its last number
        for row in range(len(names) - 1):
            axes.axhline(row + 0.5, color=SEPARATOR, linewidth=0.6)
    name_rows(drawn[0], names, 34)
    legend_of(figure, drawn[0])
    return finish(figure, path, about, subtitle, alarm=alarm)


def matrix(
    axes: "Axes",
    values: Sequence[Sequence[float]],
    texts: Mapping[tuple[int, int], str],
    norm: "Normalize",
    colors: str,
) -> "AxesImage":
    """Draw a coloured cell for every value that is not NaN, with texts by row and column, and return the image."""
    image = axes.imshow(values, cmap=colors, norm=norm, aspect="auto")
    for (y, x), text in texts.items():
        value = values[y][x]
        shade = FAINT if value != value else ink(image.cmap, float(norm(value)))
        axes.text(x, y, text, ha="center", va="center", fontsize=SMALLEST, color=shade, zorder=4)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    return image


def name_rows(axes: "Axes", names: Sequence[str], width: int) -> None:
    """Name the rows of a panel, and of those beside it, from top to bottom; they have no grid."""
    axes.set_yticks(range(len(names)), [wrapped(name, width) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    for panel in axes.get_shared_y_axes().get_siblings(axes):
        panel.yaxis.grid(False)


def plain_log(axis: "Axis", steps: Sequence[float] | None = None, *, base: float = 10) -> None:
    """Make an axis logarithmic, labelled with plain numbers: 1, 2, 5 and 10, or the given ones."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    set_scale = axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale
    set_scale("log", base=base)
    axis.set_major_locator(LogLocator(10, (1, 2, 5)) if steps is None else FixedLocator(list(steps)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def positions(axes: "Axes", *, label: str = "position in the draft (1 = first drafted token)") -> None:
    """A panel of shares of rounds by position in the draft."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set_xlabel(label)
    axes.set_ylim(0, 1.04)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def by_temperature(
    temperatures: Sequence[float], *, per_panel: float, more: float, across: int = 2
) -> tuple["Figure", Mapping[float, "Axes"]]:
    """A figure with a titled panel per temperature, in common axes, and the panels."""
    across = min(across, len(temperatures))
    down = -(-len(temperatures) // across)
    figure = new_figure(PAGE if across > 1 else COLUMN, more + per_panel * down)
    panels = figure.subplots(down, across, sharey=True, sharex=True, squeeze=False)
    for panel in panels.flat[len(temperatures) :]:
        panel.set_visible(False)
    found = dict(zip(temperatures, panels.flat, strict=False))
    for temperature, panel in found.items():
        panel.set_title(f"temperature {temperature:g}")
    return figure, found
