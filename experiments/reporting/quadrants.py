"""Four kinds of requests, by the length of input and output: what each is about, and what drafters do there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas

from experiments.reporting import style
from experiments.reporting.cells import EMPTY, NOTHING, label_cell, number, percent, three_digits, times, with_interval
from experiments.reporting.comparison import conditions_of
from experiments.reporting.formats import document, publish
from experiments.reporting.requests import CLOSED
from experiments.reporting.run_tables import label_of
from experiments.reporting.table import Cell, Table, left
from experiments.results.comparison import commit_of
from experiments.results.frame import Figures, Frame, frame_of
from experiments.results.records import PLAIN
from experiments.results.runs import Run, records_of
from experiments.results.statistics import Bootstrap, Interval, ratio_of_sums
from experiments.results.summary import MethodSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INPUT, OUTPUT = "dataset.tokens", "sampling.max_new_tokens"
"""The settings in which the four runs differ."""
TITLE = "Four kinds of requests, and what drafting does to each"


def _kind(name: str, meaning: str, unit: str, field: str, scale: float, examples: str) -> Figures:
    return Figures(name=name, meaning=meaning, unit=unit, field=field, scale=scale, examples=examples)


METRICS = {
    "SS": _kind("requests/min", "requests per minute", "per minute", "requests_per_minute", 1.0,
                "a turn of a chat, a classification"),
    "SL": _kind("TPOT", "time per output token after the first", "ms", "tpot", 1e3, "writing, code"),
    "LS": _kind("TTFT", "time to first token", "ms", "ttft", 1e3,
                "a summary, an extraction, an answer from documents"),
    "LL": _kind("slot time", "time that a request holds its slot", "s", "slot_time", 1.0,
                "a translation, a report, a long chat"),
}  # fmt: skip
"""The figure that each quadrant is about, and such requests in practice. By quadrant: the first letter is the input's
length (short, long), the second the output's. ``scale`` takes the figure of that ``field`` to the unit."""
_WORDS = {"S": "short", "L": "long"}
_PLACES = {"SS": (0, 0), "SL": (0, 1), "LS": (1, 0), "LL": (1, 1)}
_LOOKS = {"better": (style.COLORS[2], "o"), "worse": (style.COLORS[4], "v"), "unsure": (style.FAINT, "D")}
"""Color and marker, by what the interval says."""


# ---------------------------------------------------------------- figures


def quadrants(runs: Sequence[Run], bootstrap: Bootstrap) -> list[Figures]:
    """Return the quadrants of four runs, at every temperature, in the order SS, SL, LS, LL.

    Args:
        runs: One for each pair of two input lengths and two output lengths; fewer, if some have failed.

    Returns:
        The mean lengths that were measured (``input_tokens``, ``output_tokens``: plain decoding's), the most output
        tokens that a request could have, the bytes of keys and values of one request before its first token and behind
        its last, and ``methods``, plain decoding first. Of each: means over requests; ``own``, the quadrant's metric in
        its unit; ``gain``, how many times better than plain decoding's that is, and its interval over prompts (what
        was timed together is drawn together).

    Raises:
        ValueError: The runs do not have two lengths of each, or two runs have the same.
    """
    lengths = [(input_of(run, "quadrants"), int(run.manifest["config"]["sampling"]["max_new_tokens"])) for run in runs]
    inputs, outputs = (sorted({pair[side] for pair in lengths}) for side in (0, 1))
    if len(inputs) != 2 or len(outputs) != 2 or len(set(lengths)) < len(lengths):
        these = f"{INPUT}={','.join(map(str, inputs))} and {OUTPUT}={','.join(map(str, outputs))} in {len(runs)} runs"
        raise ValueError(
            f"quadrants need runs at two input lengths and two output lengths, each pair once, and these have {these}: "
            f"give {INPUT}=64,640 {OUTPUT}=16,160"
        )
    found = []
    for run, (length, most) in zip(runs, lengths, strict=True):
        name = ("L" if length == inputs[1] else "S") + ("L" if most == outputs[1] else "S")
        frame = frame_of(records_of(run.folder)) if run.frame is None else run.frame
        for temperature in sorted({method.temperature for method in run.summary.methods}):
            found.append(_quadrant(name, run, temperature, frame, most, bootstrap))
    order = list(METRICS)
    return sorted(found, key=lambda each: (each.temperature, order.index(each.quadrant)))


def input_of(run: Run, study: str) -> int:
    """Return the tokens of a run's prompts; refuse one whose prompts have no common length, for a study's report."""
    tokens = run.manifest["config"]["dataset"].get("tokens")
    if tokens is None:
        raise ValueError(
            f"{run.folder} has no {INPUT}: {study} need a dataset that makes prompts of one length, give "
            f"dataset=joined or dataset=context"
        )
    return int(tokens)


def _quadrant(name: str, run: Run, temperature: float, frame: Frame, most: int, bootstrap: Bootstrap) -> Figures:
    good = frame[(frame.temperature == temperature) & ~frame.failed]
    # What a request costs by each quadrant's metric, where less is better. Of the time of its call it has a part:
    # requests per minute are requests over the sum of these.
    together = good.groupby(["method", "batch", "turn"]).prompt.transform("size")
    good = good.assign(SS=good.seconds.where(good.told) / together, SL=good.tpot, LS=good.ttft, LL=good.slot_time)
    plain = good[good.method == PLAIN]
    shown = good if plain.empty else plain
    inputs, outputs = (_mean(shown[column]) or 0.0 for column in ("prompt_tokens", "tokens"))
    per_position = run.manifest["target"].get("kv_bytes_per_position")
    own = [method for method in run.summary.methods if method.temperature == temperature]
    methods = [_method(name, each, good[good.method == each.method], plain, bootstrap) for each in own]
    return Figures(
        quadrant=name,
        temperature=temperature,
        metric=METRICS[name],
        input_tokens=inputs,
        output_tokens=outputs,
        max_new_tokens=most,
        kv_bytes_begin=None if per_position is None else per_position * inputs,
        kv_bytes_end=None if per_position is None else per_position * (inputs + outputs),
        requests_per_gigabyte=1e9 / (per_position * (inputs + outputs)) if per_position else None,
        run=run.folder.name,
        methods=sorted(methods, key=lambda each: each.method != PLAIN),
    )


def _method(name: str, method: MethodSummary, own: Frame, plain: Frame, bootstrap: Bootstrap) -> Figures:
    rate = None if method.requests is None else method.requests.requests_per_second
    keys = ("method", "label", "exactness", "competes", "tokens_per_second", "mean_acceptance_length", "requests")
    found = Figures(
        **{key: method[key] for key in keys},
        requests_per_minute=None if rate is None else 60 * rate,
        ttft=_mean(own.ttft),
        tpot=_mean(own.tpot),
        slot_time=_mean(own.slot_time),
    )
    value = found[METRICS[name].field]
    gain, interval = (None, None) if method.method == PLAIN else _gain(name, own, plain, bootstrap)
    return found | {"own": value and METRICS[name].scale * value, "gain": gain, "gain_interval": interval}


def _gain(name: str, own: Frame, plain: Frame, bootstrap: Bootstrap) -> tuple[float | None, Interval | None]:
    """The mean cost of plain decoding over a method's, on the requests that both have, with its interval."""
    keys = ["prompt", "turn", "sample"]
    both = own.dropna(subset=[name]).merge(plain.dropna(subset=[name])[[*keys, name]], on=keys, suffixes=("", "_plain"))
    if not both[name].sum():
        return None, None
    columns = [both[f"{name}_plain"], both[name]]
    return float(columns[0].sum() / columns[1].sum()), bootstrap.over_prompts(ratio_of_sums, both.batch, columns)


def _mean(values: pandas.Series) -> float | None:
    return float(values.mean()) if values.notna().any() else None


# ---------------------------------------------------------------- the report


def report_quadrants(runs: Sequence[Run], folder: Path, missing: Sequence[str] = ()) -> list[Figures]:
    """Print the table and the sentences, and write them with the figures and the picture into a folder."""
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
    by_temperature: dict[float, list[Figures]] = {}
    for each in found:
        by_temperature.setdefault(each.temperature, []).append(each)
    pictures = {
        "quadrants.png" if len(by_temperature) == 1 else f"quadrants_T{temperature:g}.png": own
        for temperature, own in by_temperature.items()
    }
    about = "; ".join([*conditions, CLOSED])
    publish(
        folder,
        "quadrants",
        tables=[made],
        document=document(f"{'; '.join(notes)}.", made, said),
        figures={"quadrants": found},
        said=said,
        drawn=lambda: [quadrants_plot(own, folder / name, about, labels) for name, own in pictures.items()],
    )
    return found


def table(found: Sequence[Figures], labels: Mapping[str, str], *, notes: Sequence[str] = ()) -> Table:
    """A row per quadrant and method."""

    def own(name: str, text: str, row: tuple[Figures, Figures]) -> str:
        return text + ("*" if row[0].quadrant == name else "")

    def kind(row: tuple[Figures, Figures]) -> str:
        index = row[0].methods.index(row[1])
        texts = (f"{row[0].quadrant}: {row[0].input_tokens:.0f} in", f"{row[0].output_tokens:.0f} out")
        return texts[index] if index < len(texts) else ""

    def prefill(row: tuple[Figures, Figures]) -> str:
        felt = row[1].requests
        return NOTHING if felt is None else percent(felt.stage_shares.get("prefill"))

    def gain(row: tuple[Figures, Figures]) -> Cell:
        if row[1].gain is None:
            return EMPTY
        leads = row[1] is best(row[0]) and not _doubt(row[1])
        return with_interval(times(row[1].gain), row[1].gain_interval, best=leads)

    return Table.of(
        [(quadrant, each) for quadrant in found for each in quadrant.methods],
        [
            (left("kind of\nrequests"), kind),
            (left("method", fold=True, min_width=18), lambda row: label_cell(row[1], label_of(row[1], labels))),
            ("requests\n/min", lambda row: own("SS", number(row[1].requests_per_minute, 1), row)),
            ("TTFT,\nms", lambda row: own("LS", _ms(row[1].ttft), row)),
            ("TPOT,\nms", lambda row: own("SL", _ms(row[1].tpot), row)),
            ("slot time,\ns", lambda row: own("LL", number(row[1].slot_time, 2), row)),
            ("tokens/s,\nall users", lambda row: number(row[1].tokens_per_second, 1)),
            ("tokens\nper round", lambda row: number(row[1].mean_acceptance_length)),
            ("prefill,\nshare", prefill),
            ("own metric,\ntimes better", gain),
        ],
        title=TITLE,
        notes=notes,
        section=lambda row: id(row[0]),
    )


def sentences(found: Sequence[Figures], labels: Mapping[str, str]) -> list[str]:
    """The metric of each quadrant, who is best there and who makes it worse, and what its cache takes."""
    said = []
    several = len({each.temperature for each in found}) > 1
    for quadrant in found:
        plain, top, name = quadrant.methods[0], best(quadrant), quadrant.quadrant
        at = f" at temperature {quadrant.temperature:g}" if several else ""
        line = f"{name}{at}, {_lengths(quadrant)} ({quadrant.metric.examples}): what counts is the "
        line += quadrant.metric.meaning
        line += "" if plain.method != PLAIN else f", {own_value(quadrant, plain)} when decoding plainly"
        if top is not None:
            line += f"; best: {label_of(top, labels)}, {times(top.gain)}" + _doubt(top)
        worse = [each for each in quadrant.methods if each.gain_interval is not None and each.gain_interval[1] < 1]
        if worse:
            line += f"; worse than plain decoding: {', '.join(label_of(each, labels) for each in worse)}"
        said.append(line)
        # Then it is not the kind that it is called.
        if quadrant.output_tokens < quadrant.max_new_tokens / 2:
            said.append(
                f"{name}: OUTPUTS ENDED EARLY: {quadrant.output_tokens:.0f} of {quadrant.max_new_tokens} tokens on "
                f"average, so this is no quadrant of long outputs; sampling.ignore_eos=true keeps them going"
            )
    parts = [
        f"{each.quadrant} {each.kv_bytes_begin / 1e6:.3g} to {each.kv_bytes_end / 1e6:.3g} MB "
        f"({each.requests_per_gigabyte:.0f} per GB)"
        for each in found
        if each.requests_per_gigabyte is not None
    ]
    if parts and not several:
        head = "keys and values of one request, from its first to its last token, and requests that fit"
        said.append(f"{head}: {', '.join(parts)}")
    return said


def best(quadrant: Figures) -> Figures | None:
    """The exact method with the largest gain; None where no method is better than plain decoding."""
    rivals = [each for each in quadrant.methods if each.gain is not None and each.competes]
    top = max(rivals, key=lambda each: each.gain, default=None)
    return top if top is not None and top.gain > 1 else None


def own_value(quadrant: Figures, figures: Figures) -> str:
    """The quadrant's metric of a method, with its unit."""
    return "not known" if figures.own is None else f"{three_digits(figures.own)} {quadrant.metric.unit}"


def _doubt(top: Figures) -> str:
    unsure = top.gain_interval is not None and top.gain_interval[0] <= 1
    return ", as far as the interval tells: it holds 1" if unsure else ""


def _lengths(quadrant: Figures) -> str:
    first, second = (_WORDS[letter] for letter in quadrant.quadrant)
    return f"{first} input ({quadrant.input_tokens:.0f} tokens), {second} output ({quadrant.output_tokens:.0f})"


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else number(1000 * seconds, 1 if seconds < 0.1 else 0)


@style.styled()
def quadrants_plot(found: Sequence[Figures], path: Path, subtitle: str, labels: Mapping[str, str]) -> Path:
    """Draw how many times better every method is than plain decoding, by each quadrant's own metric.

    A panel per kind of requests, placed by the lengths of input and output.
    """
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(each.method for quadrant in found for each in quadrant.methods if each.method != PLAIN))
    figure = style.new_figure(style.PAGE, 3.0 + 0.44 * max(2, len(names)))
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for quadrant in found:
        _panel(panels[_PLACES[quadrant.quadrant]], quadrant, names)
    for name in set(_PLACES) - {quadrant.quadrant for quadrant in found}:
        panels[_PLACES[name]].annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center")
    for row in panels:
        style.name_rows(row[0], [labels.get(name, name) for name in names], 24)
    panels[0][0].margins(x=0.18)
    for axes in panels[1]:
        axes.set_xlabel("times better than plain decoding")
    handles = [Line2D([], [], color=color, marker=marker) for color, marker in _LOOKS.values()]
    style.legend(figure, handles, ["better than plain decoding", "worse", "cannot be told: the interval holds 1"])
    return style.finish(
        figure, path, "Four kinds of requests: what counts for each, and what drafting does to it", subtitle
    )


def _panel(axes: "Axes", quadrant: Figures, names: Sequence[str]) -> None:
    for each in quadrant.methods:
        if each.gain is None:
            continue
        low, high = each.gain_interval or (each.gain, each.gain)
        color, marker = _LOOKS["better" if low > 1 else "worse" if high < 1 else "unsure"]
        style.dots(axes, [(names.index(each.method), each.gain, each.gain_interval)], 0, color=color, marker=marker)
    plain = quadrant.methods[0]
    value = f"plain decoding: {own_value(quadrant, plain)}" if plain.method == PLAIN and plain.own else ""
    axes.set_title(f"{_lengths(quadrant)}\nwhat counts: {quadrant.metric.meaning}\n{value}", fontsize=7.5)
    style.baseline(axes, vertical=True)
