"""The page: verdict first, then what made it, figures, pictures and outputs; style and code inside."""

import base64
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from experiments.reporting.comparison import pictures, remarks
from experiments.reporting.report.data import RunOutputs, as_script, choose_prompts, token_data
from experiments.reporting.report.figures import ALL, facts_of, figures_table, findings, names_of
from experiments.reporting.run_plots import RUN_PLOTS, category_plot, requests_plot
from experiments.reporting.run_tables import DEVICE, REQUESTS, above_roof, requests_table, run_table, utilization_table
from experiments.reporting.table import Table
from experiments.results.comparison import differences, entries_of, title
from experiments.results.origin import replace_text
from experiments.results.records import RECORDS, read_records
from experiments.results.runs import Run, read_summary
from experiments.results.texts import read_prompts
from experiments.tracing.rounds import Output, outputs_of

MOST_PICTURES = 12
"""Runs whose own pictures are in a report; of more runs it has the comparison's."""
_CODE = ("tables.js", "tree.js", "tokens.js")
_PLOTS = {**RUN_PLOTS, "requests.png": requests_plot, "categories.png": category_plot}
_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}
_DOTS_PER_INCH = 96
"""Pixels of a page per inch of a picture at its own size."""


def outputs_to_show(runs: Sequence[Run], max_prompts: int) -> tuple[list[list[Output]], list[str]]:
    """The outputs of every run for the token view, and sentences on what is left out.

    ``max_prompts`` counts over all runs together; every run shows at least one, unless it is 0.
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


def write_page(
    runs: Sequence[Run],
    outputs: Sequence[Sequence[Output]],
    texts: Sequence[Mapping[int, bytes]],
    path: Path,
    *,
    notes: Sequence[str] = (),
) -> None:
    """Write the report into one file."""
    given = [
        RunOutputs(name, own, said, read_prompts(run.folder))
        for run, name, own, said in zip(runs, names_of(runs), outputs, texts, strict=True)
    ]
    replace_text(path, _page(runs, given, notes))


def _page(runs: Sequence[Run], outputs: Sequence[RunOutputs], notes: Sequence[str]) -> str:
    style, code = _resource("style.css"), "\n".join(_resource(name) for name in _CODE)
    mixed = [f"MIXED: the runs {text}." for text in differences(runs)]
    mixed += [f"Above the roof: {text}." for run in runs for text in above_roof(run)]
    table, categories = figures_table(runs)
    folder = Path(__file__).parents[1]
    pages = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    pages.filters["lines"] = lambda text: Markup("<br>").join(escape(text).split("\n"))
    return pages.get_template("report/page.html").render(
        policy=_policy(style, code),
        style=style,
        code=code,
        title=title(runs),
        verdicts=findings(runs),
        remarks=[*mixed, *(note.text.rstrip(".") + "." for note in remarks(runs))],
        figures=table,
        categories=categories,
        details=_details(runs),
        made_by=[(name, facts_of(run)) for name, run in zip(names_of(runs), runs, strict=True)],
        pictures=_pictures(runs),
        options=_categories(categories, outputs),
        notes=notes,
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


def _categories(of_rows: Sequence[str], outputs: Sequence[RunOutputs]) -> list[str]:
    named = {category for category in of_rows if category != ALL}
    named |= {output.record.category for run in outputs for output in run.outputs if output.record.category}
    return sorted(named)


def _details(runs: Sequence[Run]) -> list[tuple[str, Table]]:
    """Further tables of every run, with what they show."""
    tables: dict[str, Table | None] = {}
    for run, name in zip(runs, names_of(runs), strict=True):
        of, comma = (f" of {name}", f", {name}") if name else ("", "")
        tables |= {
            f"{REQUESTS}{comma}": requests_table(run, ""),
            f"All figures{of}": run_table(run, ""),
            f"{DEVICE}{comma}": utilization_table(run, ""),
        }
    return [(heading, table) for heading, table in tables.items() if table is not None]


def _pictures(runs: Sequence[Run]) -> list[tuple[str, str, str | None]]:
    """Name, address and width of every picture of the page."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        if len(runs) > 1:
            found += [_figure(path, "") for path in compared_pictures(runs, Path(scratch))]
        for number, (run, name) in enumerate(zip(runs, names_of(runs), strict=True)):
            if len(runs) <= MOST_PICTURES:
                folder = Path(scratch) / str(number)
                folder.mkdir()
                found += [_figure(path, name) for path in pictures_of(run, folder)]
    return found


def pictures_of(run: Run, scratch: Path) -> list[Path]:
    """The pictures of one run: those in its folder, or drawn again into another one where they are missing."""
    conditions = str(read_summary(run.folder).get("title") or title([run]))  # the line under the run's own pictures
    found = []
    for name, plot in _PLOTS.items():
        there = [path for path in run.folder.glob(f"{Path(name).stem}.*") if path.suffix in _TYPES]
        path = there[0] if there else plot(run, scratch / name, conditions)
        found += [path] if path is not None else []
    return found


def compared_pictures(runs: Sequence[Run], scratch: Path) -> list[Path]:
    """The pictures of several runs together, drawn into a folder."""
    return pictures(entries_of(runs), scratch, title(runs))


def _figure(path: Path, run: str) -> tuple[str, str, str | None]:
    content = path.read_bytes()
    uri = f"data:{_TYPES[path.suffix]};base64,{base64.b64encode(content).decode()}"
    return f"{path.stem.replace('_', ' ')}{f', {run}' if run else ''}", uri, _width(content)


def _width(content: bytes) -> str | None:
    """The width of a PNG at its printed size, in pixels of a page; None where it is not known.

    A picture that is drawn for a column of a paper is not blown up to the width of the page.
    """
    header, density = content[:24], content.find(b"pHYs")
    if len(header) < 24 or header[12:16] != b"IHDR" or density < 0:
        return None
    pixels = int.from_bytes(header[16:20], "big")
    per_metre = int.from_bytes(content[density + 4 : density + 8], "big")
    return str(round(pixels / (per_metre * 0.0254) * _DOTS_PER_INCH)) if per_metre else None
