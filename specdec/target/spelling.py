"""Tokens as the bytes that they spell: the tokens that two tokenizers share, and text from one in the other's."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece vocabularies name the token of a single byte
_SPACE = "\u2581"  # how they write a space
_PIECE = re.compile(r"\s*\S+|\s+")  # a word with the white space before it: tokens hardly ever go beyond its end
_LETTER = "a"  # stands before a piece from the middle of a text, so that it is not taken for the beginning of one
_PIECES = 1 << 16  # whose tokens are remembered


def token_bytes(tokens: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Return the text of each known token inside a longer text, as UTF-8 bytes; special tokens by their names."""
    special = {token: str(added) for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    signs, count = _decoder(tokenizer), len(tokenizer)
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()} if b'"ByteLevel"' in signs else None
    spaced = f'"{_SPACE}"'.encode() in signs
    found: dict[int, bytes] = {}
    for token in sorted({int(token) for token in tokens}):
        name = None if not 0 <= token < count else tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            continue
        byte = _BYTE.fullmatch(name)
        if token in special:
            found[token] = special[token].encode()
        elif byte is not None:
            found[token] = bytes([int(byte[1], 16)])
        elif letters is not None and all(letter in letters for letter in name):
            found[token] = bytes(letters[letter] for letter in name)
        elif spaced:
            found[token] = name.replace(_SPACE, " ").encode()
        else:
            found[token] = _inside(token, tokenizer).encode()
    return found


class Spelling:
    """The tokens of a tokenizer, and the bytes that they spell.

    Attributes:
        bytes: The text of every token inside a longer text; empty for special tokens, and for ids that are none.
        tokens: The token of a text that one token spells; of several one that is no byte token, then the lowest.
        special: The special tokens by their names.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, width: int):
        """Read a vocabulary up to the width of its model's logits."""
        self._tokenizer: Any = tokenizer
        named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        named |= {str(added): token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self.special = {name: token for name, token in named.items() if token < width}
        texts = token_bytes(range(width), tokenizer)
        texts |= dict.fromkeys(named.values(), b"")
        self.bytes = [texts.get(token, b"") for token in range(width)]
        names = tokenizer.convert_ids_to_tokens(list(range(min(width, len(tokenizer)))))
        order = sorted(range(len(names)), key=lambda token: bool(_BYTE.fullmatch(names[token] or "")))
        self.tokens = {self.bytes[token]: token for token in reversed(order) if self.bytes[token]}
        plain, whole = (list(tokenizer(_LETTER, add_special_tokens=each)["input_ids"]) for each in (False, True))
        self.begin: list[int] = whole[: whole.index(plain[0])] if plain and plain[0] in whole else []
        self._of_piece = lru_cache(maxsize=_PIECES)(self._tokens_of)

    def common(self, other: "Spelling") -> list[tuple[int, int]]:
        """Return the tokens that spell the same in both, as pairs of own and other id, by the own one."""
        return sorted((token, other.tokens[text]) for text, token in self.tokens.items() if text in other.tokens)

    def of(self, pieces: Iterable[str | bytes], *, begins: bool = False) -> list[int]:
        """Return the tokens of a text's pieces (``split``), which it may ``begin`` with; other bytes are left out."""
        found: list[int] = []
        for place, piece in enumerate(pieces):
            if isinstance(piece, bytes):
                found += [self.tokens[piece]] if piece in self.tokens else []
            else:
                found += self._of_piece(piece, begins and place == 0)
        return found

    def after(self, text: bytes, new: bytes) -> list[int]:
        """Return the tokens of new text behind another: of both together, if one of them begins where it begins."""
        tokens = self.of(split(text + new))
        ends = itertools.accumulate((len(self.bytes[token]) for token in tokens), initial=0)
        place = next((place for place, end in enumerate(ends) if end == len(text)), None)
        return self.of(split(new)) if place is None else tokens[place:]

    def _tokens_of(self, piece: str, begins: bool) -> list[int]:
        if not begins:
            before = _LETTER if piece[0].isspace() else "\n"
            known, found = self._encode(before), self._encode(before + piece)
            if found[: len(known)] == known:
                return found[len(known) :]
        return self._encode(piece)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


class Retokenized:
    """A growing sequence of the tokens of ``source``, as those of ``own``: a function of the sequence alone.

    All but the last piece of the text (``tail``) is settled, so that reading on costs little. Special tokens become
    those of the same name, or nothing.
    """

    def __init__(self, source: Spelling, own: Spelling):
        self._source, self._own = source, own
        self._names = {token: name for name, token in source.special.items()}
        self._settled, self._read = list(own.begin), 0
        self.tail = b""

    def read(self, sequence: Sequence[int]) -> list[int]:
        """Take note of what is new of a sequence, and return all of it in the other's tokens."""
        text = [self.tail]
        for token in sequence[self._read :]:
            if token in self._names:
                self._settled += self._tokens([*split(b"".join(text))])
                text = []
                named = self._own.special.get(self._names[token])
                self._settled += [] if named is None or self._settled == [named] else [named]
            else:
                text.append(self._source.bytes[token])
        self._read = len(sequence)
        pieces = [*split(b"".join(text))]
        last = max((place for place, piece in enumerate(pieces) if isinstance(piece, str)), default=0)
        self._settled += self._tokens(pieces[:last])
        self.tail = b"".join(piece.encode() if isinstance(piece, str) else piece for piece in pieces[last:])
        return self._settled + self._tokens(pieces[last:])

    def _tokens(self, pieces: list[str | bytes]) -> list[int]:
        return self._own.of(pieces, begins=len(self._settled) == len(self._own.begin))


def split(text: bytes) -> Iterator[str | bytes]:
    """Yield the pieces of a text, and between them, one by one, bytes that are no whole character."""
    while text:
        try:
            whole, odd = text.decode(), b""
        except UnicodeDecodeError as error:
            whole, odd = text[: error.start].decode(), text[error.start : error.end]
        yield from _PIECE.findall(whole)
        yield from (odd[place : place + 1] for place in range(len(odd)))
        text = text[len(whole.encode()) + len(odd) :]


def _decoder(tokenizer: Any) -> bytes:
    """Return how a fast tokenizer makes text of tokens, as JSON."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return b'"ByteLevel"' if hasattr(tokenizer, "byte_decoder") else b""
    return b"" if backend.decoder is None else backend.decoder.__getstate__()


def _inside(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that a token adds to one that it does not begin: many tokenizers drop the space that begins a text."""
    once, twice = (
        str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for ids in ([token], [token, token])
    )
    return twice.removeprefix(once)
