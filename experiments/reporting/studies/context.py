"""One drafter or several at several lengths of the context: acceptance and speed."""

from collections.abc import Mapping

import pandas

from experiments.reporting.columns import LENGTH, SPEEDUP, TOKENS, T
from experiments.reporting.study import SERIES, Panel, Study
from experiments.reporting.table import Col, words
from experiments.results.comparison import commit_of, dataset_name
from experiments.results.frame import Frame
from experiments.results.rows import Row, ends, interval, rows_of
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap
from experiments.results.timing import gain_over

CONTEXT = "config.dataset.tokens"


def with_changes(frame: Frame, runs: Mapping[str, Run]) -> Frame:
    """Add ``change``: the tokens per round since the shortest context, on the same prompts and given the drafts."""
    derived: list[Row] = []
    for _, own in frame.groupby(SERIES, sort=False):
        rows = rows_of(own)
        shortest = runs[rows[0]["run"]].of(rows[0])
        for row in rows:
            run = runs[row["run"]]
            bootstrap = Bootstrap(**run.manifest["config"]["bootstrap"])
            gain = None if row is rows[0] else gain_over(run.of(row), shortest, bootstrap)
            change = {"change": None, **ends("change", None)}
            derived.append(change if gain is None else {"change": gain.difference, **ends("change", gain.interval)})
    return frame.assign(**{name: pandas.array([row[name] for row in derived], dtype="Float64") for name in derived[0]})


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
        said.append(line)
    return said


report = Study(
    name="context",
    title="Acceptance and speed by length of the context",
    x=CONTEXT,
    give="dataset.tokens=128,512 (with dataset=context or dataset=joined, whose prompts have one length)",
    columns=[
        *(words("method", "name"), T, Col("context,\ntokens", CONTEXT, ",d"), LENGTH),
        *(Col("since the\nshortest", "change", "+.2f"), TOKENS, SPEEDUP),
    ],
    panels=[
        Panel(
            x=CONTEXT, y="mean_acceptance_length", labels=("tokens of context", "tokens per round"), at=1.0, log=True
        ),
        Panel(x=CONTEXT, y="speedup", labels=("tokens of context", "tokens/s over plain decoding's"), at=1.0, log=True),
    ],
    derive=with_changes,
    sentences=sentences,
    notes=["all lengths go on from the same places", "the change is paired, and given the drafts"],
    facts=[lambda run: dataset_name(run).partition(", tokens")[0], lambda run: f"commit {commit_of(run.manifest)}"],
    plain=False,
)
