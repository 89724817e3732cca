"""What policies lose against the best fixed length, and how well they predict what is accepted."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from experiments.reporting.columns import T
from experiments.reporting.table import Cell, Col, Emphasis, Table, words
from experiments.results import timing
from experiments.results.frame import Frame, Outputs, frame_of
from experiments.results.rows import Row, ends
from experiments.results.statistics import Bootstrap
from specdec.drafting.calibration import Calibration
from specdec.drafting.costs import RoundCosts

AIM = 0.02
"""The share of its speed that a policy may lose."""
EVERYTHING = "all"
"""Stands for all categories."""


def policy_losses(
    outputs: Outputs,
    *,
    fixed: Sequence[str],
    by_depth: Sequence[str],
    others: Sequence[str],
    costs: RoundCosts | None,
    rows: int,
    bootstrap: Bootstrap,
) -> list[Row]:
    """Return the losses by category, then those over all.

    ``by_depth`` names the methods whose rounds cost what their depth says, ``rows`` is the batch size.

    The best fixed length is chosen on the very prompts that it is compared on, which no policy could do: of several
    lengths that are equally good, the luckiest wins. So the loss by the clock is rather too large.

    Returns:
        ``loss``: the share by which the policy's tokens per second are lower than those of ``best``, the fixed length
        that is fastest by the clock on this category, with its interval over prompts; negative where it is faster.
        ``modelled_best``, ``modelled_loss``: the same where every round takes the time that was measured for its depth,
        free of what else the machine did. ``mean_depth``: how deep its drafts were.
    """
    frame = frame_of(outputs)
    whole, losses = frame.assign(category=EVERYTHING), []
    parts = [frame, whole] if frame.category.nunique() > 1 else [whole]
    for (temperature, category), chosen in (
        group for part in parts for group in part.groupby(["temperature", "category"])
    ):
        of = {method: chosen[chosen.method == method] for method in (*fixed, *others)}
        best, _ = _fastest({name: timing.tokens_per_second(timing.timed_calls(of[name], None)) for name in fixed})
        if best is None:
            continue
        modelled = {name: _modelled(of[name], costs, rows) for name in by_depth if name in of}
        modelled_best, top = _fastest({name: modelled.get(name) for name in fixed})
        for policy in others:
            timed = timing.timed_calls(of[policy], of[best])
            ratio, bounds = timing.speedup(timed), timing.speedup_interval(timed, bootstrap)
            if ratio is None:
                continue
            own, depths = modelled.get(policy), of[policy].proposed_depth.explode()
            row = {"category": category, "temperature": float(temperature), "policy": policy, "best": best}
            row |= {"loss": 1 - ratio, **ends("loss", None if bounds is None else (1 - bounds[1], 1 - bounds[0]))}
            row |= {"modelled_best": modelled_best, "modelled_loss": 1 - own / top if own and top else None}
            losses.append(row | {"mean_depth": float(depths.mean()) if len(depths.dropna()) else 0.0})
    return losses


def _fastest(speeds: Mapping[str, float | None]) -> tuple[str | None, float]:
    """The method of the largest speed, and that."""
    known = {name: speed for name, speed in speeds.items() if speed}
    return max(known.items(), key=lambda speed: speed[1], default=(None, 0.0))


def _modelled(own: Frame, costs: RoundCosts | None, rows: int) -> float | None:
    """Return the tokens per second of rounds that take what was measured for their depth."""
    good = own[~own.failed]
    depths = [depth for row in good.proposed_depth for depth in row]
    if costs is None or costs.nodes is not None or not depths or max(depths) > costs.max_depth:
        return None
    return float(good.tokens.sum()) / float(costs.seconds(rows, costs.max_depth)[depths].sum())


def loss_table(losses: Sequence[Row], confidence: float) -> Table | None:
    """A row per category and policy; None where nothing is compared."""
    if not losses:
        return None
    return Table.of(
        losses,
        [
            *(words("category", "category"), words("policy", "policy"), T, Col("mean\ndepth", "mean_depth", ".1f")),
            *(words("best\nfixed", "best"), _loss("loss in\ntokens/s", "loss")),
            *(words("best fixed\nby costs", "modelled_best"), _loss("loss\nby costs", "modelled_loss")),
        ],
        title=f"Loss against the best fixed length [{confidence:.0%} interval]",
        notes=[
            "below zero is a gain",
            "the best fixed length of a category is chosen afterwards, on its own prompts",
            "by costs: as if every round took the time that was measured for its depth before the run, so that nothing "
            "else on the machine counts (for policies that choose a depth before the round)",
            *_worst(losses),
        ],
        section=lambda row: row["category"],
    )


def _loss(heading: str, field: str) -> Col:
    """A column of losses, of which those stand out that are larger than a policy may have."""
    column = Col(heading, field, "+.1%")

    def cell(row: Row) -> Cell:
        missed = (row[field] or 0.0) > AIM
        return replace(column.cell(row), emphasis=Emphasis.MISSED if missed else Emphasis.NONE)

    return replace(column, field=cell)


def _worst(losses: Sequence[Row]) -> list[str]:
    """A sentence per policy: the most that it loses on any category."""
    said = []
    for policy in dict.fromkeys(row["policy"] for row in losses):
        mine = [row for row in losses if row["policy"] == policy]
        some = [row for row in mine if row["category"] != EVERYTHING] or mine
        worst = max(some, key=lambda row: row["loss"])
        sentence = f"{policy} loses at most {worst['loss']:.1%} by the clock ({worst['category']})"
        known = [row for row in some if row["modelled_loss"] is not None]
        if known:
            worst = max(known, key=lambda row: row["modelled_loss"])
            sentence += f", and {worst['modelled_loss']:.1%} by the costs of rounds ({worst['category']})"
        said.append(sentence)
    return said


def calibration_table(calibrations: Mapping[str, Calibration]) -> Table | None:
    """A row per method, kind of requests and depth; None where nothing was predicted."""
    rows = [{"method": method, **errors} for method, found in calibrations.items() for errors in found.errors()]
    if not rows:
        return None
    columns = [words("method", "method"), words("requests", "requests"), Col("depth", "depth", "d")]
    columns += [Col("nodes", "nodes", "d"), Col("predicted", "predicted", ".3f"), Col("accepted", "accepted", ".3f")]
    columns.append(Col("calibration\nerror", "calibration_error", ".3f"))
    note = "predictions were made before the round, while the calibration was still learning"
    title = "Predicted and actual acceptance of the nodes that were verified"
    return Table.of(rows, columns, title=title, notes=[note])
