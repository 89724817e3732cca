"""Gives every method of a run its accountant, and the run the peaks that utilization is over."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from experiments.measuring.accounting import Accountant
from experiments.measuring.conditions import conditions_of
from experiments.measuring.measure import Contender
from experiments.measuring.peaks import brief_peaks, printed_peaks, quick_peaks
from experiments.session.pacing import policy_of
from specdec.drafting.costs import RoundCosts, check_conditions
from specdec.engine.engine import Engine
from specdec.physics.calibrated import CalibratedRounds
from specdec.target.target import Target


def accounted(
    contenders: Sequence[Contender], target: Target, costs: CalibratedRounds | None, path: str
) -> list[Contender]:
    """Returns the methods with what works out their calls; other engines than ours have none.

    Args:
        contenders: All methods, the baseline first.
        target: The target.
        costs: Calibrated costs.
        path: Their file, for the message.

    Raises:
        ValueError: The costs are of another device, dtype or model.
    """
    baseline = contenders[0].engine
    if costs is not None and isinstance(baseline, Engine):
        check_conditions(costs.conditions, conditions_of(target, baseline.runner), path, drafter=False)
    for each in contenders:
        _check_policy(each)
    return [
        replace(each, accountant=Accountant.of(each.engine, speculate=each.speculate, costs=costs))
        if isinstance(each.engine, Engine)
        else each
        for each in contenders
    ]


def _check_policy(contender: Contender) -> None:
    """Refuse a policy that would choose by calibrated costs of something else."""
    if not isinstance(contender.engine, Engine) or not contender.speculate:
        return
    engine, costs = contender.engine, getattr(policy_of(contender.engine.drafter), "costs", None)
    if isinstance(costs, RoundCosts) and costs.conditions is not None:
        check_conditions(
            costs.conditions, conditions_of(engine.target, engine.runner, engine.drafter), "the policy's file"
        )


def peaks_of(target: Target, wanted: str) -> Mapping[str, float] | None:
    """Returns what the target's device does at best, measured and printed; None if that is not wanted."""
    if wanted == "none":
        return None
    measured = quick_peaks(target.device, target.dtype, torch.get_num_threads())
    return {**measured.facts(), **printed_peaks(target.device, target.dtype)}


def better_peaks(before: Mapping[str, float], target: Target) -> Mapping[str, float]:
    """Returns the better of earlier peaks and new ones: a busy machine makes them lower, and nothing higher."""
    now = brief_peaks(target.device, target.dtype).facts()
    return {name: max(value, now.get(name, value)) for name, value in before.items()}
