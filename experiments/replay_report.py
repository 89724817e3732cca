"""The figures of a replay, and its tables."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from experiments.compare import commit_of
from experiments.orderings import Ordering
from experiments.report import NOTHING, number, with_interval
from experiments.scoring import Bound, Drafts, Score
from experiments.summary import Bootstrap
from specdec import stats
from specdec.stats import Interval

RAN = "as it ran"
"""Stands for the rule that ran, where it is asked again to see what compression does."""


@dataclass(frozen=True, kw_only=True)
class RuleFigures:
    """A rule on some drafts.

    Attributes:
        rule, exactness: Its name, and what it promises.
        accepted: Expected accepted tokens per round (the mean acceptance length is one more), and its interval.
        gain: That less the baseline's, on the same drafts, and its paired interval; None of the baseline itself.
        reach: Probability of accepting at least 1, 2, … tokens, among rounds that drafted as deep.
        divergence_tv, divergence_kl: As in ``MethodSummary``; None for an exact rule.
        rounds, prompts: How many.
    """

    rule: str
    exactness: str
    accepted: float
    accepted_interval: Interval | None
    gain: float | None
    gain_interval: Interval | None
    reach: tuple[float, ...]
    divergence_tv: float | None
    divergence_kl: float | None
    rounds: int
    prompts: int

    @property
    def label(self) -> str:
        """The rule's name with what it promises."""
        return f"{self.rule} ({self.exactness})"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All rules on some drafts.

    Attributes:
        drafts: The drafts.
        rows: Of the rules that were asked.
        refused: The others, and why.
        bound: Mean optimum of the root's siblings and its interval; None where it is not known or nothing was drawn.
        levels: The same by depth of the siblings, over all groups of a depth, however likely they are to be reached.
        error: What the rule that ran expects here less what it had expected when it ran, mean and largest.
    """

    drafts: Drafts
    rows: tuple[RuleFigures, ...]
    refused: tuple[tuple[str, str], ...]
    bound: float | None
    bound_interval: Interval | None
    levels: tuple[float | None, ...]
    error: tuple[float, float] | None

    @property
    def label(self) -> str:
        """Which drafts, in words."""
        laws = ", ".join(law.name.lower().replace("_", " ") for law in sorted(self.drafts.laws))
        settings = [part for part in self.drafts.settings if not part.startswith("drafter.sampling=")]
        return ", ".join([self.drafts.method, *settings, laws])


def figures(drafts: Drafts, scores: Sequence[Score], bound: Bound, *, baseline: str, bootstrap: Bootstrap) -> Figures:
    """From what the rules said of every row."""
    asked = {found.rule: found for found in scores if found.refused is None and found.rule != RAN}
    base = asked.get(baseline)
    drafted = bound.depth >= 1
    first, prompts = bound.first[drafted], [prompt for prompt, some in zip(bound.prompts, drafted, strict=True) if some]
    known = len(first) > 0 and not np.isnan(first).any()
    ran = next((found for found in scores if found.rule == RAN and found.refused is None), None)
    off = None if ran is None else ran.accepted - ran.logged
    return Figures(
        drafts=drafts,
        rows=tuple(_rule(found, base, bootstrap) for found in asked.values()),
        refused=tuple(
            (found.rule, found.refused) for found in scores if found.refused is not None and found.rule != RAN
        ),
        bound=float(first.mean()) if known else None,
        bound_interval=_interval(prompts, first, bootstrap) if known else None,
        levels=tuple(bound.levels),
        error=None if off is None else (float(off.mean()), float(np.abs(off).max())),
    )


def _rule(found: Score, base: Score | None, bootstrap: Bootstrap) -> RuleFigures:
    accepted = found.accepted
    gain = accepted - base.accepted if base is not None and base is not found else None
    reach = [
        float(found.reach[found.depth >= position, position - 1].mean())
        for position in range(1, found.reach.shape[1] + 1)
        if (found.depth >= position).any()
    ]
    return RuleFigures(
        rule=found.rule,
        exactness=found.exactness,
        accepted=float(accepted.mean()),
        accepted_interval=_interval(found.prompts, accepted, bootstrap),
        gain=None if gain is None else float(gain.mean()),
        gain_interval=None if gain is None else _interval(found.prompts, gain, bootstrap),
        reach=tuple(reach),
        divergence_tv=_mean(found.divergence_tv),
        divergence_kl=_mean(found.divergence_kl),
        rounds=len(accepted),
        prompts=len(set(found.prompts)),
    )


def _interval(prompts: Sequence[str], values: np.ndarray, bootstrap: Bootstrap) -> Interval | None:
    """Rounds of a prompt are no independent witnesses: prompts are resampled, with all of theirs."""
    names, which = np.unique(np.array(prompts), return_inverse=True)
    totals, counts = np.bincount(which, values, len(names)), np.bincount(which, minlength=len(names))
    return stats.bootstrap_interval(
        stats.ratio_of_sums,
        (totals, counts),
        confidence=bootstrap.confidence,
        resamples=bootstrap.resamples,
        seed=bootstrap.seed,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


COLUMNS = (
    "accepted\nper round",
    "over the\nbaseline",
    "at\nleast 1",
    "its\nbound",
    "at least\n2, 3, …",
    "TV; KL\nfrom p",
)


def cells(row: RuleFigures, each: Figures, between: str) -> list[str]:
    """A rule's figures; ``between`` stands between a value and its interval."""
    tv = NOTHING if row.exactness == "exact" else f"{number(row.divergence_tv, 3)}; {number(row.divergence_kl, 3)}"
    return [
        with_interval(f"{row.accepted:.3f}", row.accepted_interval).replace(" [", f"{between}["),
        NOTHING if row.gain is None else _signed(row.gain, row.gain_interval, between),
        number(row.reach[0], 3) if row.reach else NOTHING,
        number(each.bound, 3),
        " ".join(f"{value:.2f}" for value in row.reach[1:]) or NOTHING,
        tv,
    ]


def _signed(value: float, bounds: Interval | None, between: str) -> str:
    return f"{value:+.3f}" if bounds is None else f"{value:+.3f}{between}[{bounds[0]:+.3f}, {bounds[1]:+.3f}]"


def replay_table(done: Sequence[Figures], title: str, confidence: float) -> Table:
    """For the terminal: a row per rule and drafts."""
    caption = (
        f"accepted per round: expected accepted tokens, intervals at {confidence:.0%} over prompts, differences "
        f"paired; TV; KL: of the law of a round's first token from p, of rules that are not exact"
    )
    table = Table(title=f"Rules on identical drafts: {title}", caption=caption)
    table.title_justify = table.caption_justify = "left"
    table.box, table.padding = box.HORIZONTALS, (0, 1, 0, 0)
    table.add_column("T", justify="right")
    table.add_column("drafts", max_width=22, overflow="fold")
    table.add_column("rule (exactness)", overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for each in done:
        for index, row in enumerate(each.rows):
            head = (f"{each.drafts.temperature:g}", each.label) if index == 0 else ("", "")
            table.add_row(*head, row.label, *cells(row, each, "\n"), end_section=index + 1 == len(each.rows))
    return table


def ordering_table(found: Sequence[Ordering], confidence: float) -> Table:
    """For the terminal: a row per published ordering and drafts."""
    table = Table(title="Published orderings", caption=f"differences of accepted tokens, paired, at {confidence:.0%}")
    table.title_justify = table.caption_justify = "left"
    table.box, table.padding = box.HORIZONTALS, (0, 1, 0, 0)
    for name in ("T", "drafts", "ordering", "difference", ""):
        table.add_column(name, justify="right" if name in ("T", "difference") else "left")
    for each in found:
        table.add_row(*_ordering_cells(each))
    return table


def _ordering_cells(each: Ordering) -> list[str]:
    difference = _signed(each.difference, each.interval, " ")
    return [f"{each.temperature:g}", each.drafts, each.name, difference, each.verdict]


def write(
    out: Path,
    done: Sequence[Figures],
    found: Sequence[Ordering],
    title: str,
    notes: Sequence[str],
    confidence: float,
    manifests: Sequence[Mapping[str, Any]],
) -> list[Path]:
    """``replay.json`` and ``replay.md``."""
    written = [out / "replay.md", out / "replay.json"]
    header = ["T", "drafts", "rule (exactness)", *(" ".join(name.split("\n")) for name in COLUMNS)]
    lines = [
        f"{title}; intervals at {confidence:.0%} over prompts.",
        "",
        _line(header),
        "|---:|---|---|" + "---:|" * len(COLUMNS),
    ]
    for each in done:
        for row in each.rows:
            head = [f"{each.drafts.temperature:g}", each.label, row.label]
            lines.append(_line([*head, *cells(row, each, " ")]))
    if found:
        lines += ["", _line(["T", "drafts", "ordering", "difference", ""]), "|---:|---|---|---:|---|"]
        lines += [_line(_ordering_cells(each)) for each in found]
    lines += ["", *(f"- {note}" for note in notes)]
    commits = sorted({commit_of(manifest) for manifest in manifests})
    lines += ["", f"Drafts made at commit {', '.join(commits)}."]
    written[0].write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [
        {
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
        for each in done
    ]
    content = {"title": title, "notes": notes, "drafts": rows, "orderings": [asdict(each) for each in found]}
    written[1].write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return written


def _line(entries: Sequence[str]) -> str:
    return "| " + " | ".join(entries) + " |"
