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
    changed: set[tuple[Any, ...]] = set()
    for row in rows:
        way = (row.engine, row.dtype, row.quantization)
        if "drafts" not in row:
            groups.setdefault(way, []).append(row)
        elif any(part.changed for part in row.judged):
            changed.add(way)
    found = []
    for way, each in groups.items():
        margins = zip(*(row.by_margin for row in each), strict=True)
        total = sum(row.places for row in each)
        found.append(
            Figures(
                name=_called(*way),
                engine=way[0].replace("_", " "),
                numbers=" ".join(filter(None, way[1:])),
                control=each[0].control,
                logits={kind: max(row.logits for row in each if _kind(row) == kind) for kind in map(_kind, each)},
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
                same=way not in changed and all(not row.logits for row in each),
            )
        )
    return found


def _called(engine: str, dtype: str, quantization: str | None) -> str:
    return " ".join(filter(None, [engine.replace("_", " "), dtype, quantization]))


def _kind(row: Figures) -> tuple[int, str]:
    """The tokens of a row in a forward, and their tree; a chain's is empty."""
    return row.size, row.get("tree") or ""


def _kinds(rows: Sequence[Figures]) -> list[tuple[int, str]]:
    """The kinds of forwards that there are, trees last."""
    return sorted({_kind(row) for row in rows if "drafts" not in row}, key=lambda kind: (bool(kind[1]), kind))


def parity_table(rows: Sequence[Figures], facts: Mapping[str, Any]) -> Table:
    """A row per way to run the model."""
    found, kinds = ways(rows), _kinds(rows)

    def share(kind: tuple[int, str]) -> Callable[[Figures], str]:
        return lambda each: _share(each.logits.get(kind))

    return Table.of(
        found,
        [
            (left("way to run the model", fold=True, min_width=16), lambda each: _name(each)),
            *((f"{'tree' if kind[1] else 'logits'}\nof {kind[0]}", share(kind)) for kind in kinds),
            ("bits", lambda each: _share(each.bits)),
            ("largest\nchange", lambda each: f"{each.largest:.1g}" if each.largest else "0"),
            ("other\ntoken", lambda each: str(each.flips)),
            ("margin\nup to", lambda each: NOTHING if each.flipped is None else f"{each.flipped:.2g}"),
            ("lost", lambda each: f"{each.lost:.0e}" if each.lost else "0"),
            ("outputs\nparted", lambda each: str(sum(place is not None for place in each.parted))),
        ],
        title=f"{_title(facts)}: {_about(facts)}",
        notes=[
            *_of_columns(facts, kinds),
            f"other token: at how many of {_most(found, 'places')} places another token is the likeliest behind the "
            "same text; margin: the largest there between the two likeliest, in nats",
            f"outputs parted: of {_most(found, 'parted')} greedy ones, those that are not plain decoding's",
        ],
    )


def drafts_table(rows: Sequence[Figures], facts: Mapping[str, Any]) -> list[Table]:
    """A row per way to run the model whose drafts were judged with either forward, if there are any."""
    found = [row for row in rows if "drafts" in row]

    def column(at: int, name: str) -> Callable[[Figures], str]:
        return lambda row: f"{row.judged[at][name]:.4f}"

    def lost(at: int) -> Callable[[Figures], str]:
        return lambda row: _lost(row.judged[at])

    columns = [
        (f"{part}, {'T=1' if at == 0 else 'greedy'}", given)
        for at in (0, 1)
        for part, given in (("accepted\none by one", column(at, "by_one")), ("lost\nin rounds", lost(at)))
    ]
    title = f"Drafts of {found[0].drafts} judged with either forward: {_about(facts)}" if found else ""
    notes = [
        "accepted: how likely a draft is accepted where the text has come to it, with p from forwards of one token; "
        "lost: how much less likely with p from the rounds' own forwards, with 95 % intervals over prompts",
        "T=1: the sum of min(p, q), or what the rule makes of the siblings; greedy: whether the likeliest token is "
        "among them",
    ]
    named = (
        left("way to run the model", fold=True, min_width=16),
        lambda r: _called(r.engine, r.dtype, r.quantization),
    )
    return [Table.of(found, [named, *columns], title=title, notes=notes)] if found else []


def _lost(each: Figures) -> str:
    if not each.changed:
        return "0"
    low, high = each.interval or (None, None)
    return f"{each.lost:.1e}" + ("" if low is None else f" [{low:.1e}, {high:.1e}]")


def _most(found: Sequence[Figures], name: str) -> str:
    """Places or outputs of a way; of up to so many, where the ways have different numbers."""
    counts = {len(each[name]) if isinstance(each[name], list) else each[name] for each in found}
    return f"{'up to ' * (len(counts) > 1)}{max(counts, default=0):,}"


def _of_columns(facts: Mapping[str, Any], kinds: Sequence[tuple[int, str]]) -> Sequence[str]:
    lost = (
        "lost: acceptance of drafts that are drawn from the law of one token at a time, T=1, when the other law judges "
        "them"
    )
    if _is_server(facts):
        return (
            f"logits: of the {facts['alternatives']} largest log-probabilities at every place, the share that differs; "
            f"of {kinds[-1][0]}: prompt and output sent as one text; of 1: several requests at once, against one alone",
            f"{lost}, by the tokens that the server tells: at least so much",
        )
    said = ["logits of n: share whose bits differ where n tokens of a row go through at once, in the worst batch"]
    said += [f"tree of {size}: in the draft tree {tree}" for size, tree in kinds if tree]
    said += ["of 1: in a batch, against a row alone"] * (kinds[0][0] == 1)
    return (
        "; ".join([*said, "bits: of all bits of the logits, the share that differs"]),
        f"{lost}; no drafter loses more",
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
    differ = [(each, {bool(tree) for (_, tree), share in each.logits.items() if share}) for each in found]
    chains = grouped([each for each, in_trees in differ if in_trees == {True}], found)
    if chains:
        said.append(f"The same bits in chains of tokens, not in trees: {chains}.")
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

    found, kinds = ways(rows), _kinds(rows)
    same = [each for each in found if each.same]
    always = [name for name in {each.engine: None for each in same} if all(e.same for e in found if e.engine == name)]
    apart = sorted((each for each in found if not each.same), key=lambda each: (-each.flips, -each.lost))
    figure = style.new_figure(style.PAGE, 3.6)
    panels = figure.subplots(1, 3)
    logits, flips, equal = panels
    chains = sum(not tree for _, tree in kinds)
    series: list[tuple[str, Figures | None]] = [
        (f"{each.name} (loses {100 * each.lost:.2g}%)", each) for each in apart[:_MOST]
    ]
    if same:
        series.append((f"no difference: {len(same)} of {len(found)} ways", None))
    for index, (name, each) in enumerate(series):
        looks = style.looks(index) if each is not None else {"color": "black", "marker": "", "linewidth": 2}
        values = [0.0 if each is None else each.logits.get(kind) for kind in kinds]
        logits.plot(range(chains), values[:chains], label=name, **looks)
        in_tree = {**looks, "marker": looks["marker"] or "s", "linestyle": "none"}
        logits.plot(range(chains, len(kinds)), values[chains:], **in_tree)
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
    logits.set_xticks(
        range(len(kinds)), [f"{size}{f'{chr(10)}in a{chr(10)}tree' * bool(tree)}" for size, tree in kinds]
    )
    flips.set(
        title="another token is the likeliest",
        xlabel="margin of the two likeliest, nats",
        ylabel="of places with this margin",
    )
    flips.set_xticks(range(4), ["<0.01", "0.01\nto 0.1", "0.1\nto 1", "1 or\nmore"])
    flips.set_ylim(bottom=-0.03 * max(flips.get_ylim()[1], 0.01))
    least = min(_kept(each.parted, facts["tokens"]) for each in found) if found else 0.0
    equal.set(title="greedy outputs still the same", xlabel="tokens of output", ylim=(max(0, least - 0.1), 1.02))
    for axes in panels:
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None if axes is flips else 0))
    style.legend_of(figure, logits)
    more = f". The same in every forward: {', '.join(always)}" if always else ""
    more += ". Loses: how much less often drafts are accepted at T=1" if apart else ""
    more += f". {len(apart) - _MOST} ways that lose less are in the table" if len(apart) > _MOST else ""
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
    return "Several tokens in one forward against one at a time"


def _about(facts: Mapping[str, Any]) -> str:
    where = str(facts["model"])
    if not _is_server(facts):
        where += f" on {facts['device']}, {facts['threads']} thread{'s' * (facts['threads'] > 1)}"
    return f"{where}, {facts['prompts']} prompts, {facts['tokens']} tokens of output each"
