"""The page: verdict first, then what made it, figures, pictures and outputs; style and code inside."""

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from experiments.reporting.comparison import remarks
from experiments.reporting.report import html
from experiments.reporting.report.data import RunOutputs, as_script, choose_prompts, token_data
from experiments.reporting.report.figures import ALL, facts_of, figures_table, findings, names_of
from experiments.reporting.report.pictures import Picture, comparison_pictures, pictures_of
from experiments.reporting.requests import TITLE, requests_table
from experiments.reporting.run_tables import run_table
from experiments.reporting.utilization import TITLE as USE
from experiments.reporting.utilization import above_roof, utilization_table
from experiments.results.comparison import differences, title
from experiments.results.prompts import read_prompts
from experiments.results.records import RECORDS, read_records
from experiments.results.runs import Run
from experiments.tracing.outputs import Output, outputs_of

MOST_PICTURES = 12
"""Runs whose own pictures are in a report; of more runs it has the comparison's."""
_CODE = ("tables.js", "tree.js", "tokens.js")


def outputs_to_show(runs: Sequence[Run], max_prompts: int) -> tuple[list[list[Output]], list[str]]:
    """The outputs of every run for the token view, and sentences on what is left out.

    Args:
        runs: The runs.
        max_prompts: Prompts to show, over all runs together; every run shows at least one, unless this is 0.

    Raises:
        ValueError: A file of records is damaged.
    """
    share = max(max_prompts // len(runs), min(max_prompts, 1))
    found, notes = [], []
    for run, name in zip(runs, names_of(runs), strict=True):
        records = read_records(run.folder / RECORDS)
        chosen = set(choose_prompts(records, share))
        outputs, remarks = outputs_of(run.folder, [record for record in records if record.prompt in chosen])
        found.append(outputs)
        notes += [f"{name}: {note}" if name else note for note in remarks]
        total = len({record.prompt for record in records})
        if len(chosen) < total:
            where = f" of {name}" if name else ""
            notes.append(
                f"{len(chosen)} of {total} prompts{where} are shown, those with divergences first: "
                f"max_prompts={max_prompts} is the limit."
            )
    return found, list(dict.fromkeys(notes))


def tokens_of(outputs: Sequence[Output]) -> set[int]:
    """Ids of all tokens that the token view of some outputs names."""
    tokens = {token for output in outputs for token in output.record.token_ids}
    return tokens | {odds.token for output in outputs for each in output.rounds for odds in each.tokens()}


def write_page(
    runs: Sequence[Run],
    outputs: Sequence[Sequence[Output]],
    texts: Sequence[Mapping[int, bytes]],
    path: Path,
    *,
    notes: Sequence[str] = (),
) -> None:
    """Write the report into one file.

    Args:
        runs: The runs.
        outputs: The outputs of each run that are shown.
        texts: What the tokens of each run say.
        path: The file; an older one is replaced when the new one is complete.
        notes: Sentences about the outputs.
    """
    given = [
        RunOutputs(name, own, said, read_prompts(run.folder))
        for run, name, own, said in zip(runs, names_of(runs), outputs, texts, strict=True)
    ]
    text = _page(runs, given, notes)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8", errors="replace")
    os.replace(part, path)


def _page(runs: Sequence[Run], outputs: Sequence[RunOutputs], notes: Sequence[str]) -> str:
    style, code = _resource("style.css"), "\n".join(_resource(name) for name in _CODE)
    mixed = [f"MIXED: the runs {text}." for text in differences(runs)]
    mixed += [f"Above the roof: {text}." for run in runs for text in above_roof(run.summary)]
    table, categories = figures_table(runs)
    return Template(_resource("page.html")).substitute(
        policy=_policy(style, code),
        style=style,
        code=code,
        title=escape(title(runs)),
        verdicts=_verdicts(runs),
        remarks=html.sentences([*mixed, *(note.rstrip(".") + "." for note in remarks(runs))], "remark"),
        figures=html.table(table, categories=categories),
        details=_details(runs),
        facts=_facts(runs),
        pictures=_pictures(runs),
        options="".join(html.element("option", escape(name), value=name) for name in _categories(categories, outputs)),
        notes=html.sentences(notes, "note"),
        data=as_script(token_data(outputs)),
    )


def _policy(style: str, code: str) -> str:
    """The page's own style and code by their hashes, pictures inside the page, and nothing else: no network at all."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(code)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _resource(name: str) -> str:
    return files("experiments.reporting.report").joinpath(name).read_text(encoding="utf-8")


def _verdicts(runs: Sequence[Run]) -> str:
    cards = [
        html.element(
            "li",
            html.element("span", escape(found.name), class_="method"),
            html.element("strong", escape(found.head)),
            html.element("span", escape(found.detail), class_="detail"),
            class_=f"verdict {found.kind}",
        )
        for found in findings(runs)
    ]
    return "".join(cards) or html.element("li", "Nothing was drafted in these runs.", class_="verdict unknown")


def _categories(of_rows: Sequence[str], outputs: Sequence[RunOutputs]) -> list[str]:
    named = {category for category in of_rows if category != ALL}
    named |= {output.record.category for run in outputs for output in run.outputs if output.record.category}
    return sorted(named)


def _details(runs: Sequence[Run]) -> str:
    parts = []
    for run, name in zip(runs, names_of(runs), strict=True):
        felt = requests_table(run.summary, "")
        if felt is not None:
            summary = html.element("summary", escape(f"{TITLE}{f', {name}' if name else ''}"))
            parts.append(html.element("details", summary, html.table(felt, sortable=False)))
        summary = html.element("summary", escape(f"All figures{f' of {name}' if name else ''}"))
        parts.append(html.element("details", summary, html.table(run_table(run.summary, ""), sortable=False)))
        used = utilization_table(run.summary, "")
        if used is not None:
            summary = html.element("summary", escape(f"{USE}{f', {name}' if name else ''}"))
            parts.append(html.element("details", summary, html.table(used, sortable=False)))
    return "".join(parts)


def _facts(runs: Sequence[Run]) -> str:
    names = names_of(runs)
    if len(runs) == 1:
        return html.facts(facts_of(runs[0]))
    return "".join(
        html.element("details", html.element("summary", escape(name)), html.facts(facts_of(run)))
        for run, name in zip(runs, names, strict=True)
    )


def _pictures(runs: Sequence[Run]) -> str:
    parts = []
    if len(runs) > 1:
        parts += [_figure(picture, "") for picture in comparison_pictures(runs)]
    if len(runs) <= MOST_PICTURES:
        for run, name in zip(runs, names_of(runs), strict=True):
            parts += [_figure(picture, name) for picture in pictures_of(run)]
    return "".join(parts)


def _figure(picture: Picture, run: str) -> str:
    name = f"{picture.name}{f', {run}' if run else ''}"
    image = f'<img src="{escape(picture.uri)}" alt="{escape(name)}">'
    return html.element("figure", image, html.element("figcaption", escape(name)))
