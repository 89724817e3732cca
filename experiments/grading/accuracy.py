"""From the scores of single answers to accuracy, and its paired difference from plain decoding."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.results.statistics import Bootstrap, Interval

Scores = Mapping[tuple[str, str], Mapping[int, float]]
"""By task and metric: the score of every document, by its number."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A method's mean score on one task, beside plain decoding's on the same documents.

    Attributes:
        metric: Its score, with lm-eval's filter of the answer: ``exact_match, strict-match``.
        plain_interval: Its bootstrap interval over documents; None with one document.
        difference: What the method has more.
        difference_interval: Its interval. The same documents are drawn for both.
        better, worse: Documents that the method scores higher, or lower, on.
    """

    task: str
    metric: str
    documents: int
    plain: float
    plain_interval: Interval | None
    accuracy: float
    interval: Interval | None
    difference: float
    difference_interval: Interval | None
    better: int
    worse: int


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


def accuracies(plain: Scores, drafted: Scores, bootstrap: Bootstrap) -> list[Accuracy]:
    """The accuracy on every task by every metric, in the tasks' order."""
    found = []
    for (task, metric), theirs in plain.items():
        own = drafted.get((task, metric), {})
        shared = [document for document in theirs if document in own]
        if shared:
            before = np.array([theirs[document] for document in shared])
            after = np.array([own[document] for document in shared])
            found.append(_accuracy(task, metric, before, after, bootstrap))
    return found


def _accuracy(task: str, metric: str, plain: np.ndarray, own: np.ndarray, bootstrap: Bootstrap) -> Accuracy:
    change = own - plain
    return Accuracy(
        task=task,
        metric=metric,
        documents=len(own),
        plain=float(plain.mean()),
        plain_interval=bootstrap.interval(_mean, [plain]),
        accuracy=float(own.mean()),
        interval=bootstrap.interval(_mean, [own]),
        difference=float(change.mean()),
        difference_interval=bootstrap.interval(_mean, [change]),
        better=int((change > 0).sum()),
        worse=int((change < 0).sum()),
    )


def _mean(values: np.ndarray, *, axis: int = -1) -> np.ndarray:
    return values.mean(axis)
