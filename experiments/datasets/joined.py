"""Real prompts joined, and cut, to the lengths that are wanted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from experiments.datasets.context import CHARACTERS, check_lengths
from experiments.datasets.prompt import Dataset, Prompt, Selection

Pieces = tuple[tuple[int, int], ...]
"""The parts of a prompt in order: a number and a count of tokens each. Parts of one number begin alike."""
_BETWEEN = "\n\n"  # joined prompts
_MARK = "\u2063prompt\u2063"
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
    group, lines, size = list[Prompt](), set[str](), 0
    for prompt in prompts:
        text = prompt.turns[0]  # a later one is about an answer
        long_lines = {line.strip() for line in text.splitlines() if len(line.strip()) >= _LONG_LINE}
        if long_lines & lines:
            continue
        group.append(prompt)
        lines |= long_lines
        size += len(text) + len(_BETWEEN)
        if size >= length:
            yield group
            group, lines, size = [], set(), 0


def _as_one(group: Sequence[Prompt], tokens: int) -> Prompt:
    last = group[-1]
    return Prompt(
        id=last.id if len(group) == 1 else f"{last.id} behind {len(group) - 1} others",
        turns=(_BETWEEN.join(prompt.turns[0] for prompt in group),),
        category=last.category,
        chat=last.chat,
        last_tokens=tokens,
        license="; ".join(dict.fromkeys(prompt.license for prompt in group if prompt.license)),
    )


class Texts:
    """Prompts of planned lengths from the texts of a dataset: joined and cut, never random tokens.

    All texts (of a conversation, the first turn) stand one behind the other, in an order that is drawn. A piece of a
    prompt is cut from there, so that it ends where a text ends. Every prompt stands between the tokenizer's special
    tokens, or in the chat template where the dataset is of conversations.

    Attributes:
        passes: How often the texts were used up; from 1 on, prompts come again.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        rng: np.random.Generator,
        *,
        template: Mapping[str, Any] | None = None,
    ):
        order = [prompts[place].turns[0] for place in rng.permutation(len(prompts))]
        between = list(tokenizer(_BETWEEN, add_special_tokens=False).input_ids)
        ids = [[*tokenizer(text, add_special_tokens=False).input_ids, *between] for text in order]
        self._stream = np.concatenate([np.asarray(text, dtype=np.int64) for text in ids])
        self._ends = np.cumsum([len(text) for text in ids]) - len(between)
        self._used, self.passes = 0, 0
        self._places: dict[int, int] = {}  # where the pieces of a number begin
        self._front, self._back = _around(tokenizer, template, chat=prompts[0].chat)

    def prompt(self, pieces: Pieces) -> list[int]:
        """The tokens of a prompt, as many as the pieces have unless what stands around it is longer."""
        ids = np.concatenate([self._piece(number, tokens) for number, tokens in pieces])
        room = max(len(ids) - len(self._front) - len(self._back), 1)
        return [*self._front, *ids[:room].tolist(), *self._back]

    def _piece(self, number: int, tokens: int) -> np.ndarray:
        if number not in self._places:
            place = int(np.searchsorted(self._ends, self._used + tokens))
            if place == len(self._ends):  # all were used: from the front again, a little further on
                self.passes += 1
                place = min(int(np.searchsorted(self._ends, tokens + 7 * self.passes)), len(self._ends) - 1)
            self._used = int(self._ends[place])
            self._places[number] = self._used - tokens
        begin = self._places[number]
        return np.take(self._stream, range(begin, begin + tokens), mode="wrap")


def _around(
    tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None, *, chat: bool
) -> tuple[list[int], list[int]]:
    """The tokens before and behind a text: those of the chat template, or the tokenizer's special ones."""
    if not chat or not tokenizer.chat_template:
        with_them = list(tokenizer("a").input_ids)
        count = len(with_them) - len(tokenizer("a", add_special_tokens=False).input_ids)
        return (with_them[:count] if with_them[:1] and with_them[0] in tokenizer.all_special_ids else []), []
    message = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False, **dict(template or {}))
    front, _, back = str(text).partition(_MARK)
    ids = [tokenizer(part, add_special_tokens=False).input_ids if part else [] for part in (front, back)]
    return ids[0], ids[1]
