"""How much slower policies are than the best fixed length, by category."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from experiments.results import timing
from experiments.results.frame import Frame, Outputs, frame_of
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
    outputs: Outputs,
    *,
    fixed: Sequence[str],
    by_depth: Sequence[str],
    others: Sequence[str],
    costs: "RoundCosts | None",
    rows: int,
    bootstrap: Bootstrap,
) -> list[PolicyLoss]:
    """Return the losses by category, then those over all.

    The best fixed length is chosen on the very prompts that it is compared on, which no policy could do: of several
    lengths that are equally good, the luckiest wins. So the loss by the clock is rather too large.

    Args:
        outputs: Those of a run of all these methods.
        fixed: Methods of a fixed length.
        by_depth: Those, and policies, whose rounds cost what their depth says.
        others: The policies.
        costs: How long rounds take by depth; None if that was not measured.
        rows: The batch size.
        bootstrap: Settings of the intervals.
    """
    frame = frame_of(outputs)
    categories = sorted(set(frame.category))
    found = []
    for temperature in sorted(set(frame.temperature)):
        for category in [*(categories if len(categories) > 1 else []), EVERYTHING]:
            members = categories if category == EVERYTHING else [category]
            chosen = frame[(frame.temperature == temperature) & frame.category.isin(members)]
            of = {method: chosen[chosen.method == method] for method in (*fixed, *others)}
            speeds = {method: timing.tokens_per_second(timing.timed_calls(of[method], None)) for method in fixed}
            best = max(speeds, key=lambda method: speeds[method] or 0.0, default=None)
            if best is None or not speeds[best]:
                continue
            modelled = {method: _modelled(of[method], costs, rows) for method in by_depth if method in of}
            modelled = {method: speed for method, speed in modelled.items() if speed}
            modelled_best = max((m for m in fixed if m in modelled), key=lambda m: modelled[m] or 0.0, default=None)
            for policy in others:
                timed = timing.timed_calls(of[policy], of[best])
                ratio, interval = timing.speedup(timed), timing.speedup_interval(timed, bootstrap)
                if ratio is None:
                    continue
                own, top = modelled.get(policy), modelled.get(modelled_best or "")
                depths = _depths(of[policy])
                found.append(
                    PolicyLoss(
                        category=category,
                        temperature=float(temperature),
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


def _depths(own: Frame) -> list[int]:
    return [depth for depths in own.proposed_depth for depth in depths]


def _modelled(own: Frame, costs: "RoundCosts | None", rows: int) -> float | None:
    """Return the tokens per second of rounds that take what was measured for their depth."""
    good = own[~own.failed]
    depths = _depths(good)
    if costs is None or costs.nodes is not None or not depths or max(depths) > costs.max_depth:
        return None
    seconds = costs.seconds(rows, costs.max_depth)
    return float(good.tokens.sum()) / float(seconds[depths].sum())
