"""Parity of forwards as a table, sentences and a picture: which bits differ, and what comes of it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.reporting import style
from experiments.reporting.table import NOTHING, Cell, Emphasis, Table, left
from experiments.results.frame import Figures

_MOST = 6
"""Ways that differ with a line of their own in the picture."""


def ways(rows: Sequence[Figures]) -> list[Figures]:
    """Every way to run the model with all its forwards together; what is largest is so over all of them.

    ``parted`` and ``flips`` are of forwards with several tokens per row and with several rows alike.
    """
    groups: dict[tuple[Any, ...], list[Figures]] = {}
    for row in rows:
        groups.setdefault((row.engine, row.dtype, row.quantization), []).append(row)
    found = []
    for (engine, dtype, quantization), each in groups.items():
        margins = zip(*(row.by_margin for row in each), strict=True)
        total = sum(row.places for row in each)
        found.append(
            Figures(
                name=" ".join(filter(None, [engine.replace("_", " "), dtype, quantization])),
                engine=engine.replace("_", " "),
                numbers=" ".join(filter(None, [dtype, quantization])),
                control=each[0].control,
                logits={size: max(row.logits for row in each if row.size == size) for size in {r.size for r in each}},
                bits=max((row.bits for row in each if row.bits is not None), default=None),
                largest=max(row.largest for row in each),
                places=total,
                flips=sum(row.flips for row in each),
                flipped=max((row.flipped for row in each if row.flipped is not None), default=None),
                by_margin=[
                    Figures(upto=same[0].upto, places=sum(x.places for x in same), flips=sum(x.flips for x in same))
                    for same in margins
                ],
                lost=sum(row.lost * row.places for row in each) / total,
                parted=[place for row in each for place in row.parted],
                same=all(not row.logits for row in each),
            )
        )
    return found


def parity_table(rows: Sequence[Figures], facts: Mapping[str, Any]) -> Table:
    """A row per way to run the model."""
    found = ways(rows)
    sizes = sorted({row.size for row in rows})

    def share(size: int) -> Callable[[Figures], str]:
        return lambda each: _share(each.logits.get(size))

    return Table.of(
        found,
        [
            (left("way to run the model", fold=True, min_width=16), lambda each: _name(each)),
            *((f"logits\nat {size}", share(size)) for size in sizes),
            ("bits", lambda each: _share(each.bits)),
            ("largest\nchange", lambda each: f"{each.largest:.1g}" if each.largest else "0"),
            ("other\ntoken", lambda each: str(each.flips)),
            ("margin\nup to", lambda each: NOTHING if each.flipped is None else f"{each.flipped:.2g}"),
            ("lost", lambda each: f"{each.lost:.0e}" if each.lost else "0"),
            ("outputs\nparted", lambda each: str(sum(place is not None for place in each.parted))),
        ],
        title=f"{_title(facts)}: {_about(facts)}",
        notes=[
            *_of_columns(facts, sizes[-1]),
            *(f"of {each.places:,} places and {len(each.parted)} outputs" for each in found[:1]),
            "other token: places where another token is the likeliest behind the same text; margin: the largest there "
            "between the two likeliest, in nats",
            "outputs parted: greedy ones, from plain decoding's",
        ],
    )


def _of_columns(facts: Mapping[str, Any], size: int) -> Sequence[str]:
    lost = (
        "acceptance of drafts that are drawn from the law of one token at a time, T=1, when the other law judges them"
    )
    if _is_server(facts):
        return (
            f"logits: of the {facts['alternatives']} largest log-probabilities at every place, the share that differs; "
            f"at {size}: prompt and output sent as one text; at 1: several requests at once, against one alone",
            f"lost: {lost}, by the tokens that the server tells: at least so much",
        )
    return (
        f"logits at {size}: share whose bits differ where {size} tokens of a row go through at once, in the worst "
        "batch; at 1: in a batch, against a row alone; bits: of all bits of the logits, the share that differs",
        f"lost: {lost}; no drafter loses more",
    )


def remarks(rows: Sequence[Figures], left_out: Sequence[str]) -> list[str]:
    """Sentences that a reader of the table needs."""
    found = ways(rows)
    said = []
    controls = [each for each in found if each.control]
    wrong = [each.name for each in controls if not each.same]
    if wrong:
        said.append(
            f"THE CONTROL DIFFERS: {', '.join(wrong)}. An invariant engine promises the same bits: report this, and "
            f"trust no other row."
        )
    elif controls:
        said.append(f"The control ({', '.join(each.name for each in controls)}) gives the same bits, as it must.")
    elif any(each.bits is not None for each in found):
        said.append("There is no control: no way of invariant=true was measured.")
    exact = grouped([each for each in found if each.same and not each.control], found)
    if exact:
        of = "log-probabilities" if all(each.bits is None for each in found) else "bits"
        said.append(f"The same {of} however many tokens are in a forward: {exact}.")
    large = [each.name for each in found if each.flipped is not None and each.flipped >= 1]
    if large:
        said.append(f"Tokens changed at margins of 1 nat and more, which rounding rarely explains: {', '.join(large)}.")
    if left_out:
        said.append(f"Left out: {'; '.join(left_out)}.")
    return said


@style.styled()
def parity_plot(rows: Sequence[Figures], path: Path, facts: Mapping[str, Any]) -> Path:
    """Draw how logits differ, where the likeliest token changes, and how many outputs are still the same."""
    from matplotlib.ticker import PercentFormatter

    found = ways(rows)
    same = [each for each in found if each.same]
    always = [name for name in {each.engine: None for each in same} if all(e.same for e in found if e.engine == name)]
    apart = sorted((each for each in found if not each.same), key=lambda each: (-each.flips, -each.lost))
    figure = style.new_figure(style.PAGE, 3.4)
    panels = figure.subplots(1, 3)
    logits, flips, equal = panels
    sizes = sorted({row.size for row in rows})
    labels = ["<0.01", "0.01\nto 0.1", "0.1\nto 1", "1 or\nmore"]
    series: list[tuple[str, Figures | None]] = [
        (f"{each.name}: {100 * each.lost:.2g}%", each) for each in apart[:_MOST]
    ]
    if same:
        series.append((f"no difference: {len(same)} of {len(found)} ways", None))
    for index, (name, each) in enumerate(series):
        looks = style.looks(index) if each is not None else {"color": "black", "marker": "", "linewidth": 2}
        values = [0.0 if each is None else each.logits.get(size) for size in sizes]
        logits.plot(range(len(sizes)), values, label=name, **looks)
        shares = [0.0] * 4 if each is None else [m.flips / m.places if m.places else None for m in each.by_margin]
        flips.plot(range(4), shares, **looks)
        parted = [] if each is None else each.parted
        kept = [_kept(parted, length) for length in range(facts["tokens"] + 1)]
        equal.plot(range(facts["tokens"] + 1), kept, **{**looks, "markevery": max(1, facts["tokens"] // 6)})
    logits.set(
        title=f"{'log-probabilities' if _is_server(facts) else 'logits'} that differ",
        xlabel="tokens per row in a forward",
        ylim=(-0.03, 1.03),
    )
    logits.set_xticks(range(len(sizes)), list(map(str, sizes)))
    flips.set(title="places with another likeliest token", xlabel="margin of the two likeliest, nats")
    flips.set_xticks(range(4), labels)
    flips.set_ylim(bottom=-0.03 * max(flips.get_ylim()[1], 0.01))
    least = min(_kept(each.parted, facts["tokens"]) for each in found) if found else 0.0
    equal.set(title="greedy outputs still the same", xlabel="tokens of output", ylim=(max(0, least - 0.1), 1.02))
    for axes in panels:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid()
    style.legend_of(figure, logits)
    more = f"; no difference, always: {', '.join(always)}" if always else ""
    more += "; behind names: acceptance lost" if apart else ""
    more += f", and {len(apart) - _MOST} that lose less are in the table" if len(apart) > _MOST else ""
    alarm = "THE CONTROL DIFFERS" if any(each.control and not each.same for each in found) else ""
    style.title(figure, _title(facts), _about(facts) + more, alarm=alarm)
    return style.save(figure, path)


def grouped(chosen: Sequence[Figures], found: Sequence[Figures]) -> str:
    """The chosen ones of all ways by engine, as ``invariant always; auto in float32, bfloat16 int8``."""
    numbers: dict[str, list[str]] = {}
    for each in chosen:
        numbers.setdefault(each.engine, []).append(each.numbers)
    whole = {engine for engine in numbers if len(numbers[engine]) == sum(each.engine == engine for each in found)}
    return "; ".join(
        engine + (" always" if engine in whole else f" in {', '.join(numbers[engine])}") for engine in numbers
    )


def _kept(parted: Sequence[int | None], length: int) -> float:
    """The share of outputs whose first tokens, so many, are plain decoding's."""
    return sum(place is None or place >= length for place in parted) / len(parted) if parted else 1.0


def _name(each: Figures) -> Cell:
    wrong = each.control and not each.same
    return Cell(each.name + ": DIFFERS" * wrong, emphasis=Emphasis.MISSED if wrong else Emphasis.NONE)


def _share(value: float | None) -> str:
    if value is None:
        return NOTHING
    return "0" if not value else f"{value:.1%}" if value >= 0.001 else "<0.1%"


def _is_server(facts: Mapping[str, Any]) -> bool:
    return "alternatives" in facts


def _title(facts: Mapping[str, Any]) -> str:
    if _is_server(facts):
        return "A text in one piece against one token at a time"
    return "k + 1 tokens in one forward against one at a time"


def _about(facts: Mapping[str, Any]) -> str:
    where = str(facts["model"])
    if not _is_server(facts):
        where += f" on {facts['device']}, {facts['threads']} thread{'s' * (facts['threads'] > 1)}"
    return f"{where}, {facts['prompts']} prompts, {facts['tokens']} tokens of output each"
