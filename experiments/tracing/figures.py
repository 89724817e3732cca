"""The figures of a replay: what every rule expects on some drafts, and published orderings of rules, tested there."""

from collections.abc import Iterator, Sequence

import numpy as np

from experiments.results.rows import Row, ends
from experiments.results.statistics import (
    Bootstrap,
    Interval,
    difference_of_means,
    mean_of_all,
    ratio_of_sums,
    totals,
)
from experiments.tracing.draft_sets import DraftSet
from experiments.tracing.scoring import Bound, Score
from specdec.types import DraftSampling

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


PUBLISHED = (
    ("block", "rejection", True),  # Sun et al. 2024, theorem 2: on every chain
    ("traversal", "rejection", False),  # Weng et al. 2025: on trees
    ("kseq", "rejection", False),  # Sun et al. 2023: independent siblings
)
"""The rule that accepts more, the rule that accepts less, and whether this is for chains (else for trees)."""


def orderings(scores: Sequence[Score], bootstrap: Bootstrap) -> list[Row]:
    """Return every published ordering that these drafts can test. At temperature 0 all exact rules accept alike.

    Returns:
        Of each its ``name``, its ``drafts`` and their ``temperature``; the ``difference`` of the first rule's expected
        accepted tokens and the second one's, paired over prompts, and the ``verdict`` in words;
        ``on_same_drafts``: whether both rules were asked about the same drafts. Else each side has drafts and contexts
        of its own, on the same prompts.
    """
    found = [*_on_same_drafts(scores, bootstrap), *_without_replacement(scores, bootstrap)]
    return sorted(found, key=lambda row: (row["name"], row["temperature"], row["drafts"]))


def _on_same_drafts(scores: Sequence[Score], bootstrap: Bootstrap) -> Iterator[Row]:
    by_drafts: dict[int, dict[str, Score]] = {}
    for score in scores:
        if score.refused is None and score.drafts.temperature > 0:
            by_drafts.setdefault(id(score.drafts), {})[score.rule] = score
    for rules in by_drafts.values():
        for more, less, chains in PUBLISHED:
            if more not in rules or less not in rules:
                continue
            drafts = rules[more].drafts
            if drafts.is_chain is chains and DraftSampling.DETERMINISTIC not in drafts.laws:
                yield _ordering(f"{more} ≥ {less}", rules[more], rules[less], _name(drafts.settings), bootstrap, True)


def _without_replacement(scores: Sequence[Score], bootstrap: Bootstrap) -> Iterator[Row]:
    """Rejection and traversal sampling, siblings without replacement against with: each has drafts of its own."""
    sides: dict[tuple[str, tuple[str, ...], str, float], dict[DraftSampling, Score]] = {}
    for score in scores:
        drafts = score.drafts
        if score.refused is None and drafts.temperature > 0 and len(drafts.laws) == 1 and not drafts.is_chain:
            settings = tuple(part for part in drafts.settings if not part.startswith("drafter.sampling="))
            side = sides.setdefault((score.rule, settings, drafts.method, drafts.temperature), {})
            side[next(iter(drafts.laws))] = score
    for (rule, settings, *_), side in sides.items():
        more, less = side.get(DraftSampling.WITHOUT_REPLACEMENT), side.get(DraftSampling.IID)
        if rule in ("rejection", "traversal") and more is not None and less is not None:
            yield _ordering(f"{rule}: w/o ≥ with replacement", more, less, _name(settings), bootstrap, False)


def _name(settings: Sequence[str]) -> str:
    return ", ".join(settings) or "all"


def _ordering(name: str, more: Score, less: Score, drafts: str, bootstrap: Bootstrap, same: bool) -> Row:
    prompts = sorted(set(more.prompts) & set(less.prompts))
    columns = [
        totals(side.prompts, values, prompts)
        for side in (more, less)
        for values in (side.accepted, np.ones(len(side.prompts)))
    ]
    interval = bootstrap.interval(difference_of_means, columns)
    row = {"name": name, "drafts": drafts, "temperature": more.drafts.temperature}
    row |= {"difference": float(difference_of_means(*columns)), **ends("difference", interval)}
    return row | {"verdict": _verdict(interval), "on_same_drafts": same}


def _verdict(interval: Interval | None) -> str:
    if interval is None:
        return "one prompt: no interval"
    if interval[0] >= -1e-6:
        return "holds"
    return "REVERSED" if interval[1] < 0 else "undecided"
