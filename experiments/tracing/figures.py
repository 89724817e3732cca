"""The figures of a replay: what every rule expects on some drafts, with intervals over prompts."""

from collections.abc import Sequence

import numpy as np

from experiments.results.frame import Figures
from experiments.results.statistics import Bootstrap, Interval, mean_of_all, ratio_of_sums, totals
from experiments.tracing.draft_sets import DraftSet
from experiments.tracing.scoring import Bound, Score

RAN = "as it ran"
"""Name of the rule that ran: it is asked again, to see how much the trace's compression changes."""


def figures(drafts: DraftSet, scores: Sequence[Score], bound: Bound, *, baseline: str, bootstrap: Bootstrap) -> Figures:
    """Return the figures of some drafts from the rules' scores.

    Args:
        baseline: Name of the rule that gains are over.

    Returns:
        ``drafts`` (which they are, in words), their ``temperature`` and the ``folder`` of their run.
        ``difference_to_log``: by how much the rule that ran expects more here than it did when it ran: the mean, and
        the largest difference in a single round. ``bound_at_1``: the best acceptance of the root's siblings that any
        lossless rule can have, and its interval; None where it is not known or nothing was drawn. ``bound_by_depth``:
        the same by depth of the siblings; all siblings count alike, however likely they are to be reached. ``rules``:
        see ``_rule``. ``refused``: the other rules, and why they were not asked.
    """
    asked = {found.rule: found for found in scores if found.refused is None and found.rule != RAN}
    base = asked.get(baseline)
    drafted = bound.depth >= 1
    first, prompts = bound.first[drafted], [prompt for prompt, some in zip(bound.prompts, drafted, strict=True) if some]
    known = len(first) > 0 and not np.isnan(first).any()
    ran = next((found for found in scores if found.rule == RAN and found.refused is None), None)
    off = None if ran is None else ran.accepted - ran.logged
    return Figures(
        drafts=drafts.label,
        temperature=drafts.temperature,
        folder=str(drafts.folder),
        difference_to_log=None if off is None else (float(off.mean()), float(np.abs(off).max())),
        bound_at_1=float(first.mean()) if known else None,
        bound_at_1_interval=_interval(prompts, first, bootstrap) if known else None,
        bound_by_depth=bound.levels,
        rules=[_rule(found, base, bootstrap) for found in asked.values()],
        refused={each.rule: each.refused for each in scores if each.refused is not None and each.rule != RAN},
    )


def _rule(found: Score, base: Score | None, bootstrap: Bootstrap) -> Figures:
    """Return a rule's figures.

    Returns:
        ``rule`` and ``exactness``: its name, and what it promises. ``accepted``: expected accepted tokens per round
        (the mean acceptance length is one more). ``gain``: the same less the baseline's on the same drafts, and the
        paired interval; None for the baseline itself. ``reach``: probability of accepting at least 1, 2, … tokens,
        among rounds that drafted as deep. ``distance_tv``, ``distance_kl``: of a rule that may not be exact, as in a
        run's summary. ``rounds``, ``prompts``: how many.
    """
    accepted = found.accepted
    gain = accepted - base.accepted if base is not None and base is not found else None
    reach = [
        float(found.reach[found.depth >= position, position - 1].mean())
        for position in range(1, found.reach.shape[1] + 1)
        if (found.depth >= position).any()
    ]
    return Figures(
        rule=found.rule,
        exactness=found.exactness,
        accepted=float(accepted.mean()),
        accepted_interval=_interval(found.prompts, accepted, bootstrap),
        gain=None if gain is None else float(gain.mean()),
        gain_interval=None if gain is None else _interval(found.prompts, gain, bootstrap),
        reach=reach,
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
