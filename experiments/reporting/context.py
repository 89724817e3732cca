"""One drafter or several at several lengths of the context: acceptance, time per round, and the caches."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.reporting import style
from experiments.reporting.cells import NOTHING, label_cell, number, signed, three_digits, times, with_interval
from experiments.reporting.comparison import conditions_of
from experiments.reporting.formats import document, publish
from experiments.reporting.table import Cell, Table, left
from experiments.reporting.verdicts import warning
from experiments.results.comparison import commit_of, dataset_name
from experiments.results.frame import Figures, Frame
from experiments.results.records import PLAIN
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap
from experiments.results.summary import MethodSummary
from experiments.results.timing import calls_of, gain_over

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Acceptance, time and caches by length of the context"


def contexts(runs: Sequence[Run], bootstrap: Bootstrap) -> list[Figures]:
    """Return a row per method, temperature and length of the context, the shortest first.

    Returns:
        Figures of the run's method and, besides: ``context`` (tokens of the prompts), ``change`` in expected tokens per
        round since the shortest context, on the same prompts, with its interval; seconds of ``draft`` and ``verify``
        per round; bytes of a row in the caches of drafter and target at the end of its output; and the drafter's
        ``window``, None where it sees everything.

    Raises:
        ValueError: A run's prompts have no length, or a method has fewer than two lengths, or one of them twice.
    """
    found: dict[tuple[float, str], dict[int, tuple[Run, MethodSummary]]] = {}
    for run in runs:
        for method in run.summary.methods:
            if method.method != PLAIN and method.finished:
                own, context = found.setdefault((method.temperature, method.method), {}), input_of(run, "contexts")
                if context in own:
                    what = f"{method.method} at {context} tokens of context"
                    raise ValueError(f"two runs have {what}: sweep over dataset.tokens, drafter and temperature alone")
                own[context] = run, method
    if not found or any(len(own) < 2 for own in found.values()):
        raise ValueError("contexts need runs of every method at two lengths or more: give dataset.tokens=128,512")
    return [
        _row(context, *own[context], first=own[min(own)], bootstrap=bootstrap)
        for _, own in sorted(found.items(), key=lambda each: each[0][0])
        for context in sorted(own)
    ]


def input_of(run: Run, study: str) -> int:
    """Return the tokens of a run's prompts; refuse one whose prompts have no common length, for a study's report."""
    tokens = run.manifest["config"]["dataset"].get("tokens")
    if tokens is None:
        raise ValueError(
            f"{run.folder} has no dataset.tokens: {study} need a dataset that makes prompts of one length, give "
            f"dataset=joined or dataset=context"
        )
    return int(tokens)


def _row(
    context: int, run: Run, method: MethodSummary, *, first: tuple[Run, MethodSummary], bootstrap: Bootstrap
) -> Figures:
    own, other = run.of(method), first[0].of(first[1])
    assert own is not None and other is not None, "runs that were read have frames"
    good = own[~own.failed]
    gain = None if method is first[1] else gain_over(own, other, bootstrap)
    positions = float((good.prompt_tokens + good.tokens).mean())
    keys = ("method", "label", "exactness", "temperature", "finished", "mean_acceptance_length", "speedup")
    keys += ("mean_acceptance_length_interval", "tokens_per_second", "not_lossless")
    cache = run.manifest.get("drafter_cache", {}).get(method.method) or {"bytes_per_position": None, "window": None}
    bytes_of = {"drafter": cache["bytes_per_position"], "target": run.manifest["target"].get("kv_bytes_per_position")}
    return Figures(
        context=context,
        **{key: method[key] for key in keys},
        change=None if gain is None else gain.tokens,
        change_interval=None if gain is None else gain.interval,
        acceptance=method.acceptance_by_position.unconditional,
        **_per_round(good),
        **{f"{name}_bytes": each and each * positions for name, each in bytes_of.items()},
        window=cache["window"],
    )


def _per_round(good: Frame) -> dict[str, float | None]:
    """Seconds of the stages per round; the rows of a batch share their rounds."""
    calls = calls_of(good)
    rounds = good.groupby(["batch", "turn"], sort=False).rounds.max().sum()
    seconds = {name: sum(stages.get(name, 0.0) for stages in calls.stages) for name in ("draft", "verify")}
    return {name: found / rounds if rounds and found else None for name, found in seconds.items()}


def report_contexts(runs: Sequence[Run], folder: Path, missing: Sequence[str] = ()) -> list[Figures]:
    """Print the table and the sentences, and write them with the figures and the picture into a folder."""
    bootstrap = Bootstrap(**runs[0].manifest["config"]["bootstrap"]) if runs else Bootstrap()
    found = contexts(runs, bootstrap)
    conditions = conditions_of(
        runs,
        lambda run: dataset_name(run).partition(", tokens")[0],
        lambda run: f"batch {run.manifest['config']['engine']['max_batch_size']}",
        lambda run: f"commit {commit_of(run.manifest)}",
    )
    notes = [
        *missing,
        *conditions,
        "all lengths go on from the same places",
        f"brackets: {bootstrap.confidence:.0%} intervals over prompts, of the change paired and given the drafts",
        "accepted at: the share of rounds that accepted as many drafted tokens",
        "caches: keys and values of one row at the end of its output",
    ]
    made, said = table(found, notes=notes), sentences(found)
    publish(
        folder,
        "context",
        tables=[made],
        document=document(f"{'; '.join(notes)}.", made, said),
        figures={"contexts": found},
        said=said,
        drawn=lambda: [contexts_plot(found, folder / "context.png", "; ".join(conditions))],
    )
    return found


def table(found: Sequence[Figures], *, notes: Sequence[str] = ()) -> Table:
    """A row per method and length."""
    shown = _shown(found)
    return Table.of(
        found,
        [
            (left("method", fold=True, min_width=12), lambda row: label_cell(row, _name(row, found))),
            ("context,\ntokens", lambda row: f"{row.context:,}"),
            ("tokens\nper round", lambda row: with_interval(
                number(row.mean_acceptance_length), row.mean_acceptance_length_interval)),
            ("since the\nshortest", lambda row: signed(row.change, row.change_interval, 2)),
            (f"accepted at\n{', '.join(map(str, shown))}", lambda row: " ".join(
                f"{row.acceptance[place - 1]:.2f}" if place <= len(row.acceptance) else NOTHING for place in shown)),
            ("ms/round,\ndraft; verify", lambda row: f"{_ms(row.draft)}; {_ms(row.verify)}"),
            ("caches, MB:\ndrafter; target", lambda row: f"{_mb(row.drafter_bytes)}; {_mb(row.target_bytes)}"),
            ("tokens/s;\nspeedup", lambda row: Cell(three_digits(row.tokens_per_second), [times(row.speedup)], "; ")),
        ],
        title=TITLE,
        notes=notes,
        section=lambda row: (row.method, row.temperature),
    )  # fmt: skip


def _shown(found: Sequence[Figures]) -> list[int]:
    """The positions of drafts that are named: the first ones, powers of two, and the deepest."""
    deepest = max(len(row.acceptance) for row in found)
    return [place for place in (1, 2, 4, 8, 16) if place < deepest] + ([deepest] if deepest else [])


def _name(row: Figures, found: Sequence[Figures]) -> str:
    """A method's label, with its temperature where there are several."""
    several = len({each.temperature for each in found}) > 1
    return row.label + (f", T = {row.temperature:g}" if several else "")


def sentences(found: Sequence[Figures]) -> list[str]:
    """The loss of each method from the shortest to the longest context, and whether chance explains it."""
    said = []
    for key in dict.fromkeys((row.method, row.temperature) for row in found):
        own = [row for row in found if (row.method, row.temperature) == key]
        first, last = own[0], own[-1]
        line = (
            f"{_name(last, found)}: {number(first.mean_acceptance_length)} tokens per round at "
            f"{first.context:,} tokens of context, {number(last.mean_acceptance_length)} at {last.context:,}"
        )
        bounds = last.change_interval
        if bounds is not None:
            sure = "less" if bounds[1] < 0 else "more" if bounds[0] > 0 else "no more than chance"
            line += f": {sure} (paired {last.change:+.2f} [{bounds[0]:+.2f}, {bounds[1]:+.2f}])"
        if first.draft and last.draft:
            line += f"; its drafts take {_ms(first.draft)} ms per round, then {_ms(last.draft)}"
        if last.window and last.window < last.context and last.drafter_bytes:
            line += f"; it sees {last.window:,} positions, and its cache holds them all ({_mb(last.drafter_bytes)} MB)"
        said.append(line)
    return said


def _ms(seconds: float | None) -> str:
    return three_digits(None if seconds is None else 1000 * seconds)


def _mb(size: float | None) -> str:
    return NOTHING if size is None else "0" if not size else three_digits(size / 1e6)


@style.styled()
def contexts_plot(found: Sequence[Figures], path: Path, subtitle: str) -> Path:
    """Draw length, time and caches by context, and for every method acceptance at each position of the draft."""
    keys = list(dict.fromkeys((row.method, row.temperature) for row in found))
    across = 2 if len(keys) == 1 else 3
    down = -(-(3 + len(keys)) // across)
    figure = style.new_figure(style.PAGE, 0.9 + 2.1 * down)
    panels = figure.subplots(down, across, squeeze=False).flat
    length, time, caches = panels[:3]
    for index, key in enumerate(keys):
        own = [row for row in found if (row.method, row.temperature) == key]
        label = _name(own[0], found)
        points = [(row.context, row.mean_acceptance_length, row.mean_acceptance_length_interval) for row in own]
        style.curve(length, points, index, label)
        for axes, parts, unit in ((time, ("draft", "verify"), 1e3), (caches, ("drafter_bytes", "target_bytes"), 1e-6)):
            for name, line in zip(parts, ("-", ":"), strict=True):
                known = [(row.context, unit * row[name]) for row in own if row[name]]
                axes.plot(*zip(*known, strict=True), **style.looks(index), linestyle=line) if known else None
        _acceptance(panels[3 + index], own, label)
    for axes in panels[3 + len(keys) :]:
        axes.set_visible(False)
    style.baseline(length)
    ticks = sorted({row.context for row in found})
    for axes in panels:
        style.plain_log(axes.xaxis, ticks if len(ticks) <= 6 else ticks[:: -(-len(ticks) // 6)], base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
        axes.set_xlabel("tokens of context")
    length.set(title="tokens per round", ylim=(0, None))
    time.set(title="ms per round\n— draft   ··· verify", ylim=(0, 1.1 * max(time.dataLim.y1, 1e-9)))
    caches.set(title="keys and values of a row, MB\n— drafter   ··· target")
    style.plain_log(caches.yaxis)
    style.legend_of(figure, length)
    alarm = warning(list(dict.fromkeys(row.method for row in found if row.not_lossless)))
    return style.finish(figure, path, f"{TITLE}: all lengths go on from the same places", subtitle, alarm=alarm)


def _acceptance(axes: "Axes", own: Sequence[Figures], label: str) -> None:
    """Draw a line per position of the draft, named by its number."""
    from matplotlib import colormaps

    deepest = max(len(row.acceptance) for row in own)
    for place in range(deepest):
        color = colormaps["viridis"](0.85 * place / max(1, deepest - 1))
        known = [(row.context, row.acceptance[place]) for row in own if place < len(row.acceptance)]
        axes.plot(*zip(*known, strict=True), color=color, marker=".")
        if place + 1 in _shown(own):
            style.note(axes, f"{place + 1}", known[-1], color=color)
    axes.set(title=f"accepted at position 1 to {deepest},\n{label}", ylim=(0, 1))
