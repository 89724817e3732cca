"""How much slower policies are than the best fixed length, by category."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from experiments.results import timing
from experiments.results.records import Record
from experiments.results.statistics import Bootstrap, Interval

if TYPE_CHECKING:
    from specdec.drafting.costs import RoundCosts

EVERYTHING = "all"
"""Stands for all categories."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """What a policy loses on a category.

    Attributes:
        category: The category, or ``EVERYTHING``.
        temperature: The requests'.
        policy: The policy's name.
        best: The fixed length that is fastest by the clock on this category.
        loss: The share by which the policy's tokens per second are lower; negative where it is faster.
        interval: Its interval over prompts, for this fixed length.
        modelled_best: The fixed length that is fastest by the costs of rounds.
        modelled_loss: The same share where every round takes the time that was measured for its depth, free of what
            else the machine did; None without such costs, or for a policy that does not draft by depth.
        mean_depth: How deep its drafts were.
    """

    category: str
    temperature: float
    policy: str
    best: str
    loss: float
    interval: Interval | None
    modelled_best: str | None
    modelled_loss: float | None
    mean_depth: float


def policy_losses(
    records: Sequence[Record],
    *,
    fixed: Sequence[str],
    by_depth: Sequence[str],
    others: Sequence[str],
    costs: "RoundCosts | None",
    rows: int,
    bootstrap: Bootstrap,
) -> list[PolicyLoss]:
    """Returns the losses by category, then those over all.

    The best fixed length is chosen on the very prompts that it is compared on, which no policy could do: of several
    lengths that are equally good, the luckiest wins. So the loss by the clock is rather too large.

    Args:
        records: Those of a run of all these methods.
        fixed: Methods of a fixed length.
        by_depth: Those, and policies, whose rounds cost what their depth says.
        others: The policies.
        costs: How long rounds take by depth; None if that was not measured.
        rows: The batch size.
        bootstrap: Settings of the intervals.
    """
    categories = sorted({record.category for record in records})
    groups = [(name, {name}) for name in categories if len(categories) > 1] + [(EVERYTHING, set(categories))]
    found = []
    for temperature in sorted({record.temperature for record in records}):
        for name, members in groups:
            of = {
                method: [
                    each
                    for each in records
                    if each.method == method and each.category in members and each.temperature == temperature
                ]
                for method in (*fixed, *others)
            }
            speeds = {method: timing.tokens_per_second(timing.timed_batches(of[method], None)) for method in fixed}
            known = {method: speed for method, speed in speeds.items() if speed}
            if not known:
                continue
            best = max(known, key=lambda method: known[method])
            modelled = {method: _modelled(of[method], costs, rows) for method in by_depth if method in of}
            fixed_modelled = {method: modelled[method] for method in fixed if modelled.get(method)}
            modelled_best = max(fixed_modelled, key=lambda m: fixed_modelled[m] or 0.0) if fixed_modelled else None
            for policy in others:
                timed = timing.timed_batches(of[policy], of[best])
                ratio = timing.speedup(timed)
                if ratio is None:
                    continue
                interval = timing.speedup_interval(timed, bootstrap)
                own, top = modelled.get(policy), fixed_modelled.get(modelled_best or "")
                depths = [depth for record in of[policy] for depth in record.proposed_depth]
                found.append(
                    PolicyLoss(
                        category=name,
                        temperature=temperature,
                        policy=policy,
                        best=best,
                        loss=1 - ratio,
                        interval=None if interval is None else (1 - interval[1], 1 - interval[0]),
                        modelled_best=modelled_best,
                        modelled_loss=1 - own / top if own and top else None,
                        mean_depth=float(np.mean(depths)) if depths else 0.0,
                    )
                )
    return found


def _modelled(records: Sequence[Record], costs: "RoundCosts | None", rows: int) -> float | None:
    """Returns the tokens per second of rounds that take what was measured for their depth."""
    depths = [depth for record in records if not record.failed for depth in record.proposed_depth]
    if costs is None or costs.nodes is not None or not depths or max(depths) > costs.max_depth:
        return None
    seconds = costs.seconds(rows, costs.max_depth)
    tokens = sum(len(record.token_ids) for record in records if not record.failed)
    return tokens / float(seconds[depths].sum())
