"""The report of a replay: its tables, its remarks, its pictures, and the files that it leaves."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reporting import style
from experiments.reporting.columns import NOTHING, between, lossiness, number, signed
from experiments.reporting.formats import document, publish
from experiments.reporting.table import Cell, Column, Emphasis, Table, left
from experiments.results.comparison import commit_of
from experiments.results.frame import Figures
from experiments.results.lossless import promises_exact

CONTEXTS = (
    "One-round expectations on identical contexts: those that the rule which ran has led to. Another rule would have "
    "met other contexts."
)
_SAME = 0.005
"""A smaller gain would not be seen in the figures."""


def report_replay(
    done: Sequence[Figures],
    found: Sequence[Figures],
    out: Path,
    *,
    baseline: str,
    confidence: float,
    manifests: Sequence[Mapping[str, Any]],
) -> None:
    """Print a replay's tables, and write ``replay.md``, ``.csv``, ``.json`` and ``.png``."""
    first = manifests[0]
    title = f"{first['target']['name']} ({first['dtype']}) on {first['device']}, {first['prompts']} prompts"
    notes = [CONTEXTS, *remarks(done)]
    rules, named = (replay_table(done, title, confidence, every_row=each) for each in (False, True))
    ordered = [ordering_table(found, confidence)] if found else []
    commits = ", ".join(sorted({commit_of(manifest) for manifest in manifests}))
    about = f"{title}; intervals at {confidence:.0%} over prompts."

    publish(
        out,
        "replay",
        tables=[rules, *ordered],
        document=document(about, named, *ordered, notes, f"Drafts made at commit {commits}."),
        figures={"title": title, "notes": notes, "drafts": done, "orderings": found},
        said=notes,
        more={"replay.csv": named.csv()},
        drawn=lambda: [gain_plot(done, out / "replay.png", title, baseline=baseline)],
    )


def replay_table(done: Sequence[Figures], title: str, confidence: float, *, every_row: bool = False) -> Table:
    """A row per rule and drafts.

    With ``every_row`` temperature and drafts stand in every row, for media that draw no sections.
    """
    notes = [
        f"accepted per round: expected accepted tokens, intervals at {confidence:.0%} over prompts, differences paired",
        "TV; KL: how far the distribution of a round's first token is from p, for rules not known to be exact",
    ]
    columns = [
        Column("T"),
        left("drafts", fold=True, min_width=13, max_width=22),
        left("rule (exactness)", fold=True, min_width=16),
        *map(Column, ("accepted\nper round", "over the\nbaseline", "at\nleast 1", "its\nbound")),
        Column("at least\n2, 3, …", fold=True, max_width=19),
        Column("TV; KL\nfrom p"),
    ]
    table = Table(columns, f"Rules on identical drafts: {title}", notes)
    for each in done:
        for index, row in enumerate(each.rules):
            head = (f"{each.temperature:g}", each.drafts) if index == 0 or every_row else ("", "")
            distances = f"{number(row.distance_tv, 3)}; {number(row.distance_kl, 3)}"
            table.add(
                *head,
                Cell(f"{row.rule} ({row.exactness})", emphasis=lossiness(row.exactness)),
                Cell(f"{row.accepted:.3f}", between(row.accepted_interval)),
                signed(row.gain, row.gain_interval),
                number(row.reach[0], 3) if row.reach else NOTHING,
                number(each.bound_at_1, 3),
                " ".join(f"{value:.2f}" for value in row.reach[1:]) or NOTHING,
                NOTHING if row.distance_tv is None else distances,
                end_section=index + 1 == len(each.rules),
            )
    return table


def ordering_table(found: Sequence[Figures], confidence: float) -> Table:
    """A row per published ordering and drafts."""

    def verdict(each: Figures) -> Cell:
        return Cell(each.verdict, emphasis=Emphasis.MISSED if each.verdict == "REVERSED" else Emphasis.NONE)

    return Table.of(
        found,
        [
            ("T", lambda each: f"{each.temperature:g}"),
            (left("drafts", fold=True), lambda each: each.drafts),
            (left("ordering", fold=True), lambda each: each.name),
            ("difference", lambda each: signed(each.difference, each.interval)),
            (left(""), verdict),
        ],
        title="Published orderings",
        notes=[f"differences of accepted tokens per round, paired, at {confidence:.0%}"],
    )


def remarks(done: Sequence[Figures]) -> list[str]:
    """Sentences that a reader of the table needs: the bound's meaning, refusals, and the compression's effect."""
    notes = [
        "Bound: the largest probability with which a lossless rule can accept one of the root's sampled siblings "
        "(optimal transport), averaged over their draws. It is for the first position only. A rule's own figure is "
        "for the drafts that were drawn, and may lie above the bound by chance."
    ]
    refused: dict[tuple[str, str], dict[str, str]] = {}
    for each in done:
        for rule, reason in each.refused.items():
            # One sentence for all that differ in a row's number or a vocabulary's size.
            refused.setdefault((rule, re.sub(r"[\d,]+", "", reason)), {}).setdefault(each.drafts, reason)
    every = {each.drafts for each in done}
    for (rule, _), reasons in refused.items():
        where = "any of the drafts" if reasons.keys() == every else "; ".join(reasons)
        notes.append(f"Not asked: {rule}, about {where}: {next(iter(reasons.values()))}")
    errors = [(each.difference_to_log, each) for each in done if each.difference_to_log is not None]
    if errors:
        (mean, _), where = max(errors, key=lambda found: abs(found[0][0]))
        notes.append(
            f"Effect of compression: asked again here, the rule that ran expects at most {mean:+.1g} more "
            f"accepted tokens per round than when it ran ({where.drafts}, T={where.temperature:g}); "
            f"in a single round the difference is at most {max(error[1] for error, _ in errors):.1g}."
        )
    return notes


@style.styled()
def gain_plot(done: Sequence[Figures], path: Path, subtitle: str, *, baseline: str) -> Path:
    """Expected accepted tokens per round: a cell per rule and drafts, a block per temperature.

    The colour of an exact rule's cell is its gain over the baseline on the same drafts, starred where the paired
    interval excludes zero. Gains and losses have scales of their own, each to its largest value, so that a rule far
    below the baseline leaves colours for the differences among the good ones. Rules that are not exact stand below,
    without a colour: what they accept does not compare.
    """
    from matplotlib.colors import TwoSlopeNorm

    temperatures = sorted({each.temperature for each in done})
    kinds = list(dict.fromkeys(each.drafts for each in done))
    rules = list(dict.fromkeys((row.rule, row.exactness) for each in done for row in each.rules))
    rules.sort(key=lambda rule: not promises_exact(rule[1]))  # stable: the others keep their order
    gains = [row.gain for each in done for row in each.rules if row.gain is not None and promises_exact(row.exactness)]
    norm = TwoSlopeNorm(0.0, vmin=min([-0.01, *gains]), vmax=max([0.01, *gains]))
    figure = style.new_figure(style.PAGE, 1.25 + (0.25 + 0.19 * len(rules)) * len(temperatures))
    panels = figure.subplots(len(temperatures), 1, sharex=True, squeeze=False)[:, 0]
    lossy = sum(not promises_exact(kind) for _, kind in rules)
    for panel, temperature in zip(panels, temperatures, strict=True):
        values = [[np.nan] * len(kinds) for _ in rules]
        texts = {(y, x): "-" for y in range(len(rules)) for x in range(len(kinds))}
        for each in (each for each in done if each.temperature == temperature):
            for row in each.rules:
                at = (rules.index((row.rule, row.exactness)), kinds.index(each.drafts))
                exact = promises_exact(row.exactness)
                if exact:
                    values[at[0]][at[1]] = row.gain or 0.0
                texts[at] = f"{row.accepted:.2f}{'*' if exact and _sure(row) else ''}"
        image = style.matrix(panel, values, texts, norm, "PuOr")
        panel.set_yticks(range(len(rules)), [rule if kind == "exact" else f"{rule} ({kind})" for rule, kind in rules])
        panel.set_ylabel(f"T = {temperature:g}")
        if 0 < lossy < len(rules):
            panel.axhline(len(rules) - lossy - 0.5, color="black", linewidth=1)
    panels[-1].set_xticks(range(len(kinds)), _short(kinds))
    bar = figure.colorbar(image, ax=list(panels), shrink=0.6, pad=0.01)
    bar.set_label(f"gain over {baseline}\n(accepted tokens per round)")
    about = f"one-round expectations on identical contexts; * the interval of the gain excludes zero; {subtitle}"
    return style.finish(figure, path, "Expected accepted tokens per round, by rule and drafts", about)


def _sure(row: Figures) -> bool:
    """Whether a rule's gain is beyond chance, and large enough to be seen in the figures."""
    interval = row.gain_interval
    return interval is not None and not interval[0] <= 0 <= interval[1] and abs(row.gain or 0.0) >= _SAME


def _short(kinds: Sequence[str]) -> list[str]:
    """The parts that tell the drafts apart, a line each; the method only where it differs."""
    parts = [kind.replace("drafter.shape=", "").replace("t replacement", "t\nreplacement") for kind in kinds]
    several = len({part.partition(", ")[0] for part in parts}) > 1
    shown = parts if several else [part.partition(", ")[2] or part for part in parts]
    return [part.replace(", ", "\n") for part in shown]
