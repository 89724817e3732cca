"""Prompts of exactly so many tokens that end at the same places, whatever their length."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.datasets.prompt import Prompt, Selection
from experiments.datasets.stdlib import places
from experiments.datasets.text import pieces, texts

CHARACTERS = 6
"""Characters of text that are kept per wanted token. Usual tokenizers have fewer per token on code and on prose, so
the text has enough tokens for all of them."""


@dataclass(frozen=True, kw_only=True)
class Context(Selection):
    """Text to be continued, of which the target sees exactly the last ``tokens`` tokens.

    A study of the context's length compares runs of different ``tokens`` and one ``longest``: they continue the same
    places, so that nothing but the length differs.

    Attributes:
        count: Prompts to take; None for all. The rest of the choice is set as in ``Selection``.
        tokens: Length of every prompt, in tokens of the target.
        longest: The largest length of the study; only places with enough text before them are taken.
        files: Paths or patterns of text files; None: the standard library's held-out modules.
    """

    count: int | None = 20
    tokens: int = 256
    longest: int = 768
    files: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_lengths(self.tokens, self.longest)

    def load(self) -> list[Prompt]:
        """Every place with enough text before it, by file and position."""
        length = self.longest * CHARACTERS
        if self.files is None:
            found = [(p.id, p.source[p.stop - length : p.stop], p.category) for p in places() if p.stop >= length]
        else:
            found = [
                (f"{path}#{number}", piece, "")
                for path, text in texts(self.files)
                for number, piece in enumerate(_full(text, length), start=1)
            ]
        if not found:
            raise ValueError(
                f"dataset.longest={self.longest}: no text of {length} characters ({CHARACTERS} per token) in front of "
                f"any place: give a smaller number, or longer dataset.files"
            )
        return [
            Prompt(id=name, turns=(text,), category=category, last_tokens=self.tokens) for name, text, category in found
        ]


def check_lengths(tokens: int, longest: int) -> None:
    """Refuse lengths that no prompt can have: of the prompts, and of the same places in a whole study."""
    if tokens < 1:
        raise ValueError(f"dataset.tokens={tokens}: give at least 1")
    if longest < tokens:
        raise ValueError(f"dataset.longest={longest}: give at least dataset.tokens={tokens}")


def _full(text: str, length: int) -> list[str]:
    """Pieces of whole lines, each at least as long as wanted."""
    found = [""]
    for piece in pieces(text, length):
        found[-1] += piece + "\n"
        if len(found[-1]) > length:
            found.append("")
    return [piece.rstrip("\n") for piece in found if len(piece.rstrip("\n")) >= length]
