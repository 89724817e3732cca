"""Figures of drafters over texts that are known to their end."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.results.statistics import Bootstrap, Interval, difference_of_means, ratio_of_sums


@dataclass(frozen=True)
class Rounds:
    """The rounds of one text, counted.

    Attributes:
        category: The text's category.
        rounds: How many there were.
        tokens: The tokens that they emitted.
        nodes: The nodes that were drafted in them.
    """

    category: str
    rounds: int
    tokens: int
    nodes: int


@dataclass(frozen=True)
class LookUp:
    """What a drafter did.

    Attributes:
        label: What the tables call it.
        texts: Its rounds, text by text.
        length: Tokens per round over all texts: the mean acceptance length.
        interval: Its interval over the choice of texts; None with a single text.
        nodes: Drafted nodes per round.
        categories: Tokens per round by category, in the order of the texts.
    """

    label: str
    texts: tuple[Rounds, ...]
    length: float
    interval: Interval | None
    nodes: float
    categories: dict[str, float]


def look_up(label: str, texts: Sequence[Rounds], bootstrap: Bootstrap) -> LookUp:
    """Return the figures of one drafter.

    Args:
        label: What the tables call it.
        texts: Its rounds, text by text.
        bootstrap: Settings of the interval.
    """
    columns = [each.tokens for each in texts], [each.rounds for each in texts]
    return LookUp(
        label=label,
        texts=tuple(texts),
        length=_ratio(texts),
        interval=bootstrap.interval(ratio_of_sums, columns),
        nodes=sum(each.nodes for each in texts) / sum(each.rounds for each in texts),
        categories={
            name: _ratio([each for each in texts if each.category == name])
            for name in dict.fromkeys(each.category for each in texts)
        },
    )


def over(each: LookUp, other: LookUp, bootstrap: Bootstrap) -> Interval | None:
    """Return the interval of the difference of tokens per round, with both on the same texts."""
    columns = [[getattr(text, name) for text in one.texts] for one in (each, other) for name in ("tokens", "rounds")]
    return bootstrap.interval(difference_of_means, columns)


def _ratio(texts: Sequence[Rounds]) -> float:
    return sum(each.tokens for each in texts) / sum(each.rounds for each in texts)
