"""Which rule accepts more: published orderings of rules, tested on one's own drafts."""

from collections.abc import Iterator, Sequence

import numpy as np

from experiments.results.rows import Row, ends
from experiments.results.statistics import Bootstrap, Interval, difference_of_means, totals
from experiments.tracing.scoring import Score
from specdec.types import DraftSampling

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
