"""Prompts of planned lengths, made of a dataset's texts: joined and cut, never random tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from experiments.datasets.prompt import Prompt
from experiments.load.workloads import Pieces, Planned
from specdec.requests import SamplingParams

_BETWEEN = "\n\n"
_MARK = "\u2063prompt\u2063"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request with its tokens, ready to be submitted."""

    planned: Planned
    prompt_ids: Sequence[int]
    sampling: SamplingParams


class Texts:
    """Makes prompts of the texts of a dataset.

    All texts stand one behind the other, in an order that is drawn. A piece of a prompt is cut from there, so that it
    ends where a text ends, and no text is used again before all of them were. What goes in front of every prompt, and
    behind it, is the tokenizer's own: special tokens, and the chat template where the dataset is of conversations.

    Args:
        prompts: The texts; of a conversation, the first turn.
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
        self._used, self._passes = 0, 0
        self._places: dict[int, int] = {}  # where the pieces of a number end
        self._front, self._back = _around(tokenizer, template, chat=prompts[0].chat)

    @property
    def passes(self) -> float:
        """How often the texts were used; above 1, prompts come again."""
        return self._passes + self._used / len(self._stream)

    def prompt(self, pieces: Pieces) -> list[int]:
        """Return the tokens of a prompt, as many as the pieces have unless its frame alone is longer."""
        ids = np.concatenate([self._piece(number, tokens) for number, tokens in pieces])
        room = max(len(ids) - len(self._front) - len(self._back), 1)
        return [*self._front, *ids[:room].tolist(), *self._back]

    def _piece(self, number: int, tokens: int) -> np.ndarray:
        if number not in self._places:
            self._places[number] = self._next(tokens)
        begin = self._places[number]
        return np.take(self._stream, range(begin, begin + tokens), mode="wrap")

    def _next(self, tokens: int) -> int:
        """Return where a new piece begins, which ends with a text."""
        place = int(np.searchsorted(self._ends, self._used + tokens))
        if place == len(self._ends):  # all were used: from the front again, a little further on
            self._passes, self._used = self._passes + 1, 0
            place = min(int(np.searchsorted(self._ends, tokens + 7 * self._passes)), len(self._ends) - 1)
        self._used = int(self._ends[place])
        return self._used - tokens


def ask(planned: Sequence[Planned], texts: Texts | None, sampling: SamplingParams) -> list[Asked]:
    """Return requests with their parameters, and with tokens if there are texts; the random stream is the number."""
    asked = []
    for number, request in enumerate(planned):
        params = {name: getattr(request, name) for name in ("priority", "deadline")}
        params |= {"max_new_tokens": request.output_tokens, "stream": number, "n": 1}
        ids = () if texts is None or not request.fits else texts.prompt(request.pieces)
        asked.append(Asked(planned=request, prompt_ids=ids, sampling=replace(sampling, **params)))
    return asked


def _around(
    tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None, *, chat: bool
) -> tuple[list[int], list[int]]:
    """Return the tokens before and behind a text: those of the chat template, or the tokenizer's special ones."""
    if not chat or not tokenizer.chat_template:
        with_them = list(tokenizer("a").input_ids)
        count = len(with_them) - len(tokenizer("a", add_special_tokens=False).input_ids)
        return (with_them[:count] if with_them[:1] and with_them[0] in tokenizer.all_special_ids else []), []
    message = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False, **dict(template or {}))
    front, _, back = str(text).partition(_MARK)
    ids = [tokenizer(part, add_special_tokens=False).input_ids if part else [] for part in (front, back)]
    return ids[0], ids[1]
