"""A corpus of tokens with its suffix array, in one file that is read as it lies: what follows a text there?

The suffix array (Manber and Myers 1993) has the places of the corpus in the order of what stands there, so that all
places at which a string begins lie together, and are found by bisection.
"""

import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from specdec.target.target import Target

BUILD = "python examples/corpus.py"
_KIND = "specdec corpus 1"
_MOST = 2**31 - 1


class Match(NamedTuple):
    """The places, from begin to end in the suffix array, at which the last ``length`` tokens of a text stand."""

    length: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents of one tokenizer, one behind the other.

    Attributes:
        tokens: Their tokens, each document followed by the separator.
        suffixes: The suffix array: place i is that of the i-th smallest rest of ``tokens``.
        separator: The token behind every document: EOS, or -1 where the tokenizer has none.
        notes: ``tokenizer``, its name, and ``hash``, ``tokenizer_hash`` of it; empty if tokens were given.
    """

    tokens: Int[np.ndarray, " position"]
    suffixes: Int[np.ndarray, " position"]
    separator: int
    name: str = "corpus"
    notes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        documents: Iterable[Sequence[int] | Int[np.ndarray, " position"]],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        separator: int | None = None,
        name: str = "corpus",
    ) -> "Corpus":
        """Return a corpus of the tokens of these documents, in memory."""
        if separator is None:
            end = None if tokenizer is None else tokenizer.eos_token_id
            separator = end if isinstance(end, int) else -1
        parts: list[np.ndarray] = []
        for document in documents:
            tokens = np.asarray(document)
            if tokens.size:
                if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() > _MOST:
                    raise ValueError(
                        f"document {len(parts)} of the corpus {name} is no list of token ids: give whole numbers from 0"
                    )
                parts += [tokens.astype(np.int32), np.array([separator], dtype=np.int32)]
        whole = sum(map(len, parts))
        if not 0 < whole <= _MOST:
            raise ValueError(f"the corpus {name} has {whole:,} tokens: give 1 to {_MOST:,}")
        together = np.concatenate(parts)
        notes = {}
        if tokenizer is not None:
            notes = {"tokenizer": str(tokenizer.name_or_path), "hash": tokenizer_hash(tokenizer)}
        return cls(together, suffix_array(together), separator, name, notes)

    @classmethod
    def open(cls, path: str | Path) -> "Corpus":
        """Return a corpus whose file is mapped into memory: only what is looked at is read."""
        file = Path(path).expanduser()
        if not file.is_file():
            raise ValueError(f"corpus={path}: there is no such file; make one with {BUILD} {path} FILES")
        try:
            with safe_open(file, "pt") as stored:  # as torch's tensors, which are mapped
                notes = stored.metadata() or {}
                if notes.get("kind") != _KIND:
                    raise ValueError("it is of another kind")
                tokens, suffixes = (stored.get_tensor(name).numpy() for name in ("tokens", "suffixes"))
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f"corpus={path}: this is no whole corpus of tokens ({error}); make one with {BUILD}"
            ) from error
        for array in (tokens, suffixes):
            array.setflags(write=False)
        known = {name: notes[name] for name in ("tokenizer", "hash") if name in notes}
        return cls(tokens, suffixes, int(notes["separator"]), str(path), known)

    def save(self, path: str | Path) -> None:
        """Write the corpus, in one step."""
        file = Path(path).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        notes = {"kind": _KIND, "separator": str(self.separator), **self.notes}
        try:
            save_file({"tokens": self.tokens, "suffixes": self.suffixes}, part, metadata=notes)
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)

    def check(self, target: Target) -> None:
        """Refuse a target whose tokenizer gives tokens other numbers, or lacks some of the corpus's."""
        known = self.notes.get("hash")
        if known is not None and target.tokenizer is not None and tokenizer_hash(target.tokenizer) != known:
            raise ValueError(
                f"the corpus {self.name} has the tokens of another tokenizer ({self.notes['tokenizer']}) than the "
                f"target {target.name}: make one with {BUILD} --tokenizer {target.name}"
            )
        # The last of the sorted suffixes begins with the largest token.
        largest = int(self.tokens[self.suffixes[-1]])
        if largest >= target.vocab_size:
            raise ValueError(
                f"the corpus {self.name} has token {largest}, and the target {target.name} has {target.vocab_size} "
                f"tokens: make one with {BUILD} --tokenizer {target.name}"
            )

    def longest(self, text: Int[np.ndarray, " position"], most: int | None = None) -> Match:
        """Returns where the longest end of a text stands, of at most ``most`` tokens, by doubling and bisection."""
        room, matches = len(text) if most is None else min(most, len(text)), {0: Match(0, 0, 0)}

        def misses(length: int) -> bool:
            match = self._find(text[len(text) - length :].tolist())
            if match is not None:
                matches[length] = match
            return match is None

        high = 1
        while high <= room and not misses(high):
            high *= 2
        bisect_left(range(high // 2 + 1, min(high, room + 1)), True, key=misses)
        return matches[max(matches)]

    def first(self, match: Match, count: int) -> list[int]:
        """The tokens that follow where a match stands first, to the end of the document."""
        place = int(self.suffixes[match.begin : match.end].min()) + match.length
        return self._to_separator(np.array([place]), count)[0].tolist()

    def continuations(self, match: Match, hits: int, count: int) -> Int[np.ndarray, "hit depth"]:
        """The tokens behind each of ``hits`` places of a match, ascending; -1 behind the end of a document."""
        found = match.end - match.begin
        at = np.arange(found) if found <= hits else np.arange(hits) * found // hits
        return self._to_separator(self.suffixes[match.begin + at].astype(np.int64) + match.length, count)

    def _to_separator(self, places: Int[np.ndarray, " hit"], count: int) -> Int[np.ndarray, "hit depth"]:
        at = places[:, None] + np.arange(count)
        tokens = np.where(at < len(self.tokens), self.tokens.take(at, mode="clip"), -1)
        ended = np.logical_or.accumulate(tokens == self.separator, axis=1)
        tokens[:, 1:][ended[:, :-1]] = -1
        return tokens

    def _find(self, string: list[int]) -> Match | None:
        tokens, suffixes, length = self.tokens, self.suffixes, len(string)

        def begins(order: int) -> list[int]:
            place = int(suffixes[order])
            return tokens[place : place + length].tolist()

        every = range(len(suffixes))
        begin = bisect_left(every, string, key=begins)
        if begin == len(suffixes) or begins(begin) != string:
            return None
        return Match(length, begin, bisect_right(every, string, lo=begin, key=begins))


def suffix_array(tokens: Int[np.ndarray, " position"]) -> Int[np.ndarray, " position"]:
    """Returns places in the order of the arrays that begin there: ``[2, 1, 2, 1]`` gives ``[3, 1, 2, 0]``."""
    count = len(tokens)
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    order, step = np.argsort(rank), 1
    while rank[order[-1]] < count - 1:
        behind = np.zeros(count, dtype=np.int64)  # the end comes before every token
        behind[: count - step] = rank[step:] + 1
        key = rank * (count + 1) + behind
        order = np.argsort(key)
        ascending = key[order]
        rank[order] = np.concatenate([[0], np.cumsum(ascending[1:] != ascending[:-1])])
        step *= 2
    return order.astype(np.int32)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns 16 hexadecimal digits that two tokenizers share if they give the same tokens the same numbers."""
    return sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
