"""Pictures of an engine under load."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.load.figures import in_flight
from experiments.load.run import OPEN, LoadRun
from experiments.reporting import style
from experiments.results.frame import Figures
from experiments.results.limits import Terms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

X = {"open": "requests per second that arrive", "closed": "users"}
_LEVELS = {50: "median", 90: "90th percentile", 99: "99th percentile"}
_MOST_PANELS = 4


def _methods(figures: Sequence[Figures]) -> dict[str, list[Figures]]:
    names = dict.fromkeys(each.method for each in figures)
    return {name: sorted((f for f in figures if f.method == name), key=lambda f: f.rate) for name in names}


@style.styled()
def knee_plot(
    runs: Sequence[LoadRun], figures: Sequence[Figures], path: Path, subtitle: str, terms: Terms
) -> Path | None:
    """Draw latency over throughput, a line per method through its rates; None with a single rate."""
    methods = _methods(figures)
    if max(map(len, methods.values())) < 2:
        return None
    many = len(methods) > _MOST_PANELS  # then medians alone, as the lines would hide each other
    figure = style.new_figure(style.PAGE, 3.2 if many else 3.0)
    panels = figure.subplots(1, 2)
    texts = {"ttft": "time to first token (s)", "e2e": "arrival to end (s)"}
    for axes, (name, text) in zip(panels, texts.items(), strict=True):
        for index, (method, own) in enumerate(methods.items()):
            known = [each for each in own if each[name] is not None]
            across = [each.output_tokens_per_second for each in known]
            for level, line in ((50, "-"), (99, ":"))[: 1 if many else 2]:
                label = method if many else f"{method}: {'median' if level == 50 else '99th percentile'}"
                values = [each[name][f"p{level}"] for each in known]
                axes.plot(across, values, linestyle=line, label=label, **style.looks(index))
            for each in known if not many else ():
                style.note(axes, f"{each.rate:.3g}", (each.output_tokens_per_second, each[name].p50), (3, -6))
        _limit(axes, terms, name)
        style.plain_log(axes.yaxis)
        axes.set(xlabel="output tokens per second of completed requests", ylabel=text)
    style.legend_of(figure, panels[0], ncols=5 if many else 2)
    beside = f"; numbers beside the medians: {X[figures[0].loop]}"
    about = "Median latency over throughput" if many else f"Latency over throughput{beside}"
    return style.finish(figure, path, about, subtitle)


@style.styled()
def latency_plot(
    runs: Sequence[LoadRun], figures: Sequence[Figures], path: Path, subtitle: str, terms: Terms
) -> Path | None:
    """Draw percentiles of TTFT and TPOT with their intervals: lines over the rate, or points with a single rate."""
    methods = _methods(figures)
    several = max(map(len, methods.values())) > 1
    figure = style.new_figure(style.PAGE, 4.0)
    panels = figure.subplots(2, len(_LEVELS), sharey="row", sharex=True)
    texts = {"ttft": "time to first\ntoken (ms)", "tpot": "time per further\ntoken (ms)"}
    for row, (name, text) in enumerate(texts.items()):
        for axes, (level, words) in zip(panels[row], _LEVELS.items(), strict=True):
            for index, (method, own) in enumerate(methods.items()):
                known = [(each.rate if several else index, each[name]) for each in own if each[name] is not None]
                points = [(at, spread[f"p{level}"], spread[f"p{level}_interval"]) for at, spread in known]
                style.curve(axes, points, index, method, scale=1000)
            _limit(axes, terms, name, 1000)
            style.plain_log(axes.yaxis)
            axes.xaxis.grid(several)
            if row == 0:
                axes.set_title(words)
        panels[row][0].set_ylabel(text)
    if several:
        panels[1][1].set_xlabel(X[figures[0].loop])
    else:
        panels[0][0].set_xlim(-0.5, len(methods) - 0.5)
        panels[0][0].set_xticks([])
    style.legend_of(figure, panels[0][0], panels[1][0])
    about = "" if several else f", at {figures[0].rate:.3g} {X[figures[0].loop]}"
    return style.finish(figure, path, f"Percentiles over requests, with their intervals{about}", subtitle)


@style.styled()
def goodput_plot(
    runs: Sequence[LoadRun], figures: Sequence[Figures], path: Path, subtitle: str, terms: Terms
) -> Path | None:
    """Draw goodput and the share within all limits over the rate; None without limits."""
    if terms.limits is None:
        return None
    methods = _methods(figures)
    many = len(methods) > _MOST_PANELS  # then what ended is left out, as the lines would hide each other
    figure = style.new_figure(style.PAGE, 3.2 if many else 2.8)
    left, right = figure.subplots(1, 2)
    for index, (method, own) in enumerate(methods.items()):
        rates = [each.rate for each in own]
        looks = style.looks(index)
        label = method if many else f"{method}: within all limits"
        left.plot(rates, [each.goodput.per_second for each in own], label=label, **looks)
        done = [each.requests_per_second for each in own]
        if not many:
            left.plot(rates, done, label=f"{method}: all that ended", **{**looks, "alpha": 0.5}, linestyle=":")
        right.plot(rates, [100 * each.goodput.attainment for each in own], **looks)
    if figures[0].loop == OPEN and all(map(isfinite, (each.rate for each in figures))):
        arriving = sorted({each.rate for each in figures})
        left.plot(arriving, arriving, color=style.FAINT, linewidth=0.8, linestyle="--", label="all that arrive")
    for share in (90, 99):
        right.axhline(share, color=style.FAINT, linewidth=0.8, linestyle=":", label="90 % and 99 %")
    left.set(xlabel=X[figures[0].loop], ylabel="requests per second")
    right.set(xlabel=X[figures[0].loop], ylabel="within all limits (%)")
    right.set_ylim(-3, 103)
    most = max((each.requests_per_second or 0.0 for each in figures), default=0.0)
    left.set_ylim(0, 1.3 * most or 1.0)  # what arrives may be far more than what can be served
    style.legend_of(figure, left, right, ncols=5 if many else 2)
    return style.finish(figure, path, f"Goodput: requests with {terms.limits}", subtitle)


@style.styled()
def concurrency_plot(
    runs: Sequence[LoadRun], figures: Sequence[Figures], path: Path, subtitle: str, terms: Terms
) -> Path:
    """Draw requests with a slot and in the queue over time, at up to four rates, with Little's law.

    Of more than four methods the first one, and the three with the fewest requests in the engine at the highest rate.
    """
    rates = sorted({run.rate for run in runs})
    shown = rates if len(rates) <= _MOST_PANELS else [rates[round(i * (len(rates) - 1) / 3)] for i in range(4)]
    methods = list(_methods(figures))
    if len(methods) > _MOST_PANELS:
        last = sorted((each for each in figures if each.rate == rates[-1]), key=lambda each: each.in_engine)
        fewest = [each.method for each in last if each.method != methods[0]][: _MOST_PANELS - 1]
        methods = [method for method in methods if method == methods[0] or method in fewest]
    figure = style.new_figure(style.PAGE, 1.2 + 1.4 * len(shown))
    panels = figure.subplots(len(shown), len(methods), squeeze=False, sharey="row")
    for run, found in zip(runs, figures, strict=True):
        if run.rate not in shown or run.method not in methods or not run.seconds:
            continue
        axes, levels = panels[shown.index(run.rate)][methods.index(run.method)], in_flight(run)
        axes.fill_between(levels.time, levels.running, step="mid", color=style.color(0), alpha=0.7, label="with a slot")
        above = levels.running + levels.waiting
        axes.fill_between(
            levels.time, levels.running, above, step="mid", color=style.color(1), alpha=0.6, label="in the queue"
        )
        what = f"{run.rate:.3g} requests/s" if run.loop == OPEN else f"{run.rate:.3g} users"
        text = f"mean {found.in_engine:.1f}; by Little's law {found.expected:.1f}"
        axes.set_title(f"{style.wrapped(run.method, 24)}, {what}\n{text}", fontsize=style.SMALLEST)
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.05 * above.max()))
        axes.set_xlim(0, run.seconds)
        axes.xaxis.grid(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("requests")
    for axes in panels[-1]:
        axes.set_xlabel("seconds")
    style.legend_of(figure, panels[0][0], ncols=2)
    return style.finish(figure, path, "Requests in the engine over time", subtitle)


@style.styled()
def classes_plot(classes: Sequence[tuple[LoadRun, Mapping[str, Figures]]], path: Path, subtitle: str) -> Path:
    """Draw TTFT and TPOT of every class at the highest rate: who waits behind whom."""
    highest = max(run.rate for run, _ in classes)
    shown = [(run, own) for run, own in classes if run.rate == highest]
    names = list(dict.fromkeys(name for _, own in shown for name in own))
    figure = style.new_figure(style.PAGE, 1.3 + 0.28 * len(names) * max(1, len(shown) / 2))
    panels = figure.subplots(1, 2, sharey=True)
    texts = {"ttft": "time to first token (ms)", "tpot": "time per further token (ms)"}
    for axes, (name, text) in zip(panels, texts.items(), strict=True):
        for index, (run, own) in enumerate(shown):
            offset = 0.0 if len(shown) == 1 else -0.22 + 0.44 * index / (len(shown) - 1)
            for row, klass in enumerate(names):
                spread = own[klass][name] if klass in own else None
                if spread is None:
                    continue
                low, high = 1000 * spread.p50, 1000 * spread.p99
                axes.hlines(row + offset, low, high, color=style.color(index), linewidth=1.3)
                axes.plot([low, high], [row + offset] * 2, linestyle="none", label=run.method, **style.looks(index))
        axes.set_xlabel(text)
        style.plain_log(axes.xaxis)
    style.name_rows(panels[0], names, 20)
    style.legend_of(figure, panels[0])
    loop = X[shown[0][0].loop]
    return style.finish(figure, path, f"Median to 99th percentile by class, at {highest:.3g} {loop}", subtitle)


def _limit(axes: "Axes", terms: Terms, name: str, unit: float = 1.0) -> None:
    limit = getattr(terms.limits, name, None)
    if limit is not None:
        axes.axhline(unit * limit, color=style.WRONG, linewidth=1.0, linestyle="--", label="limit")


PLOTS: Mapping[str, Callable[[Sequence[LoadRun], Sequence[Figures], Path, str, Terms], Path | None]] = {
    "knee.png": knee_plot,
    "latency.png": latency_plot,
    "goodput.png": goodput_plot,
    "concurrency.png": concurrency_plot,
}
"""The pictures of a report by file name."""
