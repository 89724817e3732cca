"""Turns prompts into tokens, and output tokens into text as soon as the text is final."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 character decodes to
_CONTEXT = 8  # prompt tokens decoded before the first new ones: some tokenizers treat a text's beginning in another way
_WINDOW = 24  # tokens after which the window moves on
# Lone surrogates, which Python's strings can hold and no decoded text contains. In the searched text they stand for a
# character that is incomplete at a special token, and for special tokens.
_GAP, _FIRST_SIGN = "\ud800", 0xD801


def encode_prompt(tokenizer: PreTrainedTokenizerBase | None, prompt: str) -> list[int]:
    """Returns a prompt's tokens, with the special ones that the tokenizer adds."""
    if tokenizer is None:
        raise ValueError("a text prompt needs a tokenizer: give the Target one, or pass token ids")
    ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens: give at least one character")
    return ids


class Detokenizer:
    """Turns one request's output tokens into text, piece by piece.

    Decoding prompt and output together gives a longer text than decoding the prompt alone, special tokens left out
    of both. The pieces, and the end that ``flush`` returns, make up that difference. Two things are held back until
    more tokens have come: a character whose bytes are incomplete, and text that may be the beginning of a stop string.

    A special token has no text, but a stop string may name one (``"<|im_end|>"``, or ``"</s>"`` with text around it).
    Such a token then counts with its whole text in the search for the stop string, and still not in the output.

    Only a window of the last tokens is decoded, so a piece costs the same however long the output is. The text of a
    byte-level tokenizer never changes when tokens follow, except for its last, incomplete character. Other tokenizers
    spell unknown characters in byte tokens, and replace *every* character of a run of them if one is malformed; text
    that was returned before that stays as it was. Without a tokenizer all text is empty.

    Attributes:
        stopped_at: The number of tokens up to and including the one that completed a stop string, counted over all
            pushes; None while no stop string is complete.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, prompt_ids: Sequence[int], *, stop: tuple[str, ...] = ()
    ):
        self.stopped_at: int | None = None
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)
        named = {} if tokenizer is None else _special_tokens(tokenizer, stop)
        named = {token: text for token, text in named.items() if not self._decode([token])}
        sign_of = {text: chr(_FIRST_SIGN + number) for number, text in enumerate(sorted(set(named.values())))}
        self._signs = {token: sign_of[text] for token, text in named.items()}
        self._unseen = frozenset([_GAP, *sign_of.values()])
        self._stop = stop
        self._signed = _with_signs(stop, sign_of)
        self._incomplete = ""  # the text of the character at the last gap
        self._held = ""  # text that may be the beginning of a stop string
        self._pushed = 0
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
        before = (list(self._window), self._seen, self._whole, self._incomplete)
        text = self._held + self._searched(token_ids)
        found = self._find(text)
        if found is None:
            self._pushed += len(token_ids)
            keep = self._final(text)
            self._held = text[keep:]
            return self._shown(text[:keep])
        # A stop string is in these tokens. Go through them once more, one by one, to find the one that completes it.
        self._window, self._seen, self._whole, self._incomplete = before
        text = self._held
        for count, token in enumerate(token_ids, start=1):
            text += self._searched([token])
            if self._find(text) is not None or count == len(token_ids):
                self.stopped_at = self._pushed + count
                break
        self._held = ""
        return self._shown(text[:found]) + (self._incomplete if text[:found].endswith(_GAP) else "")

    def flush(self) -> str:
        """Returns the text that was held back; an incomplete character becomes U+FFFD."""
        if self._tokenizer is None or self.stopped_at is not None:
            return ""
        text = self._held + self._take([], final=True)
        self._held = ""
        return self._shown(text)

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

    def _searched(self, token_ids: Sequence[int]) -> str:
        """Add tokens to the window and return its new text, with a sign for each special token."""
        if not self._signs:
            return self._take(token_ids)
        text, start = "", 0
        for position, token in enumerate(token_ids):
            if token in self._signs:
                text += self._take(token_ids[start:position])
                if self._whole < len(self._window):
                    text += _GAP  # a stop string must not reach over a character that is still missing
                    decoded = self._decode(self._window)
                    self._incomplete = decoded[_common(self._seen, decoded) :]
                text += self._take([token]) + self._signs[token]
                start = position + 1
        return text + self._take(token_ids[start:])

    def _find(self, text: str) -> int | None:
        """Returns where in the searched text the stop string begins that ends first.

        If several end together it is the longest. A stop string may also stand in the shown text, across a sign.
        """
        found = [(begin + len(string), begin) for string in self._signed if (begin := text.find(string)) >= 0]
        if self._signs:
            shown = self._shown(text)
            places = [place for place, letter in enumerate(text) if letter not in self._unseen]
            begins = [(shown.find(string), len(string)) for string in self._stop]
            found += [(places[begin + length - 1] + 1, places[begin]) for begin, length in begins if begin >= 0]
        return min(found)[1] if found else None

    def _final(self, text: str) -> int:
        """Returns how much of a searched text can no longer be the beginning of a stop string."""
        end = len(text) - _beginning_of_any(text, self._signed)
        if self._signs:
            places = [place for place, letter in enumerate(text) if letter not in self._unseen]
            held = _beginning_of_any(self._shown(text), self._stop)
            end = min(end, places[-held]) if held else end
        return end

    def _shown(self, text: str) -> str:
        """Returns the searched text without its signs."""
        return "".join(letter for letter in text if letter not in self._unseen) if self._signs else text

    def _take(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Add tokens to the window and return its new text."""
        self._window += token_ids
        text = self._decode(self._window)
        whole = text if final else text.rstrip(_REPLACEMENT)
        if len(whole) < len(text) and not whole.startswith(self._seen):
            return ""  # the prompt ends inside a character, or a run of byte tokens is malformed so far
        new = whole[_common(self._seen, whole) :]
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
    """Returns the function behind a fast tokenizer's ``decode``, without conversions that cost more than it does.

    None if the tokenizer has a ``decode`` of its own.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    return tokenizer.backend_tokenizer if (kind.decode, kind._decode) == (plain.decode, plain._decode) else None


def _special_tokens(tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> dict[int, str]:
    """Returns the special tokens whose text is in a stop string, with their text."""
    if not stop:
        return {}
    special = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return {token: text for token, text in special.items() if text and any(text in string for string in stop)}


def _with_signs(stop: tuple[str, ...], sign_of: dict[str, str]) -> tuple[str, ...]:
    """Returns the stop strings as they are (ordinary tokens may make them up), and those with signs in them."""
    spelled = list(stop)
    for string in stop:
        for text in sorted(sign_of, key=len, reverse=True):  # a long one may contain a short one
            string = string.replace(text, sign_of[text])
        if string not in spelled:
            spelled.append(string)
    return tuple(spelled)


def _common(first: str, second: str) -> int:
    if second.startswith(first):
        return len(first)
    return next(i for i, (a, b) in enumerate(zip(first + "\0", second + "\1", strict=False)) if a != b)


def _beginning_of_any(text: str, stop: tuple[str, ...]) -> int:
    """Returns the length of the longest end of the text that is the beginning of a stop string."""
    longest = max((len(string) for string in stop), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-size:]) for string in stop):
            return size
    return 0
