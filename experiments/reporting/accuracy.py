"""From the scores of single answers to accuracy, its paired difference from plain decoding, and the report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from scipy import stats

from experiments.reporting.cells import between, lossiness
from experiments.reporting.formats import USUAL, document, publish, write_formats
from experiments.reporting.table import Cell, Table, left
from experiments.results.frame import Figures
from experiments.results.statistics import Bootstrap, Interval

Scores = Mapping[tuple[str, str], Mapping[int, float]]
"""By task and metric: the score of every document, by its number."""


def scores_of(results: Mapping[str, Any]) -> dict[tuple[str, str], dict[int, float]]:
    """The numeric scores of single documents in lm-eval's results (``log_samples=True``)."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for task, samples in results["samples"].items():
        for sample in samples:
            for metric in sample["metrics"]:
                value = sample[metric]
                if isinstance(value, bool | int | float | np.number):
                    name = metric if sample["filter"] == "none" else f"{metric}, {sample['filter']}"
                    found.setdefault((task, name), {})[sample["doc_id"]] = float(value)
    return found


def accuracies(plain: Scores, drafted: Scores, bootstrap: Bootstrap) -> list[Figures]:
    """Return a method's mean score on every task by every metric, beside plain decoding's on the same documents.

    Returns:
        In the tasks' order: ``task``, ``metric`` (with lm-eval's filter of the answer: ``exact_match, strict-match``),
        how many ``documents``, the score of ``plain`` decoding, the method's ``accuracy``, and the ``difference``: what
        the method has more. Their bootstrap intervals over documents, in which the same ones are drawn for both, are
        ``plain_interval``, ``interval`` and ``difference_interval``; None with one document. The documents that the
        method scores higher, or lower, on are ``better`` and ``worse``; ``p`` is the chance of so uneven a split, or a
        more uneven one, if either were as likely (McNemar's exact test), and ``worse_interval`` the exact interval
        (Clopper and Pearson) of the share of all documents on which it is worse: of none in 300, up to 1.2 %.
    """
    found = []
    for (task, metric), theirs in plain.items():
        own = drafted.get((task, metric), {})
        shared = [document for document in theirs if document in own]
        if not shared:
            continue
        before, after = (np.array([scores[document] for document in shared]) for scores in (theirs, own))
        (first, one), (second, two), (change, both) = (
            _mean(each, bootstrap) for each in (before, after, after - before)
        )
        better, worse = int((after > before).sum()), int((after < before).sum())
        share = stats.binomtest(worse, len(shared)).proportion_ci(bootstrap.confidence, method="exact")
        found.append(
            Figures(
                task=task,
                metric=metric,
                documents=len(shared),
                plain=first,
                plain_interval=one,
                accuracy=second,
                interval=two,
                difference=change,
                difference_interval=both,
                better=better,
                worse=worse,
                p=float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0,
                worse_interval=(float(share.low), float(share.high)),
            )
        )
    return found


def _mean(values: np.ndarray, bootstrap: Bootstrap) -> tuple[float, Interval | None]:
    return float(values.mean()), bootstrap.interval(np.mean, [values])


def report_accuracy(
    rows: Sequence[Figures],
    out: Path,
    *,
    method: str,
    exactness: str | None,
    length: float | None,
    confidence: float,
    formats: Sequence[str] = USUAL,
    title: str = "",
    made: Mapping[str, Any] | None = None,
) -> None:
    """Print and write scores; ``made`` says what made them, in the JSON file."""
    notes = [
        f"intervals at {confidence:.0%}, over documents; the difference is paired; p: McNemar's exact test",
        "share worse: exact, so that documents without a loss say how large a loss could still be",
    ]
    if length is not None:
        notes.append(f"{method}: {length:.2f} tokens per round")
    table = accuracy_table(rows, title, Cell(method, emphasis=lossiness(exactness)), notes)
    facts = {"title": title, "method": method, "exactness": exactness, "mean_acceptance_length": length}
    text = document(table, notes)
    publish(
        out,
        "accuracy",
        tables=[table],
        figures={**facts, "confidence": confidence, "rows": rows, **(made or {})},
        drawn=lambda: write_formats(
            formats, out, "accuracy", document=text, table=table, figures=lambda: _figures(rows)
        ),
    )


def accuracy_table(rows: Sequence[Figures], title: str, method: Cell, notes: list[str]) -> Table:
    """A row per task and metric."""
    return Table.of(
        rows,
        [
            (left("task"), lambda each: each.task),
            (left("metric", fold=True), lambda each: each.metric),
            (left("method"), lambda each: method),
            ("documents", lambda each: f"{each.documents}"),
            ("plain", lambda each: _score(each.plain, each.plain_interval, sign="")),
            ("score", lambda each: _score(each.accuracy, each.interval, sign="")),
            ("difference", lambda each: _score(each.difference, each.difference_interval, sign="+")),
            ("better;\nworse", lambda each: Cell(f"{each.better}; {each.worse}", (f"p {each.p:.3f}",))),
            (
                "share\nworse",
                lambda each: Cell(f"{each.worse / each.documents:.1%}", between(each.worse_interval, ".1%")),
            ),
        ],
        title=title,
        notes=notes,
    )


def _score(value: float, bounds: Interval | None, *, sign: str) -> Cell:
    more = () if bounds is None else (f"[{bounds[0]:{sign}.3f}, {bounds[1]:{sign}.3f}]",)
    return Cell(f"{value:{sign}.3f}", more)


_INTERVALS = (
    *((name, f"{name}_interval") for name in ("plain", "difference", "worse")),
    ("accuracy", "interval"),
)


def _figures(rows: Sequence[Figures]) -> pandas.DataFrame:
    frame = pandas.DataFrame(rows)
    for prefix, name in _INTERVALS:
        ends = [row[name] or (None, None) for row in rows]
        frame[[f"{prefix}_low", f"{prefix}_high"]] = pandas.DataFrame(ends, dtype="float64")
        del frame[name]
    return frame
