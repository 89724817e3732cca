"""The report of a replay: its tables, its remarks, its pictures, and the files that it leaves."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

from experiments.reporting.columns import T, lossiness
from experiments.reporting.formats import csv_text, document, publish
from experiments.reporting.studies.two_way import Shade, heat_map
from experiments.reporting.table import NOTHING, Cell, Col, Table, words
from experiments.results.comparison import Grid, commit_of
from experiments.results.lossless import promises_exact
from experiments.results.rows import Row, family

CONTEXTS = (
    "One-round expectations on identical contexts: those that the rule which ran has led to. Another rule would have "
    "met other contexts."
)
_SAME = 0.005
"""A smaller gain would not be seen in the figures."""
BOUND = (
    "Bound: the largest probability with which a lossless rule can accept one of the root's sampled siblings (optimal "
    "transport), averaged over their draws. It is for the first position only. A rule's own figure is for the drafts "
    "that were drawn, and may lie above the bound by chance."
)


def report_replay(
    done: Sequence[Row], out: Path, *, baseline: str, confidence: float, manifests: Sequence[Mapping[str, Any]]
) -> None:
    """Print a replay's tables, and write ``replay.md``, ``.csv``, ``.json`` and ``.png``."""
    first = manifests[0]
    title = f"{first['target']['name']} ({first['dtype']}) on {first['device']}, {first['prompts']} prompts"
    notes, asked = [CONTEXTS, BOUND, *remarks(done)], [row for row in done if row["refused"] is None]
    table = replay_table(asked, title, confidence)
    commits = ", ".join(sorted({commit_of(manifest) for manifest in manifests}))
    about = f"{title}; intervals at {confidence:.0%} over prompts."
    publish(
        out,
        "replay",
        tables=[table],
        document=document(about, table, notes, f"Drafts made at commit {commits}."),
        figures={"title": title, "notes": notes, "rows": done},
        said=notes,
        more={"replay.csv": csv_text(pandas.DataFrame(asked))},
        drawn=lambda: [gain_plot(asked, out / "replay.png", title, baseline=baseline)],
    )


def replay_table(rows: Sequence[Row], title: str, confidence: float) -> Table:
    """A row per rule and drafts."""

    def rule(row: Row) -> Cell:
        return Cell(f"{row['rule']} ({row['exactness']})", emphasis=lossiness(row["exactness"]))

    def deeper(row: Row) -> str:
        return " ".join(f"{value:.2f}" for value in list(family(row, "reach").values())[1:]) or NOTHING

    columns = [
        *(T, words("drafts", "drafts", min_width=13), words("rule (exactness)", rule, min_width=16)),
        *(Col("accepted\nper round", "accepted", ".3f"), Col("over the\nbaseline", "gain", "+.3f")),
        *(Col("at\nleast 1", "reach.1", ".3f"), Col("its\nbound", "bound", ".3f", bounds=False)),
        *(Col("at least\n2, 3, …", deeper), Col("TV; KL\nfrom p", "distance_tv", ".3f", also="distance_kl")),
    ]
    notes = [
        f"accepted per round: expected; intervals at {confidence:.0%} over prompts, differences paired",
        "TV; KL: how far the distribution of a round's first token is from p, for rules not known to be exact",
    ]
    title = f"Rules on identical drafts: {title}"
    return Table.of(rows, columns, title=title, notes=notes, section=lambda row: (row["temperature"], row["drafts"]))


def remarks(done: Sequence[Row]) -> list[str]:
    """Sentences that a reader of the table needs: refusals, and the compression's effect."""
    notes = []
    refused: dict[tuple[str, str], dict[str, str]] = {}
    for row in done:
        if row["refused"] is not None:  # one sentence for all that differ in a row's number or a vocabulary's size
            kind = re.sub(r"[\d,]+", "", row["refused"])
            refused.setdefault((row["rule"], kind), {}).setdefault(row["drafts"], row["refused"])
    for (rule, _), reasons in refused.items():
        everywhere = reasons.keys() == {row["drafts"] for row in done}
        where = "any of the drafts" if everywhere else "; ".join(reasons)
        notes.append(f"Not asked: {rule}, about {where}: {next(iter(reasons.values()))}")
    known = [row for row in done if row["log_error"] is not None]
    if known:
        worst = max(known, key=lambda row: abs(row["log_error"]))
        notes.append(
            f"Effect of compression: asked again here, the rule that ran expects at most {worst['log_error']:+.1g} "
            f"more accepted tokens per round than when it ran ({worst['drafts']}, T={worst['temperature']:g}); "
            f"in a single round the difference is at most {max(row['log_error_most'] for row in known):.1g}."
        )
    return notes


def gain_plot(rows: Sequence[Row], path: Path, subtitle: str, *, baseline: str) -> Path:
    """Expected accepted tokens per round: a cell per rule and drafts, a panel per temperature.

    The colour of an exact rule's cell is its gain over the baseline on the same drafts, starred where the paired
    interval excludes zero. Rules that are not exact have no colour: what they accept does not compare.
    """
    cells: dict[float, dict[tuple[str, str], Row]] = {}
    for row in sorted(rows, key=lambda row: (row["temperature"], not promises_exact(row["exactness"]))):
        exact, gain = promises_exact(row["exactness"]), row["gain"] or 0.0
        sure = exact and (row["gain_low"] or 0.0) * (row["gain_high"] or 0.0) > 0 and abs(gain) >= _SAME
        place = row["rule"] if exact else f"{row['rule']} (not exact)", row["drafts"].replace("drafter.shape=", "")
        shown = {"gain": gain if exact else None, "text": f"{row['accepted']:.2f}{'*' if sure else ''}"}
        cells.setdefault(row["temperature"], {})[place] = row | shown
    names, drafts = (
        tuple(dict.fromkeys(parts)) for parts in zip(*(p for of in cells.values() for p in of), strict=True)
    )
    listed = [Grid("rule", "drafts", names, drafts, {"T": f"{at:g}"}, of) for at, of in cells.items()]
    label = f"gain over {baseline} (accepted tokens per round); 0 is white"
    shade = Shade("gain", label, lambda row: row["text"], middle=0.0)
    about = f"one-round expectations on identical contexts; * the interval of the gain excludes zero; {subtitle}"
    return heat_map(listed, path, "Expected accepted tokens per round, by rule and drafts", about, [shade])
