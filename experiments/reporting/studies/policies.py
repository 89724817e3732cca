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
    categories = sorted(set(frame.category))
    found = []
    for temperature in sorted(set(frame.temperature)):
        for category in [*(categories if len(categories) > 1 else []), EVERYTHING]:
            members = categories if category == EVERYTHING else [category]
            chosen = frame[(frame.temperature == temperature) & frame.category.isin(members)]
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
                own, depths = modelled.get(policy), _depths(of[policy])
                found.append(
                    {
                        "category": category,
                        "temperature": float(temperature),
                        "policy": policy,
                        "best": best,
                        "loss": 1 - ratio,
                        **ends("loss", None if bounds is None else (1 - bounds[1], 1 - bounds[0])),
                        "modelled_best": modelled_best,
                        "modelled_loss": 1 - own / top if own and top else None,
                        "mean_depth": sum(depths) / len(depths) if depths else 0.0,
                    }
                )
    return found


def _fastest(speeds: Mapping[str, float | None]) -> tuple[str | None, float]:
    """The method of the largest speed, and that."""
    known = {name: speed for name, speed in speeds.items() if speed}
    return max(known.items(), key=lambda each: each[1], default=(None, 0.0))


def _depths(own: Frame) -> list[int]:
    return [depth for depths in own.proposed_depth for depth in depths]


def _modelled(own: Frame, costs: RoundCosts | None, rows: int) -> float | None:
    """Return the tokens per second of rounds that take what was measured for their depth."""
    good = own[~own.failed]
    depths = _depths(good)
    if costs is None or costs.nodes is not None or not depths or max(depths) > costs.max_depth:
        return None
    seconds = costs.seconds(rows, costs.max_depth)
    return float(good.tokens.sum()) / float(seconds[depths].sum())


def loss_table(losses: Sequence[Row], confidence: float) -> Table | None:
    """A row per category and policy; None where nothing is compared."""
    if not losses:
        return None
    return Table.of(
        losses,
        [
            words("category", "category"),
            words("policy", "policy"),
            T,
            Col("mean\ndepth", "mean_depth", ".1f"),
            words("best\nfixed", "best"),
            _loss("loss in\ntokens/s", "loss"),
            words("best fixed\nby costs", "modelled_best"),
            _loss("loss\nby costs", "modelled_loss"),
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


def calibration_table(calibrations: Mapping[str, Calibration]) -> Table | None:
    """A row per method, kind of requests and depth; None where nothing was predicted."""
    rows = [{"method": method, **each} for method, found in calibrations.items() for each in found.errors()]
    if not rows:
        return None
    return Table.of(
        rows,
        [
            *(words(name, name) for name in ("method", "requests")),
            *(Col(name, name, "d") for name in ("depth", "nodes")),
            *(Col(name, name, ".3f") for name in ("predicted", "accepted")),
            Col("calibration\nerror", "calibration_error", ".3f"),
        ],
        title="Predicted and actual acceptance of the nodes that were verified",
        notes=["predictions were made before the round, while the calibration was still learning"],
    )


def _worst(losses: Sequence[Row]) -> list[str]:
    """A sentence per policy: the most that it loses on any category."""
    said = []
    for policy in dict.fromkeys(row["policy"] for row in losses):
        mine = [row for row in losses if row["policy"] == policy]
        some = [row for row in mine if row["category"] != EVERYTHING] or mine
        clock = max(some, key=lambda row: row["loss"])
        sentence = f"{policy} loses at most {clock['loss']:.1%} by the clock ({clock['category']})"
        known = [row for row in some if row["modelled_loss"] is not None]
        if known:
            costs = max(known, key=lambda row: row["modelled_loss"])
            sentence += f", and {costs['modelled_loss']:.1%} by the costs of rounds ({costs['category']})"
        said.append(sentence)
    return said
