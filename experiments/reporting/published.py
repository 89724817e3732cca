"""Acceptance lengths that others have published, beside those of our runs, and what keeps them from being compared."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.reporting import terminal
from experiments.reporting.cells import length, number
from experiments.reporting.formats import write_texts
from experiments.reporting.table import Table, left
from experiments.results.comparison import Row, dataset_name
from experiments.results.exchange import Published, curve, drafted_of, exported
from experiments.results.records import Record
from experiments.results.runs import Run, records_of


class Pair(NamedTuple):
    """A published figure, and a row of ours that drafted as many tokens, with its records."""

    theirs: Published
    row: Row | None = None
    records: Sequence[Record] = ()


def report_published(rows: Sequence[Row], found: Sequence[Published], out: Path) -> None:
    """Print published figures beside a comparison's rows, and write them to ``published.md``."""
    of = {folder: records_of(folder) for folder in {row.run.folder for row in rows}}
    table, console = published_table(rows, [of[row.run.folder] for row in rows], found), terminal.console()
    terminal.show(console, table)
    terminal.list_written(console, write_texts(out, {"published.md": table.markdown()}))


def export(runs: Sequence[Run], format: str, out: Path) -> list[Path]:
    """Write runs' acceptance in another project's format and return the files: a folder for every run, or one curve."""
    named = dict(zip(_names(runs), runs, strict=True))
    if format == "inferencex":
        told = {name: (run.manifest["target"]["name"], records_of(run.folder)) for name, run in named.items()}
        facts = {
            "dataset": "; ".join(dict.fromkeys(map(dataset_name, runs))),
            "dtype": "; ".join(dict.fromkeys(run.manifest["dtype"] for run in runs)),
            "device": "; ".join(dict.fromkeys(run.manifest["device"] for run in runs)),
        } | {
            f"made with ({name})": " ".join(run.manifest["overrides"]) or "no overrides" for name, run in named.items()
        }
        text = curve(told, facts)
        return write_texts(out, {"acceptance.yaml": text} if text else {})
    found = []
    for name, run in named.items():
        texts = exported(format, records_of(run.folder), run.manifest["target"]["name"])
        found += write_texts(out / name, texts)
    return found


def _names(runs: Sequence[Run]) -> list[str]:
    """The runs' folders by name, with as many of those above as tell them apart: runs of two sweeps are both ``0``."""
    paths = [run.folder.resolve().parts for run in runs]
    names, deep = [path[-1] for path in paths], 1
    while len(set(names)) < len(set(paths)) and deep < max(map(len, paths)):
        deep += 1
        names = ["_".join(path[-deep:]) for path in paths]
    return names


def published_table(rows: Sequence[Row], records: Sequence[Sequence[Record]], found: Sequence[Published]) -> Table:
    """A row for every published figure and row of ours that drafted as many tokens, or any if the figure does not say.

    Args:
        rows: Of a comparison; those of plain decoding and of engines without rounds are left out.
        records: Of the run of each row.
        found: The published figures.
    """
    ours = [
        (row, own)
        for row, every in zip(rows, records, strict=True)
        if (own := [r for r in every if (r.method, r.temperature) == (row.method.method, row.method.temperature)])
        and row.method.proposed_nodes_per_round
    ]
    pairs = [
        Pair(theirs, *match)
        for theirs in found
        for match in [each for each in ours if theirs.drafted in (None, drafted_of(each[1]))] or [(None, [])]
    ]
    return Table.of(
        pairs,
        [
            (left("published", fold=True, min_width=20), lambda pair: pair.theirs.name),
            ("drafted", lambda pair: number(pair.theirs.drafted, 0)),
            ("theirs", lambda pair: number(pair.theirs.length, 2)),
            (left("ours", fold=True, min_width=12), lambda pair: ", ".join(pair.row.name) if pair.row else "-"),
            ("mean\nacceptance\nlength", lambda pair: length(pair.row.method) if pair.row else "-"),
            (left("not alike", fold=True, min_width=20), lambda pair: "; ".join(unlike(pair))),
        ],
        title="Beside published acceptance lengths",
        notes=[
            "lengths count the target's own token; where model, prompts or temperature differ, the difference says "
            "nothing about the drafters; SGLang's --speculative-num-draft-tokens is one more than drafted, "
            "TensorRT-LLM's number of accepted tokens one less than a length"
        ],
    )


def unlike(pair: Pair) -> list[str]:
    """In words, what differs between a published figure and a row of ours, or is not known."""
    theirs, row = pair.theirs, pair.row
    found = []
    if theirs.length < 1:
        found.append("a length below 1 cannot count the target's own token: add 1")
    if theirs.drafted is not None and theirs.length > theirs.drafted + 1:
        found.append(
            f"{theirs.drafted} drafted tokens give {theirs.drafted + 1} at most: one of the numbers counts more"
        )
    if row is None:
        count = "" if theirs.drafted is None else f" {theirs.drafted}"
        return [*found, f"no run of ours drafted{count} tokens per round"]
    target = str(row.run.manifest["target"]["name"])
    ours, said = target.rpartition("/")[2].lower(), theirs.name.lower()
    if not re.search(rf"(^|/){re.escape(ours)}($|, )", said):
        found.append(f"model{', perhaps' * (ours in said)} (ours: {target})")
    if theirs.drafted is None:
        found.append("their number of drafted tokens is not said")
    drafted = [depth for record in pair.records for depth in record.proposed_depth]
    if not theirs.every_round and 0 in drafted:
        found.append(
            f"{drafted.count(0) / len(drafted):.0%} of our rounds have no draft, and theirs leave such rounds out"
        )
    if theirs.temperature is None:
        found.append("their temperature is not said")
    elif theirs.temperature != row.method.temperature:
        found.append(f"temperature {theirs.temperature:g}, ours {row.method.temperature:g}")
    categories = ", ".join(sorted({record.category for record in pair.records}))
    if theirs.category is None:
        found.append("their prompts are not said")
    elif categories != theirs.category and not dataset_name(row.run).startswith(f"{theirs.category},"):
        found.append(f"prompts: {theirs.category or 'without a category'}; ours: {categories or 'without a category'}")
    if theirs.rounds is None:
        found.append("they give no interval")
    return found
