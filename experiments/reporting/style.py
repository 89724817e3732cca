"""One style for all pictures, and the kinds of pictures: they are read in a paper's column, in colour or not.

Sizes are those at which a picture is printed: on a page of 7 inches. No letter is smaller than 7 points there. Colours
are those of Okabe and Ito (2008), which colour-blind readers can tell apart; whatever has a colour has a marker or a
place of its own as well. Every picture is written twice, as PNG and as SVG with its text kept as text.

Matplotlib is imported when something is drawn: it takes a while.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
"""A row of the frame of results (``experiments.results.rows``)."""
PAGE = 7.0
"""The width of pictures in inches: both columns of a paper."""
SMALLEST = 7.0
"""The smallest letters, in points."""
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#000000")
MARKERS = "osD^vPX<>*"
FAINT, WRONG = "#606060", "#d00000"
"""For what is not the point of a picture, and for what a reader must not miss."""
TITLES: ContextVar[bool] = ContextVar("titles", default=True)
"""Whether pictures have titles. A paper's have none: its captions say the same. Alarms stay."""
BASELINE = {"linewidth": 0.9, "linestyle": "--", "zorder": 1}
"""The look of a line at a value to compare with."""
_CHARACTERS_PER_INCH = 16.5
"""At 8 points, on average."""


@contextmanager
def styled() -> Iterator[None]:
    """During the ``with`` block, figures are made and saved in this style."""
    import matplotlib as mpl

    with mpl.rc_context(fname=Path(__file__).with_name("pictures.mplstyle")):
        yield


def looks(index: int) -> dict[str, Any]:
    """Colour and marker of the series with this number."""
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}


def new_figure(height: float) -> "Figure":
    """A figure of this height in inches, as it will be printed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(PAGE, height), layout="constrained")


def legend(figure: "Figure", *panels: "Axes") -> None:
    """One legend below all panels, so that it hides nothing: of what has a label in some."""
    named = (zip(*panel.get_legend_handles_labels(), strict=True) for panel in panels)
    shown = {label: handle for pairs in named for handle, label in pairs}
    longest = max((len(line) for label in shown for line in label.splitlines()), default=1) + 6
    columns = max(1, min(len(shown), int(figure.get_figwidth() * _CHARACTERS_PER_INCH * 1.1 // longest)))
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=columns)


def finish(figure: "Figure", path: Path, text: str, subtitle: str, *, alarm: str = "") -> Path:
    """Title a picture, with conditions and an alarm in red below, and write it as PNG (the result) and SVG."""
    width = round(figure.get_figwidth() * _CHARACTERS_PER_INCH)
    told = [textwrap.fill(part, width) for part in ([alarm, text, subtitle] if TITLES.get() else [alarm]) if part]
    if told:
        figure.suptitle("\n".join(told), fontsize=8, color=WRONG if alarm else "black")
    figure.savefig(path)
    figure.set_layout_engine("none")  # everything has its place, which takes long to find
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return path


def note(axes: "Axes", text: str, at: tuple[float, float], place: tuple[float, float] = (4, 0), **more: Any) -> None:
    """Write small letters beside a point, on white paper so that lines behind them do not disturb."""
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.85}
    settings: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": SMALLEST, "bbox": paper}
    axes.annotate(text, at, xytext=place, **{**settings, **more})


def plain_log(axis: "Axis", steps: Sequence[float] | None = None, *, base: float = 10) -> None:
    """Make an axis logarithmic, labelled with plain numbers: 1, 2, 5 and 10, or the given ones."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    set_scale = axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale
    set_scale("log", base=base)
    axis.set_major_locator(LogLocator(10, (1, 2, 5)) if steps is None else FixedLocator(list(steps)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of lines: a line per series over ``x``, with intervals where its rows have them.

    Attributes:
        labels: Those of the axes.
        scale: Factors of x and y.
        at: A value of y to compare with: plain decoding's.
        limit: A value of y that should not be exceeded, after scaling.
        log: x has a logarithmic scale with the values that occur.
        log_y: y has one with plain numbers.
        shares: x are positions, and y shares of 1.
        beside: A column whose values stand beside the points.
        ring: A column of texts; points that have one are ringed.
    """

    x: str
    y: str
    labels: tuple[str, str]
    title: str = ""
    scale: tuple[float, float] = (1.0, 1.0)
    at: float | None = None
    limit: float | None = None
    log: bool = False
    log_y: bool = False
    shares: bool = False
    beside: str | None = None
    ring: str | None = None


@styled()
def lines(
    path: Path,
    panels: Sequence[Panel],
    series: Mapping[str, Sequence[Row]],
    *,
    about: str,
    subtitle: str,
    alarm: str = "",
) -> Path:
    """Draw panels, a line for each series of rows, and one legend below."""
    from matplotlib.ticker import PercentFormatter

    down = -(-len(panels) // 3)
    figure = new_figure(0.9 + 0.03 * len(series) + 2.5 * down)
    drawn = figure.subplots(down, -(-len(panels) // down), squeeze=False).ravel()
    for axes in drawn[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(drawn, panels, strict=False):
        for index, (label, rows) in enumerate(series.items()):
            _line(axes, panel, rows, index, textwrap.fill(label, 40))
        for at, label, color in ((panel.at, "plain decoding", "black"), (panel.limit, "limit", WRONG)):
            if at is not None:
                axes.axhline(at, label=label, color=color, **BASELINE)
        axes.set(xlabel=panel.labels[0], ylabel=panel.labels[1], title=panel.title)
        axes.margins(0.12)
        if panel.log:
            plain_log(axes.xaxis, sorted({row[panel.x] for rows in series.values() for row in rows}), base=2)
        if panel.log_y:
            plain_log(axes.yaxis)
        else:
            axes.set_ylim(bottom=0)
        if panel.shares:
            axes.set_ylim(0, 1.04)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    legend(figure, *drawn[: len(panels)])
    return finish(figure, path, about, subtitle, alarm=alarm)


def _line(axes: "Axes", panel: Panel, rows: Sequence[Row], index: int, label: str) -> None:
    look, places = looks(index), (panel.x, panel.y)
    known = [row for row in rows if None not in (row.get(panel.x), row.get(panel.y))]
    xs, ys = ([scale * row[key] for row in known] for key, scale in zip(places, panel.scale, strict=True))
    axes.plot(xs, ys, label=label if known else None, **look)
    for row, x, y in zip(known, xs, ys, strict=True):
        if row.get(f"{panel.y}_low") is not None:
            low, high = (panel.scale[1] * row[f"{panel.y}_{end}"] for end in ("low", "high"))
            axes.vlines(x, low, high, color=look["color"], linewidth=1.0)
        if panel.beside is not None:
            note(axes, f"{row[panel.beside]:g}", (x, y), (-7, 6), color=look["color"], bbox=None)
        if panel.ring is not None and row[panel.ring]:
            ring = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "markeredgecolor": "black"}
            axes.plot(x, y, linestyle="none", label=row[panel.ring], **ring)


def name_rows(axes: "Axes", names: Sequence[str], width: int) -> None:
    """Name the rows of a panel, and of those beside it, from top to bottom, with a line between each two."""
    axes.set_yticks(range(len(names)), [textwrap.fill(name, width) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    for panel in axes.get_shared_y_axes().get_siblings(axes):
        panel.yaxis.grid(False)
        for row in range(len(names) - 1):
            panel.axhline(row + 0.5, color="#dddddd", linewidth=0.6)
