"""The figures of a replay: what every rule expects on some drafts, with intervals over prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.results.statistics import Bootstrap, Interval, mean_of_all, ratio_of_sums, totals
from experiments.tracing.draft_sets import DraftSet
from experiments.tracing.scoring import Bound, Score

RAN = "as it ran"
"""Name of the rule that ran: it is asked again, to see how much the trace's compression changes."""


@dataclass(frozen=True, kw_only=True)
class RuleFigures:
    """A rule on some drafts.

    Attributes:
        rule, exactness: Its name, and what it promises.
        accepted: Expected accepted tokens per round (the mean acceptance length is one more), and its interval.
        gain: The baseline's subtracted, on the same drafts, and the paired interval; None for the baseline itself.
        reach: Probability of accepting at least 1, 2, … tokens, among rounds that drafted as deep.
        distance_tv, distance_kl: As in ``MethodSummary``; None for an exact rule.
        rounds, prompts: How many.
    """

    rule: str
    exactness: str
    accepted: float
    accepted_interval: Interval | None
    gain: float | None
    gain_interval: Interval | None
    reach: tuple[float, ...]
    distance_tv: float | None
    distance_kl: float | None
    rounds: int
    prompts: int

    @property
    def label(self) -> str:
        """The rule's name with what it promises."""
        return f"{self.rule} ({self.exactness})"


@dataclass(frozen=True, kw_only=True)
class DraftSetFigures:
    """All rules on some drafts.

    Attributes:
        drafts: The drafts.
        rows: Figures of the rules that were asked.
        refused: The other rules, and why they were not asked.
        bound: The best acceptance of the root's siblings that any lossless rule can have, mean and interval; None
            where it is not known or nothing was drawn.
        levels: The same by depth of the siblings. All siblings count alike, however likely they are to be reached.
        error: By how much the rule that ran expects more here than it did when it ran: the mean, and the largest
            difference in a single round.
    """

    drafts: DraftSet
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


def figures(
    drafts: DraftSet, scores: Sequence[Score], bound: Bound, *, baseline: str, bootstrap: Bootstrap
) -> DraftSetFigures:
    """Compute the figures from the rules' scores.

    Args:
        baseline: Name of the rule that gains are over.
    """
    asked = {found.rule: found for found in scores if found.refused is None and found.rule != RAN}
    base = asked.get(baseline)
    drafted = bound.depth >= 1
    first, prompts = bound.first[drafted], [prompt for prompt, some in zip(bound.prompts, drafted, strict=True) if some]
    known = len(first) > 0 and not np.isnan(first).any()
    ran = next((found for found in scores if found.rule == RAN and found.refused is None), None)
    off = None if ran is None else ran.accepted - ran.logged
    return DraftSetFigures(
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
        distance_tv=mean_of_all(found.distance_tv),
        distance_kl=mean_of_all(found.distance_kl),
        rounds=len(accepted),
        prompts=len(set(found.prompts)),
    )


def _interval(prompts: Sequence[str], values: np.ndarray, bootstrap: Bootstrap) -> Interval | None:
    """The interval of a mean over rounds, which depend on each other within a prompt."""
    order = sorted(set(prompts))
    columns = [totals(prompts, column, order) for column in (values, np.ones(len(values)))]
    return bootstrap.interval(ratio_of_sums, columns)
