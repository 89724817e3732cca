"""The four kinds of requests as a table, sentences, figures and a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.reporting import style, terminal
from experiments.reporting.cells import EMPTY, NOTHING, lossiness, number, percent, three_digits, times, with_interval
from experiments.reporting.comparison import conditions_of
from experiments.reporting.formats import document, write_texts
from experiments.reporting.requests import CLOSED
from experiments.reporting.run_tables import label_of
from experiments.reporting.table import Cell, Table, left
from experiments.results.comparison import commit_of
from experiments.results.lossless import promises_exact
from experiments.results.plain_json import json_text
from experiments.results.quadrants import Figures, Quadrant, quadrants
from experiments.results.records import PLAIN
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXAMPLES = {
    "SS": "a turn of a chat, a classification",
    "SL": "writing, code",
    "LS": "a summary, an extraction, an answer from documents",
    "LL": "a translation, a report, a long chat",
}
"""Requests of each quadrant, in practice."""
TITLE = "Four kinds of requests, and what drafting does to each"
QuadrantRow = tuple[Quadrant, Figures]
_WORDS = {"S": "short", "L": "long"}
_PLACES = {"SS": (0, 0), "SL": (0, 1), "LS": (1, 0), "LL": (1, 1)}
_LOOKS = {"better": (style.COLORS[2], "o"), "worse": (style.COLORS[4], "v"), "unsure": (style.FAINT, "D")}
"""Color and marker, by what the interval says."""


def report_quadrants(runs: Sequence[Run], folder: Path, missing: Sequence[str] = ()) -> list[Quadrant]:
    """Print the table and the sentences, and write them with the figures and the picture into a folder.

    Args:
        runs: The four runs; fewer, if some have failed.
        folder: Takes the files.
        missing: Sentences on jobs that have no result.

    Raises:
        ValueError: As ``quadrants``.
    """
    bootstrap = Bootstrap(**runs[0].manifest["config"]["bootstrap"]) if runs else Bootstrap()
    found = quadrants(runs, bootstrap)
    labels = dict(runs[0].manifest["config"].get("labels") or {})
    conditions = conditions_of(
        runs,
        lambda run: f"{run.manifest['prompts']} prompts",
        lambda run: f"batch {run.manifest['config']['engine']['max_batch_size']}",
        lambda run: f"commit {commit_of(run.manifest)}",
    )
    notes = [
        *missing,
        *conditions,
        CLOSED,
        "figures are means over requests",
        "the kind's own metric is marked with an asterisk",
        f"brackets: {bootstrap.confidence:.0%} intervals over prompts",
    ]
    made, said = table(found, labels, notes=notes), sentences(found, labels)
    console = terminal.console()
    console.print(terminal.render(made, terminal.Frame.NARROW))
    terminal.say(console, *said)
    texts = {
        "quadrants.md": document(f"{'; '.join(notes)}.", made, said),
        "quadrants.json": json_text({"quadrants": [_figures(each) for each in found]}),
    }
    written = write_texts(folder, texts)
    temperatures = sorted({each.temperature for each in found})
    for temperature in temperatures:
        name = "quadrants.png" if len(temperatures) == 1 else f"quadrants_T{temperature:g}.png"
        chosen = [each for each in found if each.temperature == temperature]
        written.append(quadrants_plot(chosen, folder / name, "; ".join([*conditions, CLOSED]), labels))
    terminal.list_written(console, written)
    return found


def table(found: Sequence[Quadrant], labels: Mapping[str, str], *, notes: Sequence[str] = ()) -> Table:
    """A row per quadrant and method."""

    def own(name: str, row: QuadrantRow, text: str) -> str:
        return text + ("*" if row[0].name == name else "")

    def kind(row: QuadrantRow) -> str:
        index = row[0].methods.index(row[1])
        texts = (f"{row[0].name}: {row[0].input_tokens:.0f} in", f"{row[0].output_tokens:.0f} out")
        return texts[index] if index < len(texts) else ""

    def prefill(row: QuadrantRow) -> str:
        felt = row[1].summary.requests
        return NOTHING if felt is None else percent(felt.stage_shares.get("prefill"))

    def gain(row: QuadrantRow) -> Cell:
        if row[1].gain is None:
            return EMPTY
        leads = row[1] is best(row[0]) and not _doubt(row[1])
        return with_interval(times(row[1].gain), row[1].gain_interval, best=leads)

    return Table.of(
        [(quadrant, each) for quadrant in found for each in quadrant.methods],
        [
            (left("kind of\nrequests"), kind),
            (
                left("method", fold=True, min_width=18),
                lambda row: Cell(label_of(row[1].summary, labels), emphasis=lossiness(row[1].summary.exactness)),
            ),
            ("requests\n/min", lambda row: own("SS", row, number(row[1].requests_per_minute, 1))),
            ("TTFT,\nms", lambda row: own("LS", row, _ms(row[1].ttft))),
            ("TPOT,\nms", lambda row: own("SL", row, _ms(row[1].tpot))),
            ("slot time,\ns", lambda row: own("LL", row, number(row[1].slot_time, 2))),
            ("tokens/s,\nall users", lambda row: number(row[1].summary.tokens_per_second, 1)),
            ("tokens\nper round", lambda row: number(row[1].summary.mean_acceptance_length)),
            ("prefill,\nshare", prefill),
            ("own metric,\ntimes better", gain),
        ],
        title=TITLE,
        notes=notes,
        section=lambda row: id(row[0]),
    )


def sentences(found: Sequence[Quadrant], labels: Mapping[str, str]) -> list[str]:
    """The metric of each quadrant, who is best there and who makes it worse, and what its cache takes."""
    said = []
    several = len({each.temperature for each in found}) > 1
    for quadrant in found:
        metric, plain, top = quadrant.metric, quadrant.plain, best(quadrant)
        at = f" at temperature {quadrant.temperature:g}" if several else ""
        line = f"{quadrant.name}{at}, {_lengths(quadrant)} ({EXAMPLES[quadrant.name]}): what counts is the "
        line += metric.meaning + ("" if plain is None else f", {own_value(quadrant, plain)} when decoding plainly")
        if top is not None:
            line += f"; best: {label_of(top.summary, labels)}, {times(top.gain)}" + _doubt(top)
        worse = [each for each in quadrant.methods if each.gain_interval is not None and each.gain_interval[1] < 1]
        if worse:
            line += f"; worse than plain decoding: {', '.join(label_of(each.summary, labels) for each in worse)}"
        said.append(line)
        if quadrant.ended_early:
            said.append(
                f"{quadrant.name}: OUTPUTS ENDED EARLY: {quadrant.output_tokens:.0f} of {quadrant.asked} tokens on "
                f"average, so this is no quadrant of long outputs; sampling.ignore_eos=true keeps them going"
            )
    known = [each for each in found if each.kv_begin is not None and each.kv_end is not None]
    if known and not several:
        parts = [
            f"{q.name} {_megabytes(q.kv_begin)} to {_megabytes(q.kv_end)} MB ({q.rows_per_gigabyte:.0f} per GB)"
            for q in known
        ]
        head = "keys and values of one request, from its first to its last token, and requests that fit"
        said.append(f"{head}: {', '.join(parts)}")
    return said


def best(quadrant: Quadrant) -> Figures | None:
    """The exact method with the largest gain; None where no method is better than plain decoding."""
    compared = [each for each in quadrant.methods if each.gain is not None and not each.summary.not_lossless]
    rivals = [each for each in compared if promises_exact(each.summary.exactness)]
    top = max(rivals, key=lambda each: each.gain or 0.0, default=None)
    return top if top is not None and (top.gain or 0.0) > 1 else None


def own_value(quadrant: Quadrant, figures: Figures) -> str:
    """The quadrant's metric of a method, with its unit."""
    return "not known" if figures.own is None else f"{three_digits(figures.own)} {quadrant.metric.unit}"


def _doubt(top: Figures) -> str:
    unsure = top.gain_interval is not None and top.gain_interval[0] <= 1
    return ", as far as the interval tells: it holds 1" if unsure else ""


def _lengths(quadrant: Quadrant) -> str:
    first, second = (_WORDS[letter] for letter in quadrant.name)
    return f"{first} input ({quadrant.input_tokens:.0f} tokens), {second} output ({quadrant.output_tokens:.0f})"


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else number(1000 * seconds, 1 if seconds < 0.1 else 0)


def _megabytes(value: float | None) -> str:
    return NOTHING if value is None else f"{value / 1e6:.3g}"


def _figures(quadrant: Quadrant) -> dict[str, object]:
    own = ("method", "own", "gain", "gain_interval", "requests_per_minute", "ttft", "tpot", "slot_time")
    return {
        "quadrant": quadrant.name,
        "temperature": quadrant.temperature,
        "metric": asdict(quadrant.metric),
        "input_tokens": quadrant.input_tokens,
        "output_tokens": quadrant.output_tokens,
        "max_new_tokens": quadrant.asked,
        "kv_bytes_begin": quadrant.kv_begin,
        "kv_bytes_end": quadrant.kv_end,
        "requests_per_gigabyte": quadrant.rows_per_gigabyte,
        "run": quadrant.run.folder.name,
        "methods": [
            {
                **{name: getattr(each, name) for name in own},
                "tokens_per_second": each.summary.tokens_per_second,
                "mean_acceptance_length": each.summary.mean_acceptance_length,
                "requests": None if each.summary.requests is None else asdict(each.summary.requests),
            }
            for each in quadrant.methods
        ],
    }


@style.styled()
def quadrants_plot(found: Sequence[Quadrant], path: Path, subtitle: str, labels: Mapping[str, str]) -> Path:
    """Draw how many times better every method is than plain decoding, by each quadrant's own metric.

    A panel per kind of requests, placed by the lengths of input and output.
    """
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(each.method for quadrant in found for each in quadrant.methods if each.method != PLAIN))
    figure = style.new_figure(style.PAGE, 3.0 + 0.44 * max(2, len(names)))
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    gains = [end for q in found for m in q.methods for end in (m.gain or 1.0, *(m.gain_interval or ()))] or [1.0]
    for quadrant in found:
        _panel(panels[_PLACES[quadrant.name]], quadrant, names)
    for name in set(_PLACES) - {quadrant.name for quadrant in found}:
        panels[_PLACES[name]].annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center")
    for row in panels:
        style.name_rows(row[0], [labels.get(name, name) for name in names], 24, lines=False)
    least, most = min(1.0, *gains), max(1.0, *gains)
    room = 0.18 * (most - least)
    panels[0][0].set_xlim(max(0.0, least - 0.4 * room), most + room)
    for axes in panels[1]:
        axes.set_xlabel("times better than plain decoding")
    handles = [Line2D([], [], color=color, marker=marker) for color, marker in _LOOKS.values()]
    style.legend(figure, handles, ["better than plain decoding", "worse", "cannot be told: the interval holds 1"])
    style.title(figure, "Four kinds of requests: what counts for each, and what drafting does to it", subtitle)
    return style.save(figure, path)


def _panel(axes: "Axes", quadrant: Quadrant, names: Sequence[str]) -> None:
    for each in quadrant.methods:
        if each.gain is None:
            continue
        low, high = each.gain_interval or (each.gain, each.gain)
        color, marker = _LOOKS["better" if low > 1 else "worse" if high < 1 else "unsure"]
        style.dots(axes, [(names.index(each.method), each.gain, each.gain_interval)], 0, color=color, marker=marker)
    plain = quadrant.plain
    value = "" if plain is None or plain.own is None else f"plain decoding: {own_value(quadrant, plain)}"
    counts = f"what counts: {quadrant.metric.meaning}"
    axes.set_title(f"{_lengths(quadrant)}\n{counts}\n{value}", fontsize=7.5)
    style.baseline(axes, vertical=True)
    axes.grid(axis="x")
