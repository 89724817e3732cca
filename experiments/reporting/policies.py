"""What policies lose against the best fixed length, and how well they predict what is accepted."""

from collections.abc import Mapping, Sequence

from experiments.reporting.cells import NOTHING, between, number
from experiments.reporting.table import Cell, Emphasis, Table, left
from experiments.results.policy_losses import EVERYTHING, PolicyLoss
from experiments.results.statistics import Interval
from specdec.drafting.calibration import Calibration

AIM = 0.02
"""The share of its speed that a policy may lose."""


def loss_table(losses: Sequence[PolicyLoss], confidence: float) -> Table | None:
    """A row per category and policy; None where nothing is compared."""
    if not losses:
        return None
    return Table.of(
        losses,
        [
            (left("category"), lambda each: each.category),
            (left("policy"), lambda each: each.policy),
            ("T", lambda each: f"{each.temperature:g}"),
            ("mean\ndepth", lambda each: number(each.mean_depth, 1)),
            (left("best\nfixed"), lambda each: each.best),
            ("loss in\ntokens/s", lambda each: _share(each.loss, each.interval)),
            (left("best fixed\nby costs"), lambda each: each.modelled_best or NOTHING),
            ("loss\nby costs", lambda each: _share(each.modelled_loss, None)),
        ],
        title=f"Loss against the best fixed length [{confidence:.0%} interval]",
        notes=[
            "below zero is a gain",
            "the best fixed length of a category is chosen afterwards, on its own prompts",
            "by costs: as if every round took the time that was measured for its depth before the run, so that nothing "
            "else on the machine counts (for policies that choose a depth before the round)",
            *_worst(losses),
        ],
        section=lambda each: each.category,
    )


def calibration_table(calibrations: Mapping[str, Calibration]) -> Table | None:
    """A row per method, kind of requests and depth; None where nothing was predicted."""
    rows = [(method, each) for method, calibration in calibrations.items() for each in calibration.errors()]
    if not rows:
        return None
    return Table.of(
        rows,
        [
            (left("method"), lambda row: row[0]),
            (left("requests"), lambda row: row[1]["requests"]),
            ("depth", lambda row: str(row[1]["depth"])),
            ("nodes", lambda row: str(row[1]["nodes"])),
            ("predicted", lambda row: f"{row[1]['predicted']:.3f}"),
            ("accepted", lambda row: f"{row[1]['accepted']:.3f}"),
            ("calibration\nerror", lambda row: f"{row[1]['calibration_error']:.3f}"),
        ],
        title="Predicted and actual acceptance of the nodes that were verified",
        notes=["predictions were made before the round, while the calibration was still learning"],
    )


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


def _share(value: float | None, bounds: Interval | None) -> Cell | str:
    if value is None:
        return NOTHING
    return Cell(f"{value:+.1%}", between(bounds, "+.1%"), emphasis=Emphasis.MISSED if value > AIM else Emphasis.NONE)
