"""One table and one plot across runs: ``python -m experiments.compare outputs/a outputs/b``."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.cli import show
from experiments.compare_plots import acceptance_lines, comparison_plot
from experiments.comparison import Row, differences, make_rows, remarks, title
from experiments.report import equality, number, percent, times
from experiments.results import Run, load_run
from experiments.session import PIPE_WIDTH, short
from specdec.stats import Interval


def compare_runs(
    runs: Sequence[Run], out: Path, *, allow_mixed: bool = False, missing: Sequence[str] = ()
) -> list[Row]:
    """Print and write the comparison of runs.

    Args:
        runs: The runs.
        out: Folder for ``comparison.md``, ``.json`` and the pictures.
        allow_mixed: Compare runs of different targets, datasets or dtypes, too, and say so.
        missing: What has no results, to be listed.

    Raises:
        ValueError: The runs are not to be mixed, or there is none.
    """
    if not runs:
        raise ValueError("there are no runs to compare")
    mixed = differences(runs)
    if mixed and not allow_mixed:
        raise ValueError(f"the runs {'; '.join(mixed)}: --allow-mixed compares them all the same")
    rows = make_rows(runs)
    notes = [*(f"MIXED: the runs {text}" for text in mixed), *remarks(runs), *missing]
    out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(rich_table(rows, title(runs)))
    for note in notes:
        console.print(note, highlight=False, markup=False)
    written = [out / "comparison.md", out / "comparison.json"]
    written[0].write_text(markdown(rows, runs, notes), encoding="utf-8")
    figures = [{"name": ", ".join(row.name), "folder": str(row.run.folder), **asdict(row.method)} for row in rows]
    text = json.dumps({"title": title(runs), "notes": notes, "rows": figures}, indent=2, ensure_ascii=False)
    written[1].write_text(text + "\n", encoding="utf-8")
    subtitle = "; ".join([title(runs), *(note for note in notes if note.startswith(("MIXED", "INCOMPLETE")))])
    for plot, name in ((comparison_plot, "comparison.png"), (acceptance_lines, "acceptance.png")):
        path = plot(rows, out / name, subtitle)
        written += [path] if path is not None else []
    listed = "\n".join(["wrote", *(f"  {short(path)}" for path in written)])
    console.print(listed, highlight=False, markup=False, soft_wrap=True)
    return rows


COLUMNS = (
    "mean\nacceptance\nlength",
    "speedup",
    "tokens/s",
    "plain's",
    "draft\naccepted",
    "nodes/\nround",
    "distinct\n4-grams",
    "equal\nto plain",
)


def cells(row: Row, between: str) -> list[str]:
    """A row's figures; ``between`` stands between a value and its interval."""
    method = row.method
    return [
        _bounded(number(method.mean_acceptance_length), method.mean_acceptance_length_interval, between),
        _bounded(times(method.speedup), method.speedup_interval, between),
        number(method.tokens_per_second, 1),
        number(row.plain.tokens_per_second if row.plain is not None else None, 1),
        percent(method.draft_acceptance_rate),
        number(method.proposed_nodes_per_round, 1),
        percent(method.distinct_4_gram_rate),
        equality(method),
    ]


def rich_table(rows: Sequence[Row], text: str) -> Table:
    """For the terminal."""
    rules = sorted({row.method.exactness for row in rows if row.method.exactness is not None})
    caption = f"intervals at {rows[0].run.summary.confidence:.0%}; acceptance rule: {', '.join(rules) or 'none'}"
    table = Table(title=text, caption=caption, title_justify="left", caption_justify="left")
    table.box, table.padding = box.HORIZONTALS, (0, 1, 0, 0)  # narrow enough for all columns in 120 characters
    table.add_column("T", justify="right")
    table.add_column("method and settings", min_width=24, overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1].method.temperature != row.method.temperature
        table.add_row(f"{row.method.temperature:g}", "\n".join(row.name), *cells(row, "\n"), end_section=last)
    return table


def markdown(rows: Sequence[Row], runs: Sequence[Run], notes: Sequence[str]) -> str:
    """The same for a document, with where the numbers come from."""
    header = ["T", "method and settings", *(" ".join(name.split("\n")) for name in COLUMNS)]
    lines = [f"{title(runs)}; intervals at {rows[0].run.summary.confidence:.0%}.", ""]
    lines += ["| " + " | ".join(header) + " |", "|---:|---|" + "---:|" * len(COLUMNS)]
    for row in rows:
        lines.append("| " + " | ".join([f"{row.method.temperature:g}", ", ".join(row.name), *cells(row, " ")]) + " |")
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    commits = sorted({commit_of(run.manifest) for run in runs})
    common = set.intersection(*(set(run.manifest.get("overrides", [])) for run in runs))
    given = [text for text in runs[0].manifest.get("overrides", []) if text in common and not text.startswith("out=")]
    lines += ["", f"Made at commit {', '.join(commits)} with `{' '.join(given) or 'the defaults'}`."]
    return "\n".join(lines) + "\n"


def _bounded(value: str, bounds: Interval | None, between: str) -> str:
    return value if bounds is None else f"{value}{between}[{bounds[0]:.2f}, {bounds[1]:.2f}]"


def commit_of(manifest: Mapping[str, Any]) -> str:
    """The code that made a run, in short."""
    git = manifest.get("git")
    return f"{git['commit'][:10]}{' with changes' if git['dirty'] else ''}" if git else "unknown"


def parser() -> argparse.ArgumentParser:
    """What the command line takes."""
    made = argparse.ArgumentParser(prog="python -m experiments.compare", description=__doc__)
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (or of a sweep: all its jobs)")
    made.add_argument("--out", type=Path, help="folder for the table and the plots (default: outputs/compare/…)")
    made.add_argument("--allow-mixed", action="store_true", help="also runs of different targets, datasets or dtypes")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the runs that the command line names."""
    options = parser().parse_args(arguments)
    out = options.out or Path("outputs", "compare", datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    try:
        folders = [job for folder in options.runs for job in jobs_of(folder)]
        compare_runs([load_run(folder) for folder in folders], out, allow_mixed=options.allow_mixed)
    except ValueError as error:
        show(error)
        sys.exit(1)


def jobs_of(folder: Path) -> list[Path]:
    """The folder itself, or those of a sweep's jobs that have begun."""
    jobs = [path.parent for path in folder.glob("*/manifest.json")] if not (folder / "manifest.json").exists() else []
    return sorted(jobs, key=by_number) or [folder]


def by_number(folder: Path) -> tuple[int, int, str]:
    """Job 10 after job 9, and other names after the numbers."""
    return (0, int(folder.name), "") if folder.name.isdigit() else (1, 0, folder.name)


if __name__ == "__main__":
    main()
