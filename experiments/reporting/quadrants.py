"""The four kinds of requests as a table, sentences, figures and a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.reporting import markdown, terminal
from experiments.reporting.cells import NOTHING, lossiness, number, percent, times, with_interval
from experiments.reporting.quadrants_plot import quadrants_plot
from experiments.reporting.requests import CLOSED
from experiments.reporting.table import Cell, Column, Emphasis, Table
from experiments.results.comparison import commit_of
from experiments.results.lossless import promises_exact
from experiments.results.plain_json import json_text
from experiments.results.quadrants import METRICS, Figures, Quadrant, quadrants
from experiments.results.records import PLAIN
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap

WORDS = {"S": "short", "L": "long"}
EXAMPLES = {
    "SS": "a turn of a chat, a classification",
    "SL": "writing, code",
    "LS": "a summary, an extraction, an answer from documents",
    "LL": "a translation, a report, a long chat",
}
"""What requests of a quadrant are, in practice."""
COLUMNS = (
    Column("kind of\nrequests", "left"),
    Column("method", "left", fold=True, min_width=18),
    Column("requests\n/min"),
    Column("TTFT,\nms"),
    Column("TPOT,\nms"),
    Column("slot time,\ns"),
    Column("tokens/s,\nall users"),
    Column("tokens\nper round"),
    Column("prefill,\nshare"),
    Column("own metric,\ntimes better"),
)
TITLE = "Four kinds of requests, and what drafting does to each"


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
    notes = [
        *missing,
        *_conditions(runs),
        CLOSED,
        "figures are means over requests",
        "the kind's own metric is marked with an asterisk",
        f"brackets: {bootstrap.confidence:.0%} intervals over prompts",
    ]
    made = table(found, labels, notes=notes)
    said = sentences(found, labels)
    console = terminal.console()
    console.print(terminal.render(made, terminal.Frame.NARROW))
    terminal.say(console, *said)
    document = [f"{'; '.join(notes)}.", "", markdown.render(made).rstrip(), "", *(f"- {each}" for each in said)]
    text, figures = folder / "quadrants.md", folder / "quadrants.json"
    text.write_text("\n".join(document) + "\n", encoding="utf-8")
    figures.write_text(json_text({"quadrants": [_figures(each) for each in found]}), encoding="utf-8")
    pictures = []
    temperatures = sorted({each.temperature for each in found})
    for temperature in temperatures:
        name = "quadrants.png" if len(temperatures) == 1 else f"quadrants_T{temperature:g}.png"
        chosen = [each for each in found if each.temperature == temperature]
        pictures.append(quadrants_plot(chosen, folder / name, "; ".join([*_conditions(runs), CLOSED]), labels))
    terminal.list_written(console, [text, figures, *pictures])
    return found


def table(found: Sequence[Quadrant], labels: Mapping[str, str], *, notes: Sequence[str] = ()) -> Table:
    """Returns a row per quadrant and method."""
    made = Table(COLUMNS, TITLE, notes)
    for quadrant in found:
        for index, each in enumerate(quadrant.methods):
            shares = each.summary.requests.stage_shares if each.summary.requests is not None else {}
            own = {name: "*" if name == quadrant.name else "" for name in METRICS}
            made.add(
                _kind(quadrant, index),
                Cell(method_name(each, labels), emphasis=lossiness(each.summary.exactness)),
                number(each.requests_per_minute, 1) + own["SS"],
                _ms(each.ttft) + own["LS"],
                _ms(each.tpot) + own["SL"],
                number(each.slot_time, 2) + own["LL"],
                number(each.summary.tokens_per_second, 1),
                number(each.summary.mean_acceptance_length),
                percent(shares.get("prefill")) if shares else NOTHING,
                Cell(NOTHING)
                if each.gain is None
                else with_interval(
                    times(each.gain),
                    each.gain_interval,
                    emphasis=Emphasis.BEST if each is best(quadrant) and not _doubt(each) else Emphasis.NONE,
                ),
                end_section=index + 1 == len(quadrant.methods),
            )
    return made


def sentences(found: Sequence[Quadrant], labels: Mapping[str, str]) -> list[str]:
    """Returns what each quadrant is about, who is best there and who makes it worse, and what its cache takes."""
    said = []
    temperatures = {each.temperature for each in found}
    for quadrant in found:
        metric, plain = quadrant.metric, quadrant.plain
        at = f" at temperature {quadrant.temperature:g}" if len(temperatures) > 1 else ""
        line = (
            f"{quadrant.name}{at}, {_lengths(quadrant)} ({EXAMPLES[quadrant.name]}): what counts is the "
            f"{metric.meaning}" + ("" if plain is None else f", {own_value(quadrant, plain)} when decoding plainly")
        )
        top = best(quadrant)
        if top is not None:
            line += f"; best: {method_name(top, labels)}, {times(top.gain)}" + _doubt(top)
        worse = [each for each in quadrant.methods if each.gain_interval is not None and each.gain_interval[1] < 1]
        if worse:
            line += f"; worse than plain decoding: {', '.join(method_name(each, labels) for each in worse)}"
        said.append(line)
        if quadrant.ended_early:
            said.append(
                f"{quadrant.name}: OUTPUTS ENDED EARLY: {quadrant.output_tokens:.0f} of {quadrant.asked} tokens on "
                f"average, so this is no quadrant of long outputs; sampling.ignore_eos=true keeps them going"
            )
    said += _memory(found)
    return said


def _memory(found: Sequence[Quadrant]) -> list[str]:
    """What the cache of one request takes, and how it grows."""
    known = [each for each in found if each.kv_begin is not None and each.kv_end is not None]
    if not known or len({each.temperature for each in known}) > 1:
        return []
    parts = [
        f"{each.name} {_megabytes(each.kv_begin)} to {_megabytes(each.kv_end)} MB ({each.rows_per_gigabyte:.0f} per GB)"
        for each in known
    ]
    return [
        f"keys and values of one request, from its first to its last token, and requests that fit: {', '.join(parts)}"
    ]


def best(quadrant: Quadrant) -> Figures | None:
    """The exact method with the largest gain; None where no method is better than plain decoding."""
    compared = [each for each in quadrant.methods if each.gain is not None and not each.summary.not_lossless]
    rivals = [each for each in compared if promises_exact(each.summary.exactness)]
    top = max(rivals, key=lambda each: each.gain or 0.0, default=None)
    return top if top is not None and (top.gain or 0.0) > 1 else None


def method_name(figures: Figures, labels: Mapping[str, str]) -> str:
    """What a method is called."""
    if figures.method == PLAIN:
        return "plain decoding"
    return figures.summary.label.replace(figures.method, labels.get(figures.method, figures.method), 1)


def own_value(quadrant: Quadrant, figures: Figures) -> str:
    """The quadrant's metric of a method, with its unit."""
    if figures.own is None:
        return "not known"
    digits = 0 if figures.own >= 100 else 1 if figures.own >= 10 else 2
    return f"{figures.own:.{digits}f} {quadrant.metric.unit}"


def _doubt(top: Figures) -> str:
    unsure = top.gain_interval is None or top.gain_interval[0] <= 1
    return ", as far as the interval tells: it holds 1" if unsure and top.gain_interval is not None else ""


def _lengths(quadrant: Quadrant) -> str:
    first, second = (WORDS[letter] for letter in quadrant.name)
    return f"{first} input ({quadrant.input_tokens:.0f} tokens), {second} output ({quadrant.output_tokens:.0f})"


def _kind(quadrant: Quadrant, index: int) -> Cell:
    """The quadrant beside its first rows."""
    if index == 0:
        return Cell(f"{quadrant.name}: {quadrant.input_tokens:.0f} in")
    return Cell(f"{quadrant.output_tokens:.0f} out" if index == 1 else "")


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else number(1000 * seconds, 1 if seconds < 0.1 else 0)


def _megabytes(value: float | None) -> str:
    return NOTHING if value is None else f"{value / 1e6:.3g}"


def _conditions(runs: Sequence[Run]) -> list[str]:
    facts: list[set[str]] = [
        {run.manifest["target"]["name"] for run in runs},
        {run.manifest["dtype"] for run in runs},
        {run.manifest["device"] for run in runs},
        {f"{run.manifest['prompts']} prompts" for run in runs},
        {f"batch {run.manifest['config']['engine']['max_batch_size']}" for run in runs},
        {f"commit {commit_of(run.manifest)}" for run in runs},
    ]
    noisy = sum(run.summary.noise is not None and run.summary.noise.noisy for run in runs)
    said = [" or ".join(sorted(values)) for values in facts]
    unfinished = sum(not run.summary.complete for run in runs)
    said += [f"INCOMPLETE: {unfinished} of {len(runs)} runs"] if unfinished else []
    return [*said, *([f"NOISY TIMINGS in {noisy} of {len(runs)} runs"] if noisy else [])]


def _figures(quadrant: Quadrant) -> dict[str, object]:
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
                "method": each.method,
                "own": each.own,
                "gain": each.gain,
                "gain_interval": each.gain_interval,
                "requests_per_minute": each.requests_per_minute,
                "ttft": each.ttft,
                "tpot": each.tpot,
                "slot_time": each.slot_time,
                "tokens_per_second": each.summary.tokens_per_second,
                "mean_acceptance_length": each.summary.mean_acceptance_length,
                "requests": None if each.summary.requests is None else asdict(each.summary.requests),
            }
            for each in quadrant.methods
        ],
    }
