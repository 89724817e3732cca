"""Prompts, and which of a dataset's prompts a run takes."""

import difflib
import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec.engine.intake import Message
from specdec.engine.text import whole_text

CHARACTERS_PER_TOKEN = 3.6
"""How datasets turn a wanted number of tokens into characters, so that the prompts are the same text for every
target. It is what the bundled tokenizer has on Python; others have 3 to 5 on code and English."""


@dataclass(frozen=True)
class Prompt:
    """One prompt; of a text to be continued, or of what the user says first, the target is given ``last_tokens``."""

    id: str  # unique in its dataset and stable: random streams and comparisons between runs hang on it
    turns: tuple[str, ...]  # what the user says, turn by turn; a method's own answers stand between them
    category: str = ""  # results are reported by category, too
    chat: bool = False  # a conversation, for the target's chat template; False: text to be continued
    last_tokens: int | None = None  # None: all
    license: str = ""  # of its text, if the dataset says it
    messages: tuple[Message, ...] = field(default=(), hash=False)  # before the first answer; the last says turns[0]
    tools: tuple[Message, ...] = field(default=(), hash=False)  # descriptions of functions, for the chat template


class Dataset(Protocol):
    """Prompts in a fixed order, and how many of them a run takes."""

    @property
    def count(self) -> int | None:
        """Prompts to take; None for all."""

    @property
    def seed(self) -> int:
        """Seed of the choice."""
        ...

    def load(self) -> list[Prompt]:
        """All prompts. Raises ValueError: there are none, or a file is missing or malformed."""
        ...


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which of a dataset's prompts a run takes: the settings that all datasets of this package share.

    Attributes:
        count: Prompts to take; None for all.
        per_category: Prompts to take of every category, in place of ``count``; a category that has fewer gives all.
        only: Categories to take, or one of them; None for all.
        too_long: What becomes of a prompt that does not fit into the engine: ``"skip"`` or ``"cut"``
            (``experiments.measuring.jobs``).
    """

    count: int | None = None
    per_category: int | None = None
    only: str | Sequence[str] | None = None
    too_long: str = "skip"
    seed: int = 0


TOO_LONG = ("skip", "cut")  # what becomes of a prompt that is too long


def selection_of(dataset: Dataset | Selection) -> Selection:
    """The settings of the choice; a dataset of your own may have no more than a count and a seed."""
    return dataset if isinstance(dataset, Selection) else Selection(count=dataset.count, seed=dataset.seed)


def choose(dataset: Dataset, *, spare: int = 0) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to measure, in the dataset's order, and up to ``spare`` others to warm up with.

    Which are measured depends on the dataset's prompts and the settings of its choice only.

    Raises:
        ValueError: A number is not positive, a category does not exist, ids are not unique, or the dataset raises it.
    """
    choice = selection_of(dataset)
    _check(choice)
    prompts = dataset.load()
    for name, times in Counter(prompt.id for prompt in prompts).most_common(1):
        if times > 1:
            raise ValueError(f"{times} prompts of the dataset have the id {name!r}: ids must be unique")
    _ = [whole_text(f"prompt {prompt.id}", turn) for prompt in prompts for turn in prompt.turns]
    wanted = _categories(choice, prompts)
    # Drawn over all prompts, so that those of a category are the same whichever categories are taken.
    order = random.Random(choice.seed).sample(range(len(prompts)), len(prompts))
    order = [index for index in order if not wanted or prompts[index].category in wanted]
    taken: list[int] = []
    seen: Counter[str] = Counter()
    for index in order:
        category = prompts[index].category
        full = len(taken) == choice.count if choice.per_category is None else seen[category] == choice.per_category
        if not full:
            taken.append(index)
            seen[category] += 1
    rest = [index for index in order if index not in set(taken)] if spare else []
    return [prompts[index] for index in sorted(taken)], [prompts[index] for index in rest[:spare]]


def _check(choice: Selection) -> None:
    for name, nothing in (("count", "for all prompts"), ("per_category", "to take dataset.count in all")):
        value = getattr(choice, name)
        if value is not None and value < 1:
            raise ValueError(f"dataset.{name}={value}: give at least 1, or null {nothing}")
    if choice.too_long not in TOO_LONG:
        raise ValueError(f"dataset.too_long={choice.too_long!r}: give one of {', '.join(TOO_LONG)}")
    if not all(isinstance(name, str) for name in _only(choice)):
        raise ValueError(f"dataset.only={choice.only!r}: give names of categories, as in dataset.only=[qa,rag]")


def _only(choice: Selection) -> list[str]:
    return [choice.only] if isinstance(choice.only, str) else list(choice.only or ())


def _categories(choice: Selection, prompts: Sequence[Prompt]) -> set[str]:
    """The categories to take, all of which exist; empty for all."""
    wanted = set(_only(choice))
    known = sorted({prompt.category for prompt in prompts})
    for name in sorted(wanted - set(known)):
        if not any(known):
            raise ValueError(f"dataset.only={name}: the prompts of this dataset have no categories")
        likely = difflib.get_close_matches(name, known, n=1) or known
        raise ValueError(f"dataset.only: the dataset has no category {name!r}: choose among {', '.join(likely)}")
    return wanted


def licenses(prompts: Sequence[Prompt]) -> dict[str, int]:
    """The number of prompts by licence, the commonest first; empty if the dataset says none."""
    return dict(Counter(prompt.license for prompt in prompts if prompt.license).most_common())


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash of the prompts' ids and texts: whether two runs measured the same."""
    facts = [
        # The rest only where there is some: so the hashes of all other prompts are what they have been.
        (p.id, p.turns, p.category, p.chat, *(rest for rest in (p.last_tokens, p.messages, p.tools) if rest))
        for p in prompts
    ]
    text = json.dumps(facts)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def warmup_texts(measured: Sequence[Prompt], spare: Sequence[Prompt], count: int) -> list[str]:
    """``count`` texts to warm up with, none of which is measured.

    Where there are too few, measured ones with their lines reversed stand in, which no drafter's memory profits from.
    """
    texts = [prompt.turns[0] for prompt in spare[:count]]
    for prompt in measured[: count - len(texts)]:
        texts.append("\n".join(reversed(prompt.turns[0].splitlines())) + " ")
    return texts
