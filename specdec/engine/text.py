"""Between text and tokens: prompts in, and output text as soon as it is final."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_REPLACEMENT = "\ufffd"
"""What an incomplete UTF-8 character decodes to."""
_CONTEXT = 8
"""Tokens decoded before new ones: enough for a tokenizer that treats the beginning of a text in its own way."""
_WINDOW = 24
"""Tokens after which the window moves on."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase | None, prompt: str) -> list[int]:
    """A prompt's tokens, with the special ones that the tokenizer adds.

    Raises:
        ValueError: There is no tokenizer, or no token.
    """
    if tokenizer is None:
        raise ValueError("a text prompt needs a tokenizer: give the Target one, or pass token ids")
    ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens: give at least one character")
    return ids


class Detokenizer:
    """Turns one request's output tokens into text, piece by piece.

    The pieces and the end that ``flush`` returns make up the text that decoding prompt and output together adds to
    the prompt's own, special tokens left out. Held back is the beginning of a character whose bytes are not
    complete, and whatever may be the beginning of a stop string.

    Only a window of the last tokens is decoded, so a piece costs the same however long the output is. (A byte-level
    tokenizer's text never changes when tokens follow, but for its last, incomplete character. One that spells
    unknown characters in byte tokens replaces *every* character of a run of them if one is malformed; what was
    returned by then stays.)

    Args:
        tokenizer: None for a target without one: all text is empty.
        prompt_ids: What stands before the output.
        stop: Strings that end the output.

    Attributes:
        stopped_at: How many tokens had been pushed, in all, when a stop string was complete, the token that
            completed it included; None while there was none.

    Raises:
        ValueError: There are stop strings and no tokenizer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, prompt_ids: Sequence[int], *, stop: tuple[str, ...] = ()
    ):
        if tokenizer is None and stop:
            raise ValueError("stop strings need a tokenizer: give the Target one, or use stop_token_ids")
        self.stopped_at: int | None = None
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)
        self._stop = stop
        self._held = ""  # text that may be the beginning of a stop string
        self._pushed = 0
        self._window: list[int] = []
        self._seen = ""  # the window's text so far: the prompt's, and what was taken from it
        self._whole = 0  # tokens of the window that end with a whole character
        if tokenizer is not None:
            self._begin(prompt_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that became final.

        Where a stop string completes, the text before it is returned, ``stopped_at`` is set, and what follows is
        ignored. Of several stop strings the one that ends first counts, and of those that end together the longest.
        """
        if self._tokenizer is None or self.stopped_at is not None:
            return ""
        before = (list(self._window), self._seen, self._whole)
        text = self._held + self._take(token_ids)
        found = _find(text, self._stop)
        if found is None:
            self._pushed += len(token_ids)
            keep = len(text) - _beginning_of_any(text, self._stop)
            self._held = text[keep:]
            return text[:keep]
        # It is in these tokens: go through them once more, one by one, for the one that completes it.
        self._window, self._seen, self._whole = before
        text = self._held
        for count, token in enumerate(token_ids, start=1):
            text += self._take([token])
            if _find(text, self._stop) is not None or count == len(token_ids):
                self.stopped_at = self._pushed + count
                break
        self._held = ""
        return text[:found]

    def flush(self) -> str:
        """The rest, when the output has ended: what was held back, and an incomplete character as U+FFFD."""
        if self._tokenizer is None or self.stopped_at is not None:
            return ""
        text = self._held + self._take([], final=True)
        self._held = ""
        return text

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        """Let the window be the end of the prompt, from a token on that begins a character."""
        size = _CONTEXT
        while True:
            self._window = list(prompt_ids[-size:])
            self._seen = self._decode(self._window)
            begins_well = self._seen and not self._seen.startswith(_REPLACEMENT)
            if begins_well or size >= min(len(prompt_ids), 8 * _CONTEXT):
                break
            size *= 2
        self._whole = 0 if self._seen.endswith(_REPLACEMENT) else len(self._window)

    def _take(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Add tokens to the window and return its new text."""
        self._window += token_ids
        text = self._decode(self._window)
        whole = text if final else text.rstrip(_REPLACEMENT)
        if len(whole) < len(text) and not whole.startswith(self._seen):
            return ""  # a prompt that ends inside a character, or a run of byte tokens that is malformed so far
        new = whole[_common(self._seen, whole) :]
        if new:
            self._seen = whole
        if len(whole) == len(text):
            self._move_on()
        return new

    def _move_on(self) -> None:
        """Note that the window ends with a whole character; drop what is before the last such place, if it is long.

        What stays must have some text: the beginning of a text is decoded in a way of its own (a space is lost),
        and special tokens alone do not end it.
        """
        if self._whole and len(self._window) > _WINDOW:
            rest = self._window[self._whole :]
            text = self._decode(rest)
            if text:
                self._window, self._seen = rest, text
        self._whole = len(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=True)
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _backend(tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """What ``decode`` of a plain fast tokenizer calls, without its conversions: a round decodes a few tokens."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    return tokenizer.backend_tokenizer if (kind.decode, kind._decode) == (plain.decode, plain._decode) else None


def _common(first: str, second: str) -> int:
    """Length of the common beginning of two texts."""
    if second.startswith(first):
        return len(first)
    return next(i for i, (a, b) in enumerate(zip(first + "\0", second + "\1", strict=False)) if a != b)


def _find(text: str, stop: tuple[str, ...]) -> int | None:
    """Where the stop string begins that ends first in the text, and of those that end together the longest."""
    found = [(begin + len(string), begin) for string in stop if (begin := text.find(string)) >= 0]
    return min(found)[1] if found else None


def _beginning_of_any(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest end of the text that is a beginning of a stop string."""
    longest = max((len(string) for string in stop), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-size:]) for string in stop):
            return size
    return 0
