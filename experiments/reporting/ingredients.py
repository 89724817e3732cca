"""Where a speedup comes from: the ladder of ingredients as two tables, sentences and files."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.reporting import markdown
from experiments.reporting.cells import NOTHING, number, percent, times, with_interval
from experiments.reporting.ingredients_plot import ingredients_plot
from experiments.reporting.table import Cell, Column, Emphasis, Table
from experiments.results.comparison import commit_of
from experiments.results.ingredients import LEVERS, Effect, Ladder, Ratio, Rung, ladders
from experiments.results.noise import noise_of
from experiments.results.origin import read_manifest
from experiments.results.plain_json import json_text
from experiments.results.records import PLAIN, Record
from experiments.results.statistics import Bootstrap

RUNGS = (
    Column("rung", "left", fold=True, min_width=18),
    Column("tokens/s,\nall users"),
    Column("tokens/s,\none user"),
    Column("over the\nrung before"),
    Column("over the\nfirst rung"),
    Column("output\nlaw", "left"),
    Column("same\ntokens"),
)
EFFECTS = (
    Column("ingredient", "left", fold=True, min_width=30),
    Column("alone, on the\nfirst rung"),
    Column("as the last one,\nwith all others"),
    Column("output law", "left"),
)
_IN_TITLE = ("target", "engine")
"""Ingredients that have no column: the first is in the conditions."""
TITLE = "Where the speedup comes from, one ingredient at a time"
TITLE_OF_EFFECTS = "Each ingredient by itself"
TITLE_OF_INGREDIENTS = "The ingredients of every rung"


def report_ingredients(
    folder: Path, records: Sequence[Record], order: Sequence[str], labels: Mapping[str, str], bootstrap: Bootstrap
) -> tuple[list[Table], list[Path]]:
    """Write the tables, the figures and the picture into a run's folder; returns tables and files.

    Args:
        folder: The run's, with its manifest.
        records: All records.
        order: The rungs' methods.
        labels: What methods are called.
        bootstrap: Settings of the intervals.

    Raises:
        ValueError: As ``ladders``.
    """
    manifest = read_manifest(folder)
    found = ladders(records, manifest["ingredients"], order, bootstrap)
    conditions = _conditions(manifest, records)
    tables: list[Table] = []
    document = [f"{'; '.join(conditions)}.", ""]
    for ladder in found:
        notes = [*_ABOUT_RUNGS, f"brackets: {bootstrap.confidence:.0%} intervals over prompts"]
        said = sentences(ladder, labels)
        own = [
            rungs_table(ladder, labels, notes=notes),
            ingredients_table(ladder, labels),
            effects_table(ladder, notes=said),
        ]
        for table in own:
            document += [f"**{table.title}**", "", markdown.render(table).rstrip(), ""]
            document += [f"{'; '.join(table.notes)}.", ""] if table.notes and table.notes is not said else []
        document += [*(f"- {each}" for each in said), ""]
        tables += own
    text, figures = folder / "ingredients.md", folder / "ingredients.json"
    text.write_text("\n".join(document), encoding="utf-8")
    figures.write_text(json_text({"ladders": [_figures(ladder) for ladder in found]}), encoding="utf-8")
    subtitle = "; ".join(conditions)
    pictures = []
    for ladder in found:
        name = "ingredients.png" if len(found) == 1 else f"ingredients_T{ladder.temperature:g}.png"
        pictures.append(ingredients_plot(ladder, folder / name, subtitle, labels))
    return tables, [text, figures, *pictures]


def rungs_table(ladder: Ladder, labels: Mapping[str, str], *, notes: Sequence[str] = ()) -> Table:
    """Returns a row per rung."""
    table = Table(RUNGS, _at(TITLE, ladder), notes)
    for rung in ladder.rungs:
        table.add(
            rung_name(rung, labels),
            _speed(rung),
            number(rung.user_tokens_per_second, 1),
            _ratio(rung.over_before),
            _ratio(rung.over_first),
            _law(rung.same_law, rung.over_first is None),
            NOTHING if rung.sameness is None else percent(rung.sameness.tokens),
        )
    return table


def ingredients_table(ladder: Ladder, labels: Mapping[str, str]) -> Table:
    """Returns a row per rung, with all of its ingredients."""
    names = [name for name in LEVERS if name not in ladder.shared and any(name in r.ingredients for r in ladder.rungs)]
    columns = [Column("rung", "left", fold=True, min_width=20), *(Column(name, "left", fold=True) for name in names)]
    alike = [f"{name} {value}" for name, value in ladder.shared.items() if name not in _IN_TITLE]
    table = Table(columns, _at(TITLE_OF_INGREDIENTS, ladder), [f"in every rung: {', '.join(alike)}"] if alike else [])
    for rung in ladder.rungs:
        table.add(rung_name(rung, labels), *(rung.ingredients.get(name, NOTHING) for name in names))
    return table


def effects_table(ladder: Ladder, *, notes: Sequence[str] = ()) -> Table:
    """Returns a row per ingredient: added to the first rung alone, and taken out of the last one."""
    table = Table(EFFECTS, _at(TITLE_OF_EFFECTS, ladder), notes)
    for effect in ladder.effects:
        table.add(effect_name(effect), _ratio(effect.alone), _ratio(effect.last), _law(effect.same_law, False))
    return table


def sentences(ladder: Ladder, labels: Mapping[str, str]) -> list[str]:
    """Returns what a headline about the last rung has to say besides."""
    last, headline = ladder.rungs[-1], ladder.headline
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
    speculation = next((each for each in ladder.effects if each.lever == "drafter"), None)
    if speculation is not None and speculation.alone is not None and speculation.last is not None:
        said.append(
            f"speculation itself: {times(speculation.alone.value)} on the first rung, {times(speculation.last.value)} "
            f"with everything else on both sides"
        )
    batch = next((each for each in ladder.effects if each.lever == "batch"), None)
    first = ladder.rungs[0]
    if batch is not None and last.user_tokens_per_second and first.user_tokens_per_second:
        user = last.user_tokens_per_second / first.user_tokens_per_second
        said.append(
            f"one user's tokens come {user:.1f}x as fast: a batch shares the device, it speeds up nobody's request"
        )
    mixed = [rung_name(rung, labels) for rung in ladder.rungs if len(rung.changed) > 1]
    if mixed:
        said.append(f"CHANGES SEVERAL INGREDIENTS AT ONCE: {', '.join(mixed)}")
    return said


def _at(title: str, ladder: Ladder) -> str:
    return f"{title}, at temperature {ladder.temperature:g}"


def rung_name(rung: Rung, labels: Mapping[str, str]) -> str:
    """What a rung is called."""
    return labels.get(rung.method, "plain decoding" if rung.method == PLAIN else rung.method)


def effect_name(effect: Effect) -> str:
    """What an ingredient is called: its name and its value."""
    return f"{effect.lever}: {effect.value}"


def _speed(rung: Rung) -> Cell:
    bounds = rung.interval
    digits = 0 if (rung.tokens_per_second or 0.0) >= 100 else 1
    more = () if bounds is None else (f"[{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]",)
    return Cell(number(rung.tokens_per_second, digits), more)


def _ratio(found: Ratio | None) -> Cell:
    return Cell(NOTHING) if found is None else with_interval(times(found.value), found.interval)


def _law(same: bool, is_first: bool) -> Cell:
    if is_first:
        return Cell("own")
    return Cell("same") if same else Cell("ANOTHER", emphasis=Emphasis.LOSSY)


_ABOUT_RUNGS = (
    "all rungs took turns on the same prompts in one run; the time of prompts (prefill) is in all of them",
    "same tokens: the share of the first rung's tokens that come before the first difference; under the same "
    "law, it is rounding that lets outputs part",
)


def _conditions(manifest: Mapping[str, object], records: Sequence[Record]) -> list[str]:
    config = manifest["config"]
    assert isinstance(config, dict)
    prompts = len({record.prompt for record in records})
    noise = noise_of(records, PLAIN)
    return [
        str(manifest["ingredients"][PLAIN].get("target", "")),  # type: ignore[index]
        str(manifest["device"]),
        f"{prompts} prompts",
        f"up to {config['sampling']['max_new_tokens']} new tokens",
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
