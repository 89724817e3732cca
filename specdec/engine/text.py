"""Turns prompts into tokens, and output tokens into text as soon as the text is final."""

import warnings
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 character decodes to
_CONTEXT = 8  # prompt tokens decoded before the first new ones: some tokenizers treat a text's beginning in another way
_WINDOW = 24  # tokens after which the window moves on
Stop = tuple[str, ...]


def encode_prompt(tokenizer: PreTrainedTokenizerBase | None, prompt: str) -> list[int]:
    """Returns a prompt's tokens, with the special ones that the tokenizer adds."""
    if tokenizer is None:
        raise ValueError("a text prompt needs a tokenizer: give the Target one, or pass token ids")
    ids = tokenizer(whole_text("the prompt", prompt))["input_ids"]
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens: give at least one character")
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        warnings.warn("a prompt begins with two BOS tokens: give chat messages, or token ids, instead", stacklevel=2)
    return ids


def whole_text(name: str, given: str) -> str:
    """Returns a text, without half of a surrogate pair, which no tokenizer, file or answer takes."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        half = ascii(given[error.start])
        raise ValueError(f"{name} has half of a character, {half} at place {error.start}: leave it out") from error
    return given


class Detokenizer:
    """Turns one request's output tokens into text, piece by piece.

    Decoding prompt and output together gives a longer text than decoding the prompt alone, special tokens left out
    of both. The pieces, and the end that ``flush`` returns, make up that difference. Two things are held back until
    more tokens have come: a character whose bytes are incomplete, and text that may be the beginning of a stop string.

    Only a window of the last tokens is decoded, so a piece costs the same however long the output is. The text of a
    byte-level tokenizer never changes when tokens follow, except for its last, incomplete character. Other tokenizers
    spell unknown characters in byte tokens, and replace *every* character of a run of them if one is malformed; text
    that was returned before that stays as it was. Without a tokenizer all text is empty.

    Attributes:
        stopped_at: The number of tokens up to and including the one that completed a stop string, counted over all
            pushes; None while no stop string is complete. One that ends in the text of the first ``least`` tokens
            is none.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, prompt_ids: Sequence[int], *, stop: Stop = (), least: int = 0
    ):
        self.stopped_at: int | None = None
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)
        self._stop = stop
        self._held = ""  # text that may be the beginning of a stop string
        self._early = 0  # characters of it in which none may end
        self._pushed, self._least = 0, least
        self._window: list[int] = []
        self._seen = ""  # the window's text so far: the prompt's, and what was taken from it
        self._whole = 0  # number of the window's tokens after which the last character was complete
        if tokenizer is not None:
            self._begin(prompt_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that became final; a stop string and all behind it is left out.

        If several stop strings are complete, the one that ends first counts; if several end together, the longest.
        """
        if self._tokenizer is None or self.stopped_at is not None:
            return ""
        if self._stop and 0 < (early := self._least - self._pushed) < len(token_ids):
            return self.push(token_ids[:early]) + self.push(token_ids[early:])
        before = (list(self._window), self._seen, self._whole)
        text = self._held + self._take(token_ids)
        if self._pushed < self._least:
            self._early = len(text)
        found = self._find(text)
        if found is None:
            self._pushed += len(token_ids)
            keep = len(text) - _beginning_of_any(text, self._stop)
            self._held, self._early = text[keep:], max(0, self._early - keep)
            return text[:keep]
        # A stop string is in these tokens. Go through them once more, one by one, to find the one that completes it.
        self._window, self._seen, self._whole = before
        text = self._held
        for count, token in enumerate(token_ids, start=1):
            text += self._take([token])
            if self._find(text) is not None or count == len(token_ids):
                self.stopped_at = self._pushed + count
                break
        self._held = ""
        return text[:found]

    def flush(self) -> str:
        """Returns the text that was held back; an incomplete character becomes U+FFFD."""
        if self._tokenizer is None or self.stopped_at is not None:
            return ""
        text, self._held = self._held + self._take([], final=True), ""
        return text

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        """Start the window with the prompt's last tokens, the first of which begins a character."""
        size = _CONTEXT
        while True:
            self._window = list(prompt_ids[-size:])
            self._seen = self._decode(self._window)
            begins_well = self._seen and not self._seen.startswith(_REPLACEMENT)
            if begins_well or size >= min(len(prompt_ids), 8 * _CONTEXT):
                break
            size *= 2
        self._whole = 0 if self._seen.endswith(_REPLACEMENT) else len(self._window)

    def _find(self, text: str) -> int | None:
        """Returns where in a text the stop string begins that ends first; of several that end together, the longest."""
        first = {string: text.find(string, max(0, self._early + 1 - len(string))) for string in self._stop}
        found = [(begin + len(string), begin) for string, begin in first.items() if begin >= 0]
        return min(found)[1] if found else None

    def _take(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Add tokens to the window and return its new text."""
        self._window += token_ids
        text = self._decode(self._window)
        whole = text if final else text.rstrip(_REPLACEMENT)
        if len(whole) < len(text) and not whole.startswith(self._seen):
            return ""  # the prompt ends inside a character, or a run of byte tokens is malformed so far
        apart = (place for place, pair in enumerate(zip(self._seen, whole, strict=False)) if pair[0] != pair[1])
        new = whole[len(self._seen) if whole.startswith(self._seen) else next(apart, len(whole)) :]
        if new:
            self._seen = whole
        if len(whole) == len(text):
            self._move_on()
        return new

    def _move_on(self) -> None:
        """Note that the window ends with a whole character; shorten a long window to its tokens after the last note.

        The tokens that stay must have some text. Otherwise the next ones would be decoded as the beginning of a text,
        where tokenizers drop a space.
        """
        if self._whole and len(self._window) > _WINDOW:
            rest = self._window[self._whole :]
            text = self._decode(rest)
            if text:
                self._window, self._seen = rest, text
            elif self._decode(self._window[: self._whole]) == self._seen:
                del self._window[self._whole :]  # special tokens, which would make the window ever longer
        self._whole = len(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=True)
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _backend(tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """Returns the function behind a fast tokenizer's ``decode``; None if the tokenizer has one of its own."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    return tokenizer.backend_tokenizer if (kind.decode, kind._decode) == (plain.decode, plain._decode) else None


def unseen_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Returns the special tokens that no text shows, by their names."""
    named = {str(added): token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    named |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {name: token for name, token in named.items() if not tokenizer.decode([token], skip_special_tokens=True)}


def _beginning_of_any(text: str, stop: Stop) -> int:
    """Returns the length of the longest end of the text that is the beginning of a stop string."""
    longest = max((len(string) for string in stop), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-size:]) for string in stop):
            return size
    return 0
