"""How many more tokens a round of one method brings than a round of another, on the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.results.records import Record
from experiments.results.statistics import Bootstrap, Interval, difference_of_means, totals


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A method's mean acceptance length less that of another method at the same temperature.

    Both are expectations over the acceptance, given the drafts that were made (``expected_mean_acceptance_length``):
    they have less noise than counted tokens, and the same mean.

    Attributes:
        over: The other method.
        tokens: The difference in tokens per round.
        interval: The confidence interval of that difference, over prompts; the same prompts are drawn for both methods.
    """

    over: str
    tokens: float
    interval: Interval | None


def gain_over(own: Sequence[Record], other: Sequence[Record], bootstrap: Bootstrap) -> Gain | None:
    """Returns the gain of one method's records over another's; None if they share no prompt that both finished.

    Args:
        own: All records of a method at a temperature.
        other: All records of the method that it is compared with, at that temperature.
        bootstrap: Settings of the interval.
    """
    good = [[record for record in records if not record.failed and record.accepted] for records in (own, other)]
    finished = {record.prompt for record in good[1]}
    shared = [prompt for prompt in dict.fromkeys(record.prompt for record in good[0]) if prompt in finished]
    if not shared:
        return None
    columns: list[np.ndarray] = []
    for records in good:
        prompts = [record.prompt for record in records]
        rounds = [len(record.accepted) for record in records]
        tokens = [sum(record.expected_accepted) + len(record.accepted) for record in records]
        columns += [totals(prompts, tokens, shared), totals(prompts, rounds, shared)]
    return Gain(
        over=other[0].method,
        tokens=float(difference_of_means(*columns)),
        interval=bootstrap.interval(difference_of_means, columns),
    )
