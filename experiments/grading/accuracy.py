"""From grades to accuracy: pass@k with intervals, and the paired difference from plain decoding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.grading.grade import Grade
from experiments.results.lossless import EXACT
from experiments.results.records import PLAIN
from experiments.results.statistics import Bootstrap, Interval


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One method's accuracy on one benchmark at one temperature.

    A prompt counts if all of its samples were decoded, with the method and plainly.

    Attributes:
        task: The benchmark.
        method: The method.
        exactness: What its rule promises; None for plain decoding.
        temperature: The requests' temperature.
        k: The k of pass@k. With k = 1 it is the share of right answers.
        samples: Samples of every prompt.
        prompts: Prompts that count.
        left_out: Prompts that do not, because a decoding failed or was interrupted.
        accuracy: pass@k, the mean over prompts.
        interval: Its bootstrap interval over prompts.
        plain: pass@k of plain decoding on the same prompts; None for plain decoding itself, or without it.
        difference: What the method has more than plain decoding.
        difference_interval: Its interval. The same prompts are drawn for both.
        better, worse: Prompts that the method answers right in more, or fewer, of its samples than plain decoding.
    """

    task: str
    method: str
    exactness: str | None
    temperature: float
    k: int
    samples: int
    prompts: int
    left_out: int
    accuracy: float
    interval: Interval | None
    plain: float | None = None
    difference: float | None = None
    difference_interval: Interval | None = None
    better: int | None = None
    worse: int | None = None

    @property
    def label(self) -> str:
        """The method's name, with a warning where its output is not the target's."""
        if self.exactness in (None, EXACT):
            return self.method
        return f"{self.method}, {self.exactness}" if ")" in self.exactness else f"{self.method} ({self.exactness})"


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The probability that at least one of k samples is right, estimated without bias from more of them.

    ``1 - C(n-c, k) / C(n, k)`` for c right samples of n: of all choices of k, those with a right one among them
    (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Raises:
        ValueError: There are fewer than k samples.
    """
    if samples < k:
        raise ValueError(f"k={k} needs at least {k} samples of every prompt, and there are {samples}: sampling.n={k}")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def accuracies(grades: Sequence[Grade], ks: Sequence[int], bootstrap: Bootstrap) -> list[Accuracy]:
    """The accuracy of every method at every temperature on every benchmark, for every k; plain decoding first.

    Raises:
        ValueError: There are fewer samples than some k asks for.
    """
    series: dict[tuple[str, float, str], dict[str, list[Grade]]] = {}
    for each in grades:
        series.setdefault((each.task, each.temperature, each.method), {}).setdefault(each.prompt, []).append(each)
    found = []
    for (task, temperature, method), own in sorted(series.items(), key=lambda item: _order(*item[0])):
        plain = series.get((task, temperature, PLAIN)) if method != PLAIN else None
        for k in ks:
            accuracy = _accuracy(own, plain, k, bootstrap)
            found += [accuracy] if accuracy is not None else []
    return found


def _order(task: str, temperature: float, method: str) -> tuple[str, float, bool, str]:
    return task, temperature, method != PLAIN, method


def _accuracy(
    own: dict[str, list[Grade]], plain: dict[str, list[Grade]] | None, k: int, bootstrap: Bootstrap
) -> Accuracy | None:
    """None if no prompt counts."""
    samples = max(len(grades) for grades in own.values())
    counted = [
        prompt
        for prompt, grades in own.items()
        if _whole(grades, samples) and (plain is None or _whole(plain.get(prompt, []), samples))
    ]
    if not counted:
        return None
    first = own[counted[0]][0]
    rates = np.array([_rate(own[prompt], k) for prompt in counted])
    made = Accuracy(
        task=first.task,
        method=first.method,
        exactness=first.exactness,
        temperature=first.temperature,
        k=k,
        samples=samples,
        prompts=len(counted),
        left_out=len(own) - len(counted),
        accuracy=float(rates.mean()),
        interval=bootstrap.interval(_mean, [rates]),
    )
    if plain is None:
        return made
    others = np.array([_rate(plain[prompt], k) for prompt in counted])
    changes = [_correct(own[prompt]) - _correct(plain[prompt]) for prompt in counted]
    return replace(
        made,
        plain=float(others.mean()),
        difference=float((rates - others).mean()),
        difference_interval=bootstrap.interval(_mean, [rates - others]),
        better=sum(change > 0 for change in changes),
        worse=sum(change < 0 for change in changes),
    )


def _whole(grades: Sequence[Grade], samples: int) -> bool:
    return len(grades) == samples and all(each.correct is not None for each in grades)


def _correct(grades: Sequence[Grade]) -> int:
    return sum(bool(each.correct) for each in grades)


def _rate(grades: Sequence[Grade], k: int) -> float:
    return pass_at_k(len(grades), _correct(grades), k)


def _mean(values: np.ndarray, *, axis: int = -1) -> np.ndarray:
    return values.mean(axis)
