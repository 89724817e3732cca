"""What policies lose against the best fixed length, and how well they predict what is accepted."""

from collections.abc import Mapping, Sequence

from experiments.reporting.cells import NOTHING, number
from experiments.reporting.table import Cell, Column, Emphasis, Table
from experiments.results.policy_losses import EVERYTHING, PolicyLoss
from specdec.drafting.calibration import Calibration

AIM = 0.02
"""The share of its speed that a policy may lose."""


def loss_table(losses: Sequence[PolicyLoss], confidence: float) -> Table | None:
    """A row per category and policy; None where nothing is compared."""
    if not losses:
        return None
    table = Table(
        [
            Column("category", "left"),
            Column("policy", "left"),
            Column("T"),
            Column("mean\ndepth"),
            Column("best\nfixed", "left"),
            Column("loss in\ntokens/s"),
            Column("best fixed\nby costs", "left"),
            Column("loss\nby costs"),
        ],
        f"Loss against the best fixed length [{confidence:.0%} interval]",
        [
            "below zero is a gain",
            "the best fixed length of a category is chosen afterwards, on its own prompts",
            "by costs: as if every round took the time that was measured for its depth before the run, so that nothing "
            "else on the machine counts (for policies that choose a depth before the round)",
            *_worst(losses),
        ],
    )
    for number_, each in enumerate(losses):
        last = number_ + 1 == len(losses) or losses[number_ + 1].category != each.category
        table.add(
            each.category,
            each.policy,
            f"{each.temperature:g}",
            number(each.mean_depth, 1),
            each.best,
            _share(each.loss, each.interval),
            each.modelled_best or NOTHING,
            NOTHING if each.modelled_loss is None else _share(each.modelled_loss, None),
            end_section=last,
        )
    return table


def calibration_table(calibrations: Mapping[str, Calibration]) -> Table | None:
    """A row per method, kind of requests and depth; None where nothing was predicted."""
    rows = [(method, each) for method, calibration in calibrations.items() for each in calibration.errors()]
    if not rows:
        return None
    table = Table(
        [
            Column("method", "left"),
            Column("requests", "left"),
            *(Column(name) for name in ("depth", "nodes", "predicted", "accepted", "calibration\nerror")),
        ],
        "Predicted and actual acceptance of the nodes that were verified",
        ["predictions were made before the round, while the calibration was still learning"],
    )
    for method, each in rows:
        table.add(
            method,
            each["requests"],
            str(each["depth"]),
            str(each["nodes"]),
            *(f"{each[name]:.3f}" for name in ("predicted", "accepted", "calibration_error")),
        )
    return table


def _worst(losses: Sequence[PolicyLoss]) -> list[str]:
    """A sentence per policy: the most that it loses on any category."""
    said = []
    for policy in dict.fromkeys(each.policy for each in losses):
        mine = [each for each in losses if each.policy == policy]
        some = [each for each in mine if each.category != EVERYTHING] or mine
        clock = max(some, key=lambda each: each.loss)
        sentence = f"{policy} loses at most {clock.loss:.1%} by the clock ({clock.category})"
        known = [each for each in some if each.modelled_loss is not None]
        if known:
            by_costs = max(known, key=lambda each: each.modelled_loss or 0.0)
            sentence += f", and {by_costs.modelled_loss:.1%} by the costs of rounds ({by_costs.category})"
        said.append(sentence)
    return said


def _share(value: float, bounds: tuple[float, float] | None) -> Cell:
    more = () if bounds is None else (f"[{bounds[0]:+.1%}, {bounds[1]:+.1%}]",)
    return Cell(f"{value:+.1%}", more, emphasis=Emphasis.MISSED if value > AIM else Emphasis.NONE)
