"""Figures of drafters over texts that are known to their end."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas

from experiments.results.frame import Frame
from experiments.results.statistics import Bootstrap, Interval, difference_of_means, ratio_of_sums


@dataclass(frozen=True)
class Rounds:
    """The rounds of one text: its category, how many rounds there were, the tokens they emitted, the nodes drafted."""

    category: str
    rounds: int
    tokens: int
    nodes: int


@dataclass(frozen=True)
class LookUp:
    """A drafter's figures.

    Attributes:
        label: Its name in the tables.
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
    """Return the figures of the drafter of that name."""
    frame: Frame = pandas.DataFrame(list(texts))
    by_category: Frame = frame.groupby("category", sort=False)[["tokens", "rounds"]].sum()
    return LookUp(
        label=label,
        texts=tuple(texts),
        length=float(frame.tokens.sum() / frame["rounds"].sum()),
        interval=bootstrap.interval(ratio_of_sums, [frame.tokens, frame["rounds"]]),
        nodes=float(frame.nodes.sum() / frame["rounds"].sum()),
        categories=(by_category.tokens / by_category["rounds"]).to_dict(),
    )


def over(each: LookUp, other: LookUp, bootstrap: Bootstrap) -> Interval | None:
    """Return the interval of the difference of tokens per round, with both on the same texts."""
    columns = [[getattr(text, name) for text in one.texts] for one in (each, other) for name in ("tokens", "rounds")]
    return bootstrap.interval(difference_of_means, columns)
