"""The report of a replay: its tables, its remarks, and the files that it leaves."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.reporting import csv, markdown, terminal
from experiments.reporting.cells import NOTHING, lossiness, number, signed
from experiments.reporting.replay_plot import gain_plot, reach_plot
from experiments.reporting.table import Cell, Column, Emphasis, Table
from experiments.results.comparison import commit_of
from experiments.results.lossless import promises_exact
from experiments.tracing.figures import DraftSetFigures, RuleFigures
from experiments.tracing.orderings import Ordering

CONTEXTS = (
    "One-round expectations on identical contexts: those that the rule which ran has led to. Another rule would have "
    "met other contexts."
)
REACH = "reach"
"""The folder of the pictures of acceptance by position, one for every kind of drafts."""

COLUMNS = (
    Column("T"),
    Column("drafts", "left", fold=True, max_width=22),
    Column("rule (exactness)", "left", fold=True, min_width=16),
    Column("accepted\nper round"),
    Column("over the\nbaseline"),
    Column("at\nleast 1"),
    Column("its\nbound"),
    Column("at least\n2, 3, …"),
    Column("TV; KL\nfrom p"),
)
ORDERING_COLUMNS = (
    Column("T"),
    Column("drafts", "left", fold=True),
    Column("ordering", "left", fold=True),
    Column("difference"),
    Column("", "left"),
)


def report_replay(
    done: Sequence[DraftSetFigures],
    found: Sequence[Ordering],
    out: Path,
    *,
    baseline: str,
    confidence: float,
    manifests: Sequence[Mapping[str, Any]],
) -> None:
    """Print a replay's tables, and write ``replay.md``, ``.csv``, ``.json``, ``.png`` and a folder of pictures.

    Args:
        done: Figures of all drafts.
        found: The published orderings.
        out: The folder to write to.
        baseline: Name of the rule that gains are over.
        confidence: Level of the intervals.
        manifests: The manifests of the runs that were traced.
    """
    first = manifests[0]
    title = f"{first['target']['name']} ({first['dtype']}) on {first['device']}, {first['prompts']} prompts"
    notes = [CONTEXTS, *remarks(done)]
    rules, ordered = replay_table(done, title, confidence), ordering_table(found, confidence)
    out.mkdir(parents=True, exist_ok=True)
    console = terminal.console()
    for table in (rules, ordered) if found else (rules,):
        console.print(terminal.render(table, terminal.Frame.NARROW))
    terminal.say(console, *notes)
    commits = ", ".join(sorted({commit_of(manifest) for manifest in manifests}))
    pieces = [f"{title}; intervals at {confidence:.0%} over prompts.\n", markdown.render(_repeated(rules))]
    pieces += [markdown.render(ordered)] if found else []
    pieces += ["".join(f"- {note}\n" for note in notes), f"Drafts made at commit {commits}.\n"]
    content = {
        "title": title,
        "notes": notes,
        "drafts": [_plain(each) for each in done],
        "orderings": [asdict(each) for each in found],
    }
    contents = {
        "replay.md": "\n".join(pieces),
        "replay.csv": csv.render(_repeated(rules)),
        "replay.json": json.dumps(content, indent=2, ensure_ascii=False) + "\n",
    }
    for name, text in contents.items():
        (out / name).write_text(text, encoding="utf-8")
    pictures = [gain_plot(done, out / "replay.png", title, baseline=baseline)]
    (out / REACH).mkdir(exist_ok=True)
    for each in done:
        name = re.sub(r"[^\w.]+", "_", f"{each.label} T{each.drafts.temperature:g}").strip("_")
        pictures.append(reach_plot(each, out / REACH / f"{name}.png", title))
    terminal.list_written(console, [*(out / name for name in contents), *pictures])


def replay_table(done: Sequence[DraftSetFigures], title: str, confidence: float) -> Table:
    """A row per rule and drafts; temperature and drafts are named in the first row of theirs."""
    notes = [
        f"accepted per round: expected accepted tokens, intervals at {confidence:.0%} over prompts, differences paired",
        "TV; KL: how far the distribution of a round's first token is from p, for rules that are not exact",
    ]
    table = Table(COLUMNS, f"Rules on identical drafts: {title}", notes)
    for each in done:
        for index, row in enumerate(each.rows):
            head = (f"{each.drafts.temperature:g}", each.label) if index == 0 else ("", "")
            table.add(*head, *_rule_cells(row, each), end_section=index + 1 == len(each.rows))
    return table


def _repeated(table: Table) -> Table:
    """A copy that names temperature and drafts in every row, for media that draw no sections."""
    made = Table(table.columns, table.title, table.notes)
    head = table.rows[0][:2]
    for row in table.rows:
        head = row[:2] if row[0].text else head
        made.add(*head, *row[2:])
    return made


def _rule_cells(row: RuleFigures, each: DraftSetFigures) -> list[Cell | str]:
    distances = f"{number(row.distance_tv, 3)}; {number(row.distance_kl, 3)}"
    interval = row.accepted_interval
    return [
        Cell(row.label, emphasis=lossiness(row.exactness)),
        Cell(f"{row.accepted:.3f}", () if interval is None else (f"[{interval[0]:.2f}, {interval[1]:.2f}]",)),
        signed(row.gain, row.gain_interval),
        number(row.reach[0], 3) if row.reach else NOTHING,
        number(each.bound, 3),
        " ".join(f"{value:.2f}" for value in row.reach[1:]) or NOTHING,
        NOTHING if promises_exact(row.exactness) else distances,
    ]


def ordering_table(found: Sequence[Ordering], confidence: float) -> Table:
    """A row per published ordering and drafts."""
    notes = [f"differences of accepted tokens per round, paired, at {confidence:.0%}"]
    table = Table(ORDERING_COLUMNS, "Published orderings", notes)
    for each in found:
        verdict = Cell(each.verdict, emphasis=Emphasis.MISSED if each.verdict == "REVERSED" else Emphasis.NONE)
        table.add(f"{each.temperature:g}", each.drafts, each.name, signed(each.difference, each.interval), verdict)
    return table


def _plain(each: DraftSetFigures) -> dict[str, Any]:
    """Figures of some drafts, for ``replay.json``."""
    return {
        "drafts": each.label,
        "temperature": each.drafts.temperature,
        "folder": str(each.drafts.folder),
        "difference_to_log": each.error,
        "bound_at_1": each.bound,
        "bound_at_1_interval": each.bound_interval,
        "bound_by_depth": each.levels,
        "rules": [asdict(row) for row in each.rows],
        "refused": dict(each.refused),
    }


def remarks(done: Sequence[DraftSetFigures]) -> list[str]:
    """Sentences that a reader of the table needs: the bound's meaning, refusals, and the compression's effect."""
    notes = [
        "Bound: the largest probability with which a lossless rule can accept one of the root's sampled siblings "
        "(optimal transport), averaged over their draws. It is for the first position only. A rule's own figure is "
        "for the drafts that were drawn, and may lie above the bound by chance."
    ]
    refused: dict[tuple[str, str], dict[str, str]] = {}
    for each in done:
        for rule, reason in each.refused:
            # One sentence for all that differ in a row's number or a vocabulary's size.
            refused.setdefault((rule, re.sub(r"[\d,]+", "", reason)), {}).setdefault(each.label, reason)
    every = {each.label for each in done}
    for (rule, _), reasons in refused.items():
        where = "any of the drafts" if reasons.keys() == every else "; ".join(reasons)
        notes.append(f"Not asked: {rule}, about {where}: {next(iter(reasons.values()))}")
    errors = [each for each in done if each.error is not None]
    if errors:
        mean = max(errors, key=lambda each: abs(each.error[0]) if each.error else 0.0)
        row = max(errors, key=lambda each: each.error[1] if each.error else 0.0)
        assert mean.error is not None and row.error is not None
        notes.append(
            f"Effect of compression: asked again here, the rule that ran expects at most {mean.error[0]:+.1g} more "
            f"accepted tokens per round than when it ran ({mean.label}, T={mean.drafts.temperature:g}); "
            f"in a single round the difference is at most {row.error[1]:.1g}."
        )
    return notes
