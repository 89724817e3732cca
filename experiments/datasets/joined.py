"""Real prompts joined, and cut from the front, to one length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.datasets.context import CHARACTERS, check_lengths
from experiments.datasets.prompt import Dataset, Prompt, Selection

_BETWEEN = "\n\n"
"""Stands between joined prompts."""
_LONG_LINE = 24
"""Characters from which on a line is not expected to stand in two prompts by chance."""


@dataclass(frozen=True, kw_only=True)
class Joined(Selection):
    """Prompts of another dataset, joined until they are long enough, of which the target sees the last ``tokens``.

    Prompts that follow each other in one category make a joined prompt, in their order: never random tokens, on which
    acceptance means nothing. Each is used once, and one that repeats a long line of what it would be joined to is
    passed over, because repeated text would flatter drafters that copy. A study of lengths compares runs of different
    ``tokens`` and one ``longest``: they end with the same words, so that nothing but the length differs.

    Attributes:
        prompts: The dataset whose prompts are joined; what it says about a choice of its prompts is not used.
        tokens: Length of every prompt, in tokens of the target. Of a conversation, what the user says has this length:
            the first turns of all, as one turn; a chat template comes on top.
        longest: The largest length of the study.
        count: Joined prompts to take; None for all. The rest of the choice is set as in ``Selection``.
    """

    prompts: Dataset
    tokens: int = 256
    longest: int = 768
    count: int | None = 20

    def __post_init__(self) -> None:
        check_lengths(self.tokens, self.longest)

    def load(self) -> list[Prompt]:
        """All joined prompts, in the order of the prompts that they are made of.

        Raises:
            ValueError: The prompts are too few for one joined prompt, or for as many as are wanted; or as the dataset.
        """
        given = self.prompts.load()
        length = self.longest * CHARACTERS
        categories = list(dict.fromkeys(prompt.category for prompt in given))
        made = [
            _as_one(group, self.tokens)
            for category in categories
            for group in _groups([prompt for prompt in given if prompt.category == category], length)
        ]
        wanted = 1 if self.count is None or self.per_category is not None else self.count
        if len(made) < wanted:
            raise ValueError(
                f"dataset.longest={self.longest}: the {len(given)} prompts of dataset.prompts make {len(made)} joined "
                f"prompts of {length} characters ({CHARACTERS} per token), and {wanted} are wanted: give a smaller "
                f"number, dataset.count={max(1, len(made))}, or more prompts"
            )
        return made


def _groups(prompts: Sequence[Prompt], length: int) -> Iterator[list[Prompt]]:
    """Prompts that are long enough together, in their order; what is left over at the end makes none."""
    group: list[Prompt] = []
    lines: set[str] = set()
    size = 0
    for prompt in prompts:
        own = {line.strip() for line in _text(prompt).splitlines() if len(line.strip()) >= _LONG_LINE}
        if own & lines:
            continue
        group.append(prompt)
        lines |= own
        size += len(_text(prompt)) + len(_BETWEEN)
        if size >= length:
            yield group
            group, lines, size = [], set(), 0


def _as_one(group: Sequence[Prompt], tokens: int) -> Prompt:
    last = group[-1]
    return Prompt(
        id=last.id if len(group) == 1 else f"{last.id} behind {len(group) - 1} others",
        turns=(_BETWEEN.join(map(_text, group)),),
        category=last.category,
        chat=last.chat,
        last_tokens=tokens,
        license="; ".join(dict.fromkeys(prompt.license for prompt in group if prompt.license)),
    )


def _text(prompt: Prompt) -> str:
    """The first turn of the user: a later one is about an answer."""
    return prompt.turns[0]
