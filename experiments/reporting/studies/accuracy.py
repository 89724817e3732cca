"""From the scores of single answers to accuracy, its paired difference from plain decoding, and the report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from scipy import stats

from experiments.reporting.columns import lossiness
from experiments.reporting.formats import document, publish
from experiments.reporting.table import Cell, Col, Table, words
from experiments.results.rows import Row, ends
from experiments.results.statistics import Bootstrap

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


def accuracies(plain: Scores, drafted: Scores, bootstrap: Bootstrap) -> list[Row]:
    """Return a method's mean score on every task by every metric, beside plain decoding's on the same documents.

    Returns:
        A row per task and metric (with lm-eval's filter of the answer: ``exact_match, strict-match``): ``documents``,
        the scores of ``plain`` decoding and of the method (``accuracy``), and the ``difference``, all with bootstrap
        intervals over documents, in which the same ones are drawn for both. The documents that the method scores
        higher, or lower, on are ``better`` and ``worse``; ``p`` is the chance of so uneven a split, or a more uneven
        one, if either were as likely (McNemar's exact test); the interval of ``share_worse`` is the exact one of
        Clopper and Pearson: of none in 300, up to 1.2 %.
    """
    found = []
    for (task, metric), theirs in plain.items():
        own = drafted.get((task, metric), {})
        shared = [document for document in theirs if document in own]
        if not shared:
            continue
        before, after = (np.array([scores[document] for document in shared]) for scores in (theirs, own))
        better, worse = int((after > before).sum()), int((after < before).sum())
        share = stats.binomtest(worse, len(shared)).proportion_ci(bootstrap.confidence, method="exact")
        row: Row = {"task": task, "metric": metric, "documents": len(shared)}
        for name, values in {"plain": before, "accuracy": after, "difference": after - before}.items():
            row |= {name: float(values.mean()), **ends(name, bootstrap.interval(np.mean, [values]))}
        row |= {"better": better, "worse": worse, "share_worse": worse / len(shared)}
        row |= ends("share_worse", (float(share.low), float(share.high)))
        row["p"] = float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0
        found.append(row)
    return found


def report_accuracy(
    rows: Sequence[Row],
    out: Path,
    *,
    method: str,
    exactness: str | None,
    length: float | None,
    confidence: float,
    title: str = "",
    made: Mapping[str, Any] | None = None,
) -> None:
    """Print and write scores; ``made`` says what made them, in the JSON file."""
    notes = [
        f"intervals at {confidence:.0%}, over documents; the difference is paired; p: McNemar's exact test",
        "share worse: exact, so that documents without a loss say how large a loss could still be",
        *([] if length is None else [f"{method}: {length:.2f} tokens per round"]),
    ]
    columns = [
        *(words("task", "task"), words("metric", "metric")),
        words("method", lambda row: Cell(method, emphasis=lossiness(exactness))),
        *(Col("documents", "documents", "d"), Col("plain", "plain", ".3f"), Col("score", "accuracy", ".3f")),
        *(Col("difference", "difference", "+.3f"), Col("better;\nworse", "better", "d", also="worse")),
        *(Col("p", "p", ".3f"), Col("share\nworse", "share_worse", ".1%")),
    ]
    table = Table.of(rows, columns, title=title, notes=notes)
    facts = {"title": title, "method": method, "exactness": exactness, "mean_acceptance_length": length}
    figures = {**facts, "confidence": confidence, "rows": rows, **(made or {})}
    more = {"accuracy.csv": pandas.DataFrame(rows).to_csv(index=False, lineterminator="\n")}
    publish(out, "accuracy", tables=[table], document=document(table, notes), figures=figures, more=more)
