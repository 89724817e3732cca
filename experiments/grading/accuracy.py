"""From the scores of single answers to accuracy, and its paired difference from plain decoding."""

from collections.abc import Mapping
from typing import Any

import numpy as np

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
        method scores higher, or lower, on are ``better`` and ``worse``.
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
                better=int((after > before).sum()),
                worse=int((after < before).sum()),
            )
        )
    return found


def _mean(values: np.ndarray, bootstrap: Bootstrap) -> tuple[float, Interval | None]:
    return float(values.mean()), bootstrap.interval(np.mean, [values])
