"""Prompts to try a drafter with, for any target."""

import random
from collections.abc import Sequence

from specdec.engine.text import encode_prompt
from specdec.target.target import Target

TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
    "import os",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "for name, value in sorted(options.items()):\n    print(name, value)\n\nfor name, value in",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.",
    "one two three one two three one two",
)
"""Texts of different lengths, some of which repeat themselves, so that prompt lookup has something to find."""

_LENGTHS = (40, 2, 17, 30, 55, 9)


def prompts_for(target: Target, texts: Sequence[str | Sequence[int]] | None, seed: int) -> list[tuple[int, ...]]:
    """Returns at least two prompts of at least two tokens.

    Args:
        target: Encodes text.
        texts: The caller's prompts, as text or token ids; None for the built-in ones. A target without a tokenizer then
            gets random tokens that repeat themselves.
        seed: The seed of random tokens.

    Raises:
        ValueError: There are too few prompts, or too short ones.
    """
    if texts is None and target.tokenizer is None:
        rng = random.Random(seed)
        few = [rng.randrange(target.vocab_size) for _ in range(12)]
        return [tuple(rng.choice(few) for _ in range(length)) for length in _LENGTHS]
    given = TEXTS if texts is None else texts
    encoded = [
        tuple(encode_prompt(target.tokenizer, each) if isinstance(each, str) else [int(token) for token in each])
        for each in given
    ]
    encoded = [each for each in encoded if len(each) > 1]
    if len(encoded) < 2:
        raise ValueError(f"{len(encoded)} prompts have two tokens or more: give at least two such prompts, or none")
    return encoded
