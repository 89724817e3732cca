"""Prompts that do not fit into the engine: left out, shortened or refused, and said once for all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from experiments.datasets.prompt import Prompt
from experiments.measuring.jobs import render
from specdec.requests import SamplingParams

_LEAST = 16
"""Tokens that a shortened turn must keep; a conversation of which less would be left is left out."""
_GAP = "\n[...]\n"
"""Stands for the middle of a turn that was taken out."""


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """The prompts of a run, and what became of those that are too long.

    Attributes:
        prompts: What is run, shortened prompts included. With ``"fail"`` also those that the engine will refuse.
        chosen: How many there were.
        cut: How many were shortened.
        skipped: How many were left out.
        failing: How many are left to fail.
        longest: The most tokens that any of them needs, outputs included.
        room: The tokens that the engine has for a request.
        max_new_tokens: The part of that room that each output needs.
    """

    prompts: list[Prompt]
    chosen: int
    cut: int = 0
    skipped: int = 0
    failing: int = 0
    longest: int = 0
    room: int
    max_new_tokens: int

    @property
    def sentence(self) -> str | None:
        """A sentence for the reader, with the setting to change; None if everything fits."""
        count = self.cut + self.skipped + self.failing
        if not count:
            return None
        numbers = ((self.cut, "shortened"), (self.skipped, "left out"), (self.failing, "counted as failed"))
        done = ", ".join(f"{number} {word}" for number, word in numbers if number)
        others = {
            "shortened": "dataset.too_long=skip leaves them out",
            "left out": "dataset.too_long=cut shortens them",
            "counted as failed": "dataset.too_long=skip leaves them out, cut shortens them",
        }
        hint = next(others[word] for number, word in numbers if number)
        return (
            f"{count} of {self.chosen} prompts do not fit into engine.max_length={self.room} "
            f"with sampling.max_new_tokens={self.max_new_tokens} (the longest needs {self.longest}): {done}; {hint}"
        )

    @property
    def facts(self) -> dict[str, int] | None:
        """The same for the manifest; None if everything fits."""
        if not self.cut + self.skipped + self.failing:
            return None
        named = {"cut": self.cut, "skipped": self.skipped, "failing": self.failing}
        return {**named, "of": self.chosen, "longest": self.longest, "room": self.room}


def fit(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    policy: str = "skip",
    template: Mapping[str, Any] | None = None,
) -> Fitting:
    """Apply ``dataset.too_long`` to the prompts that do not fit.

    A conversation has to fit as a whole, with answers of full length. ``"skip"`` leaves a long prompt out. ``"cut"``
    keeps the end of a text that is to be continued; of a conversation it takes the middle out of the longest turn,
    because the task is stated at the beginning or at the end (the same is done in LongBench, Bai et al. 2023).
    ``"fail"`` leaves it as it is: the engine refuses it, and it counts as a failure of every method.

    Args:
        prompts: The chosen prompts.
        sampling: For the length of the outputs.
        tokenizer: The target's.
        max_length: Tokens that the engine has for a request.
        policy: ``"skip"``, ``"cut"`` or ``"fail"``.
        template: Further arguments of the chat template.

    Raises:
        ValueError: No prompt is left.
    """
    made: list[Prompt] = []
    counts = {"cut": 0, "skipped": 0, "failing": 0}
    longest = 0
    for prompt in prompts:
        needed = needed_tokens(prompt, sampling, tokenizer, template)
        if needed <= max_length:
            made.append(prompt)
            continue
        longest = max(longest, needed)
        shortened = _shorten(prompt, sampling, tokenizer, max_length, template) if policy == "cut" else None
        if shortened is not None:
            counts["cut"] += 1
            made.append(shortened)
        elif policy == "fail":
            counts["failing"] += 1
            made.append(prompt)
        else:
            counts["skipped"] += 1
    found = Fitting(
        prompts=made,
        chosen=len(prompts),
        longest=longest,
        room=max_length,
        max_new_tokens=sampling.max_new_tokens,
        **counts,
    )
    if not made:
        raise ValueError(f"no prompt fits: {found.sentence}" if prompts else "there are no prompts")
    return found


def needed_tokens(
    prompt: Prompt,
    sampling: SamplingParams,
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, Any] | None = None,
) -> int:
    """The tokens that a request of this prompt may come to: all of its turns, and an output of full length for each."""
    turns = len(prompt.turns)
    return len(render(prompt, tokenizer, [""] * (turns - 1), template=template)) + turns * sampling.max_new_tokens


def _shorten(
    prompt: Prompt,
    sampling: SamplingParams,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    template: Mapping[str, Any] | None,
) -> Prompt | None:
    """The prompt as it fits; None where hardly anything would be left of it."""
    if not prompt.chat:
        left = max_length - sampling.max_new_tokens
        return replace(prompt, last_tokens=left) if left >= _LEAST else None
    sizes = [len(tokenizer(turn, add_special_tokens=False)["input_ids"]) for turn in prompt.turns]
    which = max(range(len(sizes)), key=lambda turn: sizes[turn])
    ids = list(tokenizer(prompt.turns[which], add_special_tokens=False)["input_ids"])
    keep = len(ids)
    while True:
        # Text that is tokenized again may have some tokens more, so this may take a second step.
        keep -= needed_tokens(prompt, sampling, tokenizer, template) - max_length
        if keep < _LEAST:
            return None
        head, tail = ids[: keep // 2], ids[len(ids) - (keep - keep // 2) :]
        text = str(tokenizer.decode(head)) + _GAP + str(tokenizer.decode(tail))
        turns = (*prompt.turns[:which], text, *prompt.turns[which + 1 :])
        prompt = replace(prompt, turns=turns)
        if needed_tokens(prompt, sampling, tokenizer, template) <= max_length:
            return prompt
