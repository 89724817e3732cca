"""The picture of a calibration: predicted against measured times."""

from pathlib import Path

from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullLocator

from experiments.reporting import style
from specdec.physics.calibrated import CalibratedRounds


@style.styled()
def predicted_plot(found: CalibratedRounds, path: Path) -> Path:
    """Draws every measured forward: its time beside the predicted one, and their ratio; points held out are filled."""
    figure = style.new_figure(style.PAGE, 3.2)
    both, ratio = figure.subplots(1, 2)
    groups = [
        ("rounds, fitted", lambda row: not row[5] and not row[6], 0, "none"),
        ("rounds, held out", lambda row: row[5] and not row[6], 0, style.color(0)),
        ("prefill, fitted", lambda row: not row[5] and row[6], 1, "none"),
        ("prefill, held out", lambda row: row[5] and row[6], 1, style.color(1)),
    ]
    handles, labels = [], []
    for label, takes, index, fill in groups:
        rows = [row for row in found.measured if takes(row)]
        if not rows:
            continue
        measured, predicted = [1e3 * row[3] for row in rows], [1e3 * row[4] for row in rows]
        options = {
            "marker": style.marker(index),
            "linestyle": "none",
            "color": style.color(index),
            "markerfacecolor": fill,
            "markersize": 4,
        }
        (drawn,) = both.plot(measured, predicted, **options)
        ratio.plot(measured, [p / m for p, m in zip(predicted, measured, strict=True)], **options)
        handles.append(drawn)
        labels.append(label)
    times = [1e3 * value for row in found.measured for value in row[3:5]]
    ends = [min(times) * 0.8, max(times) * 1.25]
    both.plot(ends, ends, color="black", linewidth=0.8)
    both.set(xlim=ends, ylim=ends, xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
    ratio.axhspan(0.92, 1.08, color=style.FAINT, alpha=0.25, linewidth=0)
    ratio.axhline(1, color="black", linewidth=0.8)
    ratio.set(xlim=ends, xscale="log", xlabel="measured, ms", ylabel="predicted / measured")
    for axes in (both, ratio):
        axes.grid()
        _label(axes.xaxis)
    _label(both.yaxis)
    style.legend(figure, handles, labels)
    where = found.conditions
    held = found.errors.get("target", {}).get("held_out")
    errors = "" if held is None else f"; held out: median error {held.median:.1%}, 95 % within {held.p95:.1%}"
    style.title(figure, "Predicted and measured forwards", f"{where.model} in {where.dtype} on {where.device}{errors}")
    return style.save(figure, path)


def _label(axis: Axis) -> None:
    """Labels a logarithmic axis with plain numbers, such as 1, 2, 5 and 10."""
    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())
