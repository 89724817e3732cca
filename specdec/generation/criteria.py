"""Finds out where a row of ``generate`` ends, from transformers' stopping criteria."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StopStringCriteria

from specdec.generation.config import token_ids


class Endings:
    """What ends the rows of one call of ``generate``.

    Stop strings are left to transformers' own criterion, which no longer needs a tokenizer once it is made. It also
    finds a string that begins in the prompt, where our engine's own search for stop strings does not look.

    Args:
        criteria: What ``generate`` prepared.
        stop_strings: Strings besides those of the criteria.
        tokenizer: Needed for ``stop_strings``.

    Attributes:
        max_length: The number of tokens of prompt and output together, padding included.
        eos_ids: Tokens that end a row.

    Raises:
        ValueError: A criterion is of a kind that this engine does not have, there is no length limit, or there are
            stop strings and no tokenizer.
    """

    def __init__(
        self,
        criteria: Sequence[StoppingCriteria],
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None,
    ):
        # By exact type: a subclass may do something else.
        unknown = [
            type(c).__name__
            for c in criteria
            if type(c) not in (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)
        ]
        if unknown:
            raise ValueError(
                f"stopping criteria {', '.join(unknown)} are not supported: use max_new_tokens, EOS or stop_strings"
            )
        limits = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        if not limits:
            raise ValueError("generate has no length limit: pass max_new_tokens")
        self.max_length = min(limits)
        self.eos_ids = [t for c in criteria if isinstance(c, EosTokenCriteria) for t in token_ids(c.eos_token_id)]
        self._strings = [c for c in criteria if isinstance(c, StopStringCriteria)]
        if stop_strings:
            if tokenizer is None:
                raise ValueError(
                    f"stop_strings={stop_strings!r} need a tokenizer, and transformers does not pass its own argument "
                    f"on: make this SpeculativeGenerate(..., tokenizer=tokenizer)"
                )
            several = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
            self._strings.append(StopStringCriteria(tokenizer, several))
        # A token of a stop string is at least one byte of it, so more tokens than this never matter.
        self._window = max((len(text.encode()) for c in self._strings for text in c.stop_strings), default=0)

    @property
    def has_strings(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._strings)

    def cut(self, before: Sequence[int], tokens: Sequence[int]) -> int | None:
        """Returns how many new tokens there are up to the end of a stop string; None if none ends in them.

        Args:
            before: The row so far, padding and prompt included.
            tokens: New tokens.
        """
        row = [*before[-self._window :], *tokens]
        for count in range(1, len(tokens) + 1):
            end = len(row) - len(tokens) + count
            seen = torch.tensor([row[max(0, end - self._window) : end]])
            # transformers asks for a LongTensor, which a tensor of integers is.
            if any(bool(criterion(seen, None)) for criterion in self._strings):  # pyright: ignore[reportArgumentType]
                return count
        return None
