"""One drafter or several at several lengths of the context: acceptance and time per round."""

from collections.abc import Mapping

import pandas

from experiments.reporting.columns import LENGTH, SPEEDUP, TOKENS, T
from experiments.reporting.study import SERIES, Panel, Study
from experiments.reporting.table import NOTHING, Col, three_digits, words
from experiments.results.comparison import commit_of, dataset_name
from experiments.results.frame import Frame
from experiments.results.rows import Row, ends, interval, positions, rows_of
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap
from experiments.results.timing import calls_of, gain_over

CONTEXT = "config.dataset.tokens"
AXIS = "tokens of context"


def with_changes(frame: Frame, runs: Mapping[str, Run]) -> Frame:
    """Add what no run knows by itself: the change since the shortest context, and times per round.

    ``change`` is in expected tokens per round on the same prompts, given the drafts; ``draft`` and ``verify`` are
    seconds per round.
    """
    derived: list[Row] = []
    for _, own in frame.groupby(SERIES, sort=False):
        first, *others = rows_of(own)
        shortest = runs[first["run"]].of(first)
        derived += [_derived(first, runs[first["run"]], None)]
        derived += [_derived(row, runs[row["run"]], shortest) for row in others]
    return frame.assign(**{name: pandas.array([row[name] for row in derived], dtype="Float64") for name in derived[0]})


def _derived(row: Row, run: Run, shortest: Frame | None) -> Row:
    outputs = run.of(row)
    good, bootstrap = outputs[~outputs.failed], Bootstrap(**run.manifest["config"]["bootstrap"])
    gain = None if shortest is None else gain_over(outputs, shortest, bootstrap)
    # The rows of a batch share their rounds.
    rounds, calls = good.groupby(["batch", "turn"], sort=False)["rounds"].max().sum(), calls_of(good)
    seconds = {name: sum(stages.get(name, 0.0) for stages in calls.stages) for name in ("draft", "verify")}
    return {
        "change": None if gain is None else gain.difference,
        **ends("change", None if gain is None else gain.interval),
        **{name: total / rounds if rounds and total else None for name, total in seconds.items()},
    }


def sentences(frame: Frame) -> list[str]:
    """The loss of each method from the shortest to the longest context, and whether chance explains it."""
    said = []
    for (temperature, name), own in frame.groupby(SERIES, sort=False):
        first, *_, last = rows_of(own)
        line = (
            f"{name}, T={temperature:g}: {first['mean_acceptance_length']:.2f} tokens per round at "
            f"{first[CONTEXT]:,} tokens of context, {last['mean_acceptance_length']:.2f} at {last[CONTEXT]:,}"
        )
        if (bounds := interval(last, "change")) is not None:
            sure = "less" if bounds[1] < 0 else "more" if bounds[0] > 0 else "no more than chance"
            line += f": {sure} (paired {last['change']:+.2f} [{bounds[0]:+.2f}, {bounds[1]:+.2f}])"
        if first["draft"] and last["draft"]:
            times = [three_digits(1000 * row["draft"]) for row in (first, last)]
            line += f"; its drafts take {times[0]} ms per round, then {times[1]}"
        said.append(line)
    return said


def _accepted(row: Row) -> str:
    """The acceptance at the first positions, powers of two, and the deepest."""
    shares = positions(row)
    places = [place for place in (1, 2, 4, 8, 16) if place < len(shares)] + ([len(shares)] if shares else [])
    return " ".join(f"{shares[place - 1]:.2f}" for place in places) or NOTHING


def _two(drafter: str, target: str, label: str, scale: float) -> Panel:
    labels = (AXIS, f"{label}: — drafter, ··· target")
    return Panel(x=CONTEXT, y=(drafter, target), labels=labels, scale=(1.0, scale), log=True)


report = Study(
    name="context",
    title="Acceptance and time by length of the context",
    x=CONTEXT,
    give="dataset.tokens=128,512 (with dataset=context or dataset=joined, whose prompts have one length)",
    columns=[
        *(words("method", "name"), T, Col("context,\ntokens", CONTEXT, ",d"), LENGTH),
        *(Col("since the\nshortest", "change", "+.2f"), Col("accepted at 1,\n2, 4, …, last", _accepted)),
        Col("ms/round,\ndraft; verify", "draft", "3", 1e3, also="verify"),
        *(TOKENS, SPEEDUP),
    ],
    panels=[
        Panel(x=CONTEXT, y="mean_acceptance_length", labels=(AXIS, "tokens per round"), at=1.0, log=True),
        _two("draft", "verify", "ms per round", 1e3),
    ],
    derive=with_changes,
    sentences=sentences,
    notes=["all lengths go on from the same places", "the change is paired, and given the drafts"],
    facts=[lambda run: dataset_name(run).partition(", tokens")[0], lambda run: f"commit {commit_of(run.manifest)}"],
    plain=False,
)
