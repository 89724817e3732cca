"""Prompts, and which of a dataset's prompts a run takes."""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

CHARACTERS_PER_TOKEN = 3.6
"""How datasets turn a wanted number of tokens into characters, so that the prompts are the same text for every
target. It is what the bundled tokenizer has on Python; others have 3 to 5 on code and English."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: Unique in its dataset and stable: random streams and comparisons between runs hang on it.
        turns: What the user says, turn by turn; a method's own answers stand between them.
        category: The task's category; results are reported by category, too.
        chat: The turns are a conversation, for the target's chat template. False: text to be continued.
    """

    id: str
    turns: tuple[str, ...]
    category: str = ""
    chat: bool = False


class Dataset(Protocol):
    """Prompts in a fixed order, and how many of them a run takes."""

    @property
    def count(self) -> int | None:
        """Prompts to take; None for all."""
        ...

    @property
    def seed(self) -> int:
        """Seed of the choice."""
        ...

    def load(self) -> list[Prompt]:
        """All prompts.

        Raises:
            ValueError: There are none, or a file is missing or malformed.
        """
        ...


def choose(dataset: Dataset, *, spare: int = 0) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to measure, in the dataset's order, and up to ``spare`` others to warm up with.

    Which are measured depends on the dataset's seed and count only.

    Raises:
        ValueError: The count is not positive, ids are not unique, or the dataset raises it.
    """
    if dataset.count is not None and dataset.count < 1:
        raise ValueError(f"dataset.count={dataset.count}: give at least 1, or null for all prompts")
    prompts = dataset.load()
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise ValueError("two prompts of the dataset have the same id: ids must be unique")
    order = random.Random(dataset.seed).sample(range(len(prompts)), len(prompts))
    count = len(prompts) if dataset.count is None else min(dataset.count, len(prompts))
    measured = [prompts[index] for index in sorted(order[:count])]
    return measured, [prompts[index] for index in order[count : count + spare]]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash of the prompts' ids and texts: whether two runs measured the same."""
    text = json.dumps([(prompt.id, prompt.turns, prompt.category, prompt.chat) for prompt in prompts])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def warmup_texts(measured: Sequence[Prompt], spare: Sequence[Prompt], count: int) -> list[str]:
    """``count`` texts to warm up with, none of which is measured.

    Where the dataset has too few prompts, a measured one with its lines in reverse order stands in: of the same
    kind and length, but nothing that a drafter with a memory could profit from.
    """
    texts = [prompt.turns[0] for prompt in spare[:count]]
    for prompt in measured[: count - len(texts)]:
        texts.append("\n".join(reversed(prompt.turns[0].splitlines())) + " ")
    return texts
