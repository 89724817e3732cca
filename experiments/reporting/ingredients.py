"""Where a speedup comes from: the ladder of ingredients as tables, sentences, a picture and files."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.reporting import style
from experiments.reporting.cells import EMPTY, NOTHING, between, number, percent, times, with_interval
from experiments.reporting.formats import document, write_texts
from experiments.reporting.table import Cell, Emphasis, Table, left
from experiments.results.comparison import commit_of
from experiments.results.ingredients import LEVERS, Effect, Ladder, Ratio, Rung, ladders
from experiments.results.noise import noise_of
from experiments.results.origin import read_manifest
from experiments.results.plain_json import json_text
from experiments.results.records import PLAIN, Record
from experiments.results.statistics import Bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def report_ingredients(
    folder: Path, records: Sequence[Record], order: Sequence[str], labels: Mapping[str, str], bootstrap: Bootstrap
) -> tuple[list[Table], list[Path]]:
    """Write the tables, the figures and the picture into a run's folder; returns tables and files.

    Args:
        folder: The run's, with its manifest.
        records: All records.
        order: The rungs' methods.
        labels: The names of methods.
        bootstrap: Settings of the intervals.

    Raises:
        ValueError: As ``ladders``.
    """
    manifest = read_manifest(folder)
    found = ladders(records, manifest["ingredients"], order, bootstrap)
    conditions = _conditions(manifest, records)
    noisy = [each for each in conditions if each.startswith("NOISY")]
    tables: list[Table] = []
    parts: list[Any] = [f"{'; '.join(conditions)}."]
    for ladder in found:
        notes = [*_ABOUT_RUNGS, f"brackets: {bootstrap.confidence:.0%} intervals over prompts", *noisy]
        said = sentences(ladder, labels)
        rungs, ingredients = rungs_table(ladder, labels, notes=notes), ingredients_table(ladder, labels)
        effects = effects_table(ladder, notes=said)
        for table in (rungs, ingredients):
            parts += [f"**{table.title}**", table, f"{'; '.join(table.notes)}." if table.notes else ""]
        parts += [f"**{effects.title}**", effects, said]
        tables += [rungs, ingredients, effects]
    texts = {
        "ingredients.md": document(*parts),
        "ingredients.json": json_text({"ladders": [_figures(ladder) for ladder in found]}),
    }
    written = write_texts(folder, texts)
    for ladder in found:
        name = "ingredients.png" if len(found) == 1 else f"ingredients_T{ladder.temperature:g}.png"
        written.append(ingredients_plot(ladder, folder / name, "; ".join(conditions), labels))
    return tables, written


def rungs_table(ladder: Ladder, labels: Mapping[str, str], *, notes: Sequence[str] = ()) -> Table:
    """A row per rung: its speed, and what it adds."""

    def speed(rung: Rung) -> Cell:
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
            (
                left("output\nlaw"),
                lambda rung: Cell("own") if rung.over_first is None else _law(rung.same_law),
            ),
            ("same\ntokens", lambda rung: NOTHING if rung.sameness is None else percent(rung.sameness.tokens)),
        ],
        title=_at(TITLE, ladder),
        notes=notes,
    )


def ingredients_table(ladder: Ladder, labels: Mapping[str, str]) -> Table:
    """A row per rung, with all of its ingredients."""
    names = [name for name in LEVERS if name not in ladder.shared and any(name in r.ingredients for r in ladder.rungs)]
    alike = [f"{name} {value}" for name, value in ladder.shared.items() if name not in _IN_TITLE]
    notes = [f"in every rung: {', '.join(alike)}"] if alike else []
    columns = [left("rung", fold=True, min_width=20), *(left(name, fold=True) for name in names)]
    table = Table(columns, _at("The ingredients of every rung", ladder), notes)
    for rung in ladder.rungs:
        table.add(rung_name(rung, labels), *(rung.ingredients.get(name, NOTHING) for name in names))
    return table


def effects_table(ladder: Ladder, *, notes: Sequence[str] = ()) -> Table:
    """A row per ingredient: added to the first rung alone, and taken out of the last one."""
    return Table.of(
        ladder.effects,
        [
            (left("ingredient", fold=True, min_width=30), effect_name),
            ("alone, on the\nfirst rung", lambda effect: _ratio(effect.alone)),
            ("as the last one,\nwith all others", lambda effect: _ratio(effect.last)),
            (left("output law"), lambda effect: _law(effect.same_law)),
        ],
        title=_at("Each ingredient by itself", ladder),
        notes=notes,
    )


def sentences(ladder: Ladder, labels: Mapping[str, str]) -> list[str]:
    """Sentences that a headline about the last rung leaves out."""
    first, last, headline = ladder.rungs[0], ladder.rungs[-1], ladder.headline
    if headline is None:
        return ["the first or the last rung was not timed"]
    said = [f'the headline would be "{headline.value:.1f}x": the last rung over the first']
    keeps, changes = ladder.share_of(same_law=True), ladder.share_of(same_law=False)
    if keeps is not None and changes is not None and not last.same_law:
        said.append(
            f"of it, {keeps:.2f}x leaves the output's law as it is, and {changes:.2f}x comes from other weights, whose "
            f"outputs follow another law"
        )
    product = ladder.product_of_alone
    if product is not None:
        said.append(f"ingredients do not multiply: alone they would come to {product:.1f}x")
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
    if mixed:
        said.append(f"CHANGES SEVERAL INGREDIENTS AT ONCE: {', '.join(mixed)}")
    return said


def rung_name(rung: Rung, labels: Mapping[str, str]) -> str:
    """The name of a rung."""
    return labels.get(rung.method, "plain decoding" if rung.method == PLAIN else rung.method)


def effect_name(effect: Effect) -> str:
    """An ingredient's name and its value."""
    return f"{effect.lever}: {effect.value}"


def _at(title: str, ladder: Ladder) -> str:
    return f"{title}, at temperature {ladder.temperature:g}"


def _ratio(found: Ratio | None) -> Cell:
    return EMPTY if found is None else with_interval(times(found.value), found.interval)


def _law(same: bool) -> Cell:
    return Cell("same") if same else Cell("ANOTHER", emphasis=Emphasis.LOSSY)


def _conditions(manifest: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
    noise = noise_of(records, PLAIN)
    return [
        str(manifest["ingredients"][PLAIN].get("target", "")),
        str(manifest["device"]),
        f"{len({record.prompt for record in records})} prompts",
        f"up to {manifest['config']['sampling']['max_new_tokens']} new tokens",
        f"commit {commit_of(manifest)}",
        *(["NOISY TIMINGS"] if noise is not None and noise.noisy else []),
    ]


def _figures(ladder: Ladder) -> dict[str, object]:
    return {
        **asdict(ladder),
        "headline": None if ladder.headline is None else asdict(ladder.headline),
        "product_of_alone": ladder.product_of_alone,
        "same_law": ladder.share_of(same_law=True),
        "other_law": ladder.share_of(same_law=False),
    }


@style.styled()
def ingredients_plot(ladder: Ladder, path: Path, subtitle: str, labels: Mapping[str, str]) -> Path:
    """Draw tokens per second of every rung with what it adds, and every ingredient alone and as the last one."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = style.new_figure(style.PAGE, 1.9 + 0.38 * max(len(ladder.rungs), len(ladder.effects)))
    bars, effects = figure.subplots(1, 2, width_ratios=(1.3, 1))
    _rungs(bars, ladder, labels)
    for each, offset, looks in (("alone", -0.16, _ALONE), ("last", 0.22, _LAST)):
        ratios = [(row, getattr(effect, each)) for row, effect in enumerate(ladder.effects)]
        points = [(row + offset, found.value, found.interval) for row, found in ratios if found is not None]
        style.dots(effects, points, 0, **looks)
    style.name_rows(effects, [effect_name(effect) for effect in ladder.effects], 24, lines=False)
    style.baseline(effects, vertical=True)
    known = [each for effect in ladder.effects for each in (effect.alone, effect.last) if each is not None]
    ends = [end for each in known for end in (each.value, *(each.interval or ()))]
    effects.set_xlim(0, 1.18 * max(ends, default=1.0))
    effects.set(xlabel="tokens/s with it, over without it", title="each by itself (1: no effect)")
    effects.grid(axis="x")
    handles: dict[str, object] = {
        "bars: the output follows the target's law": Patch(facecolor=_SAME),
        "other weights: another law": Patch(facecolor=_OTHER, hatch="///", edgecolor="white"),
        "dots: added to plain decoding alone": Line2D([], [], linestyle="none", **_ALONE),
        "added to all the others": Line2D([], [], linestyle="none", **_LAST),
    }
    style.legend(figure, list(handles.values()), list(handles), ncols=2)
    headline = "" if ladder.headline is None else f": {ladder.headline.value:.1f}x in all"
    style.title(figure, f"{TITLE}{headline}", subtitle)
    return style.save(figure, path)


def _rungs(axes: "Axes", ladder: Ladder, labels: Mapping[str, str]) -> None:
    ends = [max(rung.tokens_per_second or 0.0, *(rung.interval or (0.0,))) for rung in ladder.rungs]
    for row, (rung, end) in enumerate(zip(ladder.rungs, ends, strict=True)):
        speed = rung.tokens_per_second or 0.0
        looks: dict[str, Any] = {"color": _SAME} if rung.same_law else {"color": _OTHER, "hatch": "///"}
        axes.barh(row, speed, height=0.62, edgecolor="white", **looks)
        if rung.interval is not None:
            axes.hlines(row, *rung.interval, color="black", linewidth=0.9)
        step = "" if rung.over_before is None else f"  (x {rung.over_before.value:.2f})"
        style.note(axes, f"{speed:.0f}{step}", (end, row))
    style.name_rows(axes, [rung_name(rung, labels) for rung in ladder.rungs], 25, lines=False)
    axes.set_xlim(0, 1.5 * max(ends))
    axes.set_xlabel("output tokens/s of all users")
    axes.set_title("each rung adds one ingredient (x: over the one above)")
    axes.grid(axis="x")
