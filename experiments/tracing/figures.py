"""The figures of a replay: what every rule expects on some drafts, with intervals over prompts."""

from collections.abc import Sequence

import numpy as np

from experiments.results.rows import Row, ends
from experiments.results.statistics import Bootstrap, Interval, mean_of_all, ratio_of_sums
from experiments.tracing.draft_sets import DraftSet
from experiments.tracing.scoring import Bound, Score

RAN = "as it ran"
"""Name of the rule that ran: it is asked again, to see how much the trace's compression changes."""


def figures(
    drafts: DraftSet, scores: Sequence[Score], bound: Bound, *, baseline: str, bootstrap: Bootstrap
) -> list[Row]:
    """Return a row per rule from the rules' scores of some drafts.

    Args:
        baseline: Name of the rule that gains are over.

    Returns:
        ``drafts`` (which they are, in words), their ``temperature`` and the ``folder`` of their run.
        ``log_error``, ``log_error_most``: by how much the rule that ran expects more here than it did when it ran, on
        average and in a single round. ``bound``: the best acceptance of the root's siblings that any lossless rule can
        have; None where it is not known or nothing was drawn. ``bound_at.2``: the same by depth of the siblings; all
        siblings count alike, however likely they are to be reached.

        ``rule`` and ``exactness``: its name, and what it promises; ``refused``, why it was not asked. ``accepted``:
        expected accepted tokens per round (the mean acceptance length is one more). ``gain``: the same less the
        baseline's on the same drafts, paired; None for the baseline itself. ``reach.1``: probability of accepting at
        least 1, 2, … tokens, among rounds that drafted as deep. ``distance_tv``, ``distance_kl``: of a rule that may
        not be exact, as in a run's summary. ``rounds``, ``prompts``: how many.
    """
    drafted = bound.depth >= 1
    first, prompts = bound.first[drafted], [prompt for prompt, some in zip(bound.prompts, drafted, strict=True) if some]
    known = len(first) > 0 and not np.isnan(first).any()
    ran = next((found for found in scores if found.rule == RAN and found.refused is None), None)
    off = None if ran is None else ran.accepted - ran.logged
    shared: Row = {
        "drafts": drafts.label,
        "temperature": drafts.temperature,
        "folder": str(drafts.folder),
        "log_error": None if off is None else float(off.mean()),
        "log_error_most": None if off is None else float(np.abs(off).max()),
        "bound": float(first.mean()) if known else None,
        **ends("bound", _interval(prompts, first, bootstrap) if known else None),
        **{f"bound_at.{depth}": value for depth, value in enumerate(bound.levels, start=1)},
    }
    asked = [score for score in scores if score.rule != RAN]
    base = next((score for score in asked if score.rule == baseline and score.refused is None), None)
    return [shared | _rule(score, base, bootstrap) for score in asked]


def _rule(score: Score, base: Score | None, bootstrap: Bootstrap) -> Row:
    named: Row = {"rule": score.rule, "exactness": score.exactness, "refused": score.refused}
    if score.refused is not None:
        return named
    accepted = score.accepted
    gain = accepted - base.accepted if base is not None and base is not score else None
    deep = {place: score.depth >= place for place in range(1, score.reach.shape[1] + 1)}
    return {
        **named,
        "accepted": float(accepted.mean()),
        **ends("accepted", _interval(score.prompts, accepted, bootstrap)),
        "gain": None if gain is None else float(gain.mean()),
        **ends("gain", None if gain is None else _interval(score.prompts, gain, bootstrap)),
        **{f"reach.{n}": float(score.reach[rounds, n - 1].mean()) for n, rounds in deep.items() if rounds.any()},
        "distance_tv": mean_of_all(score.distance_tv),
        "distance_kl": mean_of_all(score.distance_kl),
        "rounds": len(accepted),
        "prompts": len(set(score.prompts)),
    }


def _interval(prompts: Sequence[str], values: np.ndarray, bootstrap: Bootstrap) -> Interval | None:
    """The interval of a mean over rounds, which depend on each other within a prompt."""
    return bootstrap.over_prompts(ratio_of_sums, prompts, [values, np.ones(len(values))])
