"""Where a speedup comes from: methods that differ from each other in one ingredient at a time, as a ladder."""

from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.reporting import style
from experiments.reporting.cells import EMPTY, NOTHING, between, number, percent, times, with_interval
from experiments.reporting.formats import document, write_texts
from experiments.reporting.table import Cell, Emphasis, Table, left
from experiments.results import timing
from experiments.results.comparison import commit_of
from experiments.results.frame import Figures, Frame, Outputs, frame_of, rounds_of
from experiments.results.metrics import mean_acceptance_length
from experiments.results.noise import noise_of
from experiments.results.origin import read_manifest
from experiments.results.records import PLAIN, Record
from experiments.results.requests import percentile
from experiments.results.statistics import Bootstrap, ratio_of_sums
from specdec.requests import GREEDY_BELOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVERS = ("target", "attention", "forwards", "weights", "dtype", "KV cache", "drafter", "batch", "threads", "engine")
"""All ingredients that are stated, in the order in which they are listed."""
CHANGES_LAW = ("target", "weights", "dtype", "KV cache")
"""Those that decide about the law of the output: a change makes another target of it."""
Ingredients = Mapping[str, str]

TITLE = "Where the speedup comes from, one ingredient at a time"
_IN_TITLE = ("target", "engine")
"""Ingredients that have no column: the first is in the conditions."""
_ABOUT_RUNGS = (
    "all rungs took turns on the same prompts in one run; the time of prompts (prefill) is in all of them",
    "same tokens: the share of the first rung's tokens that come before the first difference; under the same "
    "law, it is rounding that lets outputs part",
)
_SAME, _OTHER = style.COLORS[0], style.COLORS[1]
_ALONE: dict[str, Any] = {"color": style.COLORS[2], "marker": "o"}
_LAST: dict[str, Any] = {"color": style.COLORS[4], "marker": "s"}


# ---------------------------------------------------------------- figures


def ladders(
    outputs: Outputs, ingredients: Mapping[str, Ingredients], order: Sequence[str], bootstrap: Bootstrap
) -> list[Figures]:
    """Return the ladder of every temperature.

    Returns:
        Of each: ``rungs`` in this order, with their speed, the ingredients ``changed`` against the rung before, whether
        the output follows the first rung's law (``same_law``), the ratios ``over_before`` and ``over_first``, and the
        ``sameness`` of greedy outputs with the first rung's. ``effects``: each ingredient by itself, ``alone`` on the
        first rung and as the ``last`` one with all others, where methods of the run show it. ``shared`` ingredients.
        ``headline``: the last rung over the first. ``product_of_alone``: that ratio if ingredients multiplied.
        ``same_law`` and ``other_law``: the product of the rungs' ratios that leave the law as it is, and of the others.
    """
    check_ladder(ingredients, order)
    frame = frame_of(outputs)
    known = sorted(set(frame.method))
    for method in order:
        if method not in known:
            raise ValueError(f"ladder: the run has no records of {method!r}, it has {', '.join(known)}")
    return [_ladder(float(at), own, ingredients, order, bootstrap) for at, own in frame.groupby("temperature")]


def check_ladder(ingredients: Mapping[str, Ingredients], order: Sequence[str]) -> None:
    """Refuse a ladder of which a rung adds nothing."""
    for before, after in pairwise(order):
        if not changed(ingredients.get(before, {}), ingredients.get(after, {})):
            raise ValueError(f"ladder: {before} and {after} have the same ingredients: give {after} one more in setups")


def changed(before: Ingredients, after: Ingredients) -> tuple[str, ...]:
    """Return the names of the ingredients in which two methods differ."""
    return tuple(name for name in LEVERS if before.get(name) != after.get(name))


def _keeps_law(names: Sequence[str]) -> bool:
    return not any(name in CHANGES_LAW for name in names)


def _ladder(
    temperature: float, frame: Frame, ingredients: Mapping[str, Ingredients], order: Sequence[str], bootstrap: Bootstrap
) -> Figures:
    own = {method: rows for method in ingredients if len(rows := frame[frame.method == method])}
    first, last = order[0], order[-1]

    def ratio(method: str | None, over: str | None) -> Figures | None:
        if method is None or over is None:
            return None
        timed = timing.timed_calls(own[method], own[over])
        value = timing.speedup(timed)
        return None if value is None else Figures(value=value, interval=timing.speedup_interval(timed, bootstrap))

    rungs = []
    for before, method in zip([None, *order], order, strict=False):
        timed = timing.timed_calls(own[method], None)
        tpot = own[method].tpot[own[method].tpot > 0].to_numpy()
        rungs.append(
            Figures(
                method=method,
                ingredients=ingredients[method],
                changed=() if before is None else changed(ingredients[before], ingredients[method]),
                same_law=_keeps_law(changed(ingredients[first], ingredients[method])),
                tokens_per_second=timing.tokens_per_second(timed),
                interval=bootstrap.over_prompts(ratio_of_sums, timed.prompts, [timed.tokens, timed.seconds]),
                user_tokens_per_second=1 / percentile(tpot, 50) if len(tpot) else None,
                over_before=ratio(method, before),
                over_first=None if before is None else ratio(method, first),
                sameness=None if before is None else _sameness(own[method], own[first]),
                mean_acceptance_length=mean_acceptance_length(rounds_of(own[method])),
            )
        )

    def differing(one: str, lever: str, value: str) -> str | None:
        """The method that has this value of one ingredient, and is the same as another in all others."""
        same = (m for m in own if changed(ingredients[one], ingredients[m]) == (lever,))
        return next((m for m in same if ingredients[m].get(lever) == value), None)

    effects = []
    levers = [(m, lever) for m in order[1:] for lever in changed(ingredients[first], ingredients[m])]
    for lever, value in dict.fromkeys((lever, ingredients[m].get(lever, "")) for m, lever in levers):
        in_last = ingredients[last].get(lever) == value
        alone = differing(first, lever, value)
        without = differing(last, lever, ingredients[first].get(lever, "")) if in_last else None
        effects.append(
            Figures(
                lever=lever,
                value=value,
                alone=ratio(alone, first),
                alone_method=alone,
                last=None if without is None else ratio(last, without),
                last_method=without,
                same_law=lever not in CHANGES_LAW,
            )
        )
    listed = [ingredients[method] for method in order]
    steps = [(rung.over_before and rung.over_before.value, _keeps_law(rung.changed)) for rung in rungs[1:]]
    alone = [each.alone and each.alone.value for each in effects if ingredients[last].get(each.lever) == each.value]
    return Figures(
        temperature=temperature,
        rungs=rungs,
        effects=effects,
        shared={n: listed[0][n] for n in LEVERS if n in listed[0] and len({each.get(n) for each in listed}) == 1},
        headline=rungs[-1].over_first,
        product_of_alone=_product(alone) if alone else None,
        same_law=_product([value if keeps else value and 1.0 for value, keeps in steps]),
        other_law=_product([value and 1.0 if keeps else value for value, keeps in steps]),
    )


def _product(ratios: Sequence[float | None]) -> float | None:
    """The product; None if a ratio is not known."""
    known = [ratio for ratio in ratios if ratio is not None]
    return prod(known) if len(known) == len(ratios) else None


def _sameness(own: Frame, first: Frame) -> Figures | None:
    """How many greedy outputs are the first rung's, and which share of its tokens comes before the first difference.

    None where there is nothing to compare.
    """
    keys = ["prompt", "turn", "sample"]
    theirs = first[~first.failed & (first.temperature < GREEDY_BELOW) & (first.turn == 0)]
    both = own[~own.failed].merge(theirs[[*keys, "token_ids"]], on=keys, suffixes=("", "_of_first"))
    pairs = list(zip(both.token_ids, both.token_ids_of_first, strict=True))
    tokens = sum(len(other) for _, other in pairs)
    if not tokens:
        return None
    kept = sum(len(list(takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False)))) for pair in pairs)
    return Figures(equal=sum(one == other for one, other in pairs), outputs=len(pairs), tokens=kept / tokens)


# ---------------------------------------------------------------- the report


def report_ingredients(
    folder: Path, records: Sequence[Record], order: Sequence[str], labels: Mapping[str, str], bootstrap: Bootstrap
) -> tuple[list[Table], list[Path]]:
    """Write the tables, the figures and the picture into a run's folder; returns tables and files."""
    manifest = read_manifest(folder)
    found = ladders(records, manifest["ingredients"], order, bootstrap)
    conditions = [
        str(manifest["ingredients"][PLAIN].get("target", "")),
        str(manifest["device"]),
        f"{len({record.prompt for record in records})} prompts",
        f"up to {manifest['config']['sampling']['max_new_tokens']} new tokens",
        f"commit {commit_of(manifest)}",
    ]
    noisy = ["NOISY TIMINGS"] if noise_of(records, PLAIN).noisy else []
    about = "; ".join([*conditions, *noisy])
    tables: list[Table] = []
    parts: list[Any] = [f"{about}."]
    for ladder in found:
        notes = [*_ABOUT_RUNGS, f"brackets: {bootstrap.confidence:.0%} intervals over prompts", *noisy]
        said = sentences(ladder, labels)
        made = [rungs_table(ladder, labels, notes), ingredients_table(ladder, labels), effects_table(ladder, said)]
        for table in made:
            remarks = said if table is made[-1] else f"{'; '.join(table.notes)}." if table.notes else ""
            parts += [f"**{table.title}**", table, remarks]
        tables += made
    written = write_texts(folder, {"ingredients.md": document(*parts), "ingredients.json": {"ladders": found}})
    for ladder in found:
        name = "ingredients.png" if len(found) == 1 else f"ingredients_T{ladder.temperature:g}.png"
        written.append(ingredients_plot(ladder, folder / name, about, labels))
    return tables, written


def rungs_table(ladder: Figures, labels: Mapping[str, str], notes: Sequence[str] = ()) -> Table:
    """A row per rung: its speed, and what it adds."""

    def speed(rung: Figures) -> Cell:
        digits = 0 if (rung.tokens_per_second or 0.0) >= 100 else 1
        return Cell(number(rung.tokens_per_second, digits), between(rung.interval, f".{digits}f"))

    return Table.of(
        ladder.rungs,
        [
            (left("rung", fold=True, min_width=18), lambda rung: rung_name(rung, labels)),
            ("tokens/s,\nall users", speed),
            ("tokens/s,\none user", lambda rung: number(rung.user_tokens_per_second, 1)),
            ("over the\nrung before", lambda rung: _ratio(rung.over_before)),
            ("over the\nfirst rung", lambda rung: _ratio(rung.over_first)),
            (left("output\nlaw"), lambda rung: "own" if rung.over_first is None else _law(rung.same_law)),
            ("same\ntokens", lambda rung: NOTHING if rung.sameness is None else percent(rung.sameness.tokens)),
        ],
        title=_at(TITLE, ladder),
        notes=notes,
    )


def ingredients_table(ladder: Figures, labels: Mapping[str, str]) -> Table:
    """A row per rung, with all of its ingredients."""
    names = [name for name in LEVERS if name not in ladder.shared and any(name in r.ingredients for r in ladder.rungs)]
    alike = [f"{name} {value}" for name, value in ladder.shared.items() if name not in _IN_TITLE]
    notes = [f"in every rung: {', '.join(alike)}"] if alike else []
    columns = [left("rung", fold=True, min_width=20), *(left(name, fold=True) for name in names)]
    table = Table(columns, _at("The ingredients of every rung", ladder), notes)
    for rung in ladder.rungs:
        table.add(rung_name(rung, labels), *(rung.ingredients.get(name, NOTHING) for name in names))
    return table


def effects_table(ladder: Figures, notes: Sequence[str] = ()) -> Table:
    """A row per ingredient: added to the first rung alone, and taken out of the last one."""
    return Table.of(
        ladder.effects,
        [
            (left("ingredient", fold=True, min_width=30), lambda effect: f"{effect.lever}: {effect.value}"),
            ("alone, on the\nfirst rung", lambda effect: _ratio(effect.alone)),
            ("as the last one,\nwith all others", lambda effect: _ratio(effect.last)),
            (left("output law"), lambda effect: _law(effect.same_law)),
        ],
        title=_at("Each ingredient by itself", ladder),
        notes=notes,
    )


def sentences(ladder: Figures, labels: Mapping[str, str]) -> list[str]:
    """Sentences that a headline about the last rung leaves out."""
    first, last, headline = ladder.rungs[0], ladder.rungs[-1], ladder.headline
    if headline is None:
        return ["the first or the last rung was not timed"]
    said = [f'the headline would be "{headline.value:.1f}x": the last rung over the first']
    if ladder.same_law is not None and ladder.other_law is not None and not last.same_law:
        said.append(
            f"of it, {ladder.same_law:.2f}x leaves the output's law as it is, and {ladder.other_law:.2f}x comes from "
            f"other weights, whose outputs follow another law"
        )
    if ladder.product_of_alone is not None:
        said.append(f"ingredients do not multiply: alone they would come to {ladder.product_of_alone:.1f}x")
    by_lever = {each.lever: each for each in reversed(ladder.effects)}
    speculation = by_lever.get("drafter")
    if speculation is not None and speculation.alone is not None and speculation.last is not None:
        said.append(
            f"speculation itself: {times(speculation.alone.value)} on the first rung, {times(speculation.last.value)} "
            f"with everything else on both sides"
        )
    if "batch" in by_lever and last.user_tokens_per_second and first.user_tokens_per_second:
        user = last.user_tokens_per_second / first.user_tokens_per_second
        said.append(
            f"one user's tokens come {user:.1f}x as fast: a batch shares the device, it speeds up nobody's request"
        )
    mixed = [rung_name(rung, labels) for rung in ladder.rungs if len(rung.changed) > 1]
    return [*said, *([f"CHANGES SEVERAL INGREDIENTS AT ONCE: {', '.join(mixed)}"] if mixed else [])]


def rung_name(rung: Figures, labels: Mapping[str, str]) -> str:
    """The name of a rung."""
    return labels.get(rung.method, "plain decoding" if rung.method == PLAIN else rung.method)


def _at(title: str, ladder: Figures) -> str:
    return f"{title}, at temperature {ladder.temperature:g}"


def _ratio(found: Figures | None) -> Cell:
    return EMPTY if found is None else with_interval(times(found.value), found.interval)


def _law(same: bool) -> Cell:
    return Cell("same") if same else Cell("ANOTHER", emphasis=Emphasis.LOSSY)


@style.styled()
def ingredients_plot(ladder: Figures, path: Path, subtitle: str, labels: Mapping[str, str]) -> Path:
    """Draw tokens per second of every rung with what it adds, and every ingredient alone and as the last one."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = style.new_figure(style.PAGE, 1.9 + 0.38 * max(len(ladder.rungs), len(ladder.effects)))
    bars, effects = figure.subplots(1, 2, width_ratios=(1.3, 1))
    _rungs(bars, ladder, labels)
    for each, offset, looks in (("alone", -0.16, _ALONE), ("last", 0.22, _LAST)):
        ratios = [(row + offset, effect[each]) for row, effect in enumerate(ladder.effects) if effect[each] is not None]
        style.dots(effects, [(row, found.value, found.interval) for row, found in ratios], 0, **looks)
    style.name_rows(effects, [f"{effect.lever}: {effect.value}" for effect in ladder.effects], 24)
    style.baseline(effects, vertical=True)
    effects.set_xlim(0, 1.18 * max(1.0, effects.dataLim.x1))
    effects.set(xlabel="tokens/s with it, over without it", title="each by itself (1: no effect)")
    handles: dict[str, object] = {
        "bars: the output follows the target's law": Patch(facecolor=_SAME),
        "other weights: another law": Patch(facecolor=_OTHER, hatch="///", edgecolor="white"),
        "dots: added to plain decoding alone": Line2D([], [], linestyle="none", **_ALONE),
        "added to all the others": Line2D([], [], linestyle="none", **_LAST),
    }
    style.legend(figure, list(handles.values()), list(handles), ncols=2)
    headline = "" if ladder.headline is None else f": {ladder.headline.value:.1f}x in all"
    return style.finish(figure, path, f"{TITLE}{headline}", subtitle)


def _rungs(axes: "Axes", ladder: Figures, labels: Mapping[str, str]) -> None:
    ends = [max(rung.tokens_per_second or 0.0, *(rung.interval or (0.0,))) for rung in ladder.rungs]
    for row, (rung, end) in enumerate(zip(ladder.rungs, ends, strict=True)):
        speed = rung.tokens_per_second or 0.0
        looks: dict[str, Any] = {"color": _SAME} if rung.same_law else {"color": _OTHER, "hatch": "///"}
        axes.barh(row, speed, height=0.62, edgecolor="white", **looks)
        if rung.interval is not None:
            axes.hlines(row, *rung.interval, color="black", linewidth=0.9)
        step = "" if rung.over_before is None else f"  (x {rung.over_before.value:.2f})"
        style.note(axes, f"{speed:.0f}{step}", (end, row))
    style.name_rows(axes, [rung_name(rung, labels) for rung in ladder.rungs], 25)
    axes.set_xlim(0, 1.5 * max(ends))
    axes.set_xlabel("output tokens/s of all users")
    axes.set_title("each rung adds one ingredient (x: over the one above)")
