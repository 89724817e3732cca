"""The texts of a run's prompts and single tokens, kept with it: whoever shows its outputs needs no tokenizer.

Byte-level tokenizers spell a rare character in several tokens, so a token is kept as bytes, and ``in_context`` makes
texts of a row of tokens.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.results.origin import replace_text

PROMPTS, TOKENS = "prompts.jsonl", "tokens.json"

INCOMPLETE = "\u25af"
"""Stands for a token that ends inside a character (WHITE VERTICAL RECTANGLE)."""


def write_prompts(folder: Path, prompts: Iterable[Any]) -> None:
    """Write the prompts of a run (anything with ``id``, ``category`` and ``turns``), in the order in which they run."""
    rows = ({"prompt": prompt.id, "category": prompt.category, "turns": prompt.turns} for prompt in prompts)
    replace_text(folder / PROMPTS, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))


def read_prompts(folder: Path) -> Mapping[str, tuple[str, ...]]:
    """The turns of every prompt, by its id; empty for a run that has kept none. Refuses a damaged file."""
    path, turns = folder / PROMPTS, {}
    lines = filter(None, path.read_text(encoding="utf-8").split("\n")) if path.is_file() else ()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            turns[row["prompt"]] = tuple(row["turns"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number} is not a prompt: {error}") from error
    return turns


def write_token_texts(folder: Path, texts: Mapping[int, bytes]) -> None:
    """Write the texts of some tokens (``token_bytes``) into a run's folder; those that are there already stay."""

    def spelled(text: bytes) -> str | list[int]:
        try:
            return text.decode()
        except UnicodeDecodeError:
            return list(text)

    known = {**read_token_texts(folder), **texts}
    kept = {str(token): spelled(text) for token, text in sorted(known.items())}
    replace_text(folder / TOKENS, json.dumps(kept, ensure_ascii=False, indent=0) + "\n")


def read_token_texts(folder: Path) -> dict[int, bytes]:
    """The texts of tokens that a run has kept, by token id; empty if it has kept none. Refuses a damaged file."""
    path = folder / TOKENS
    if not path.is_file():
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return {int(token): text.encode() if isinstance(text, str) else bytes(text) for token, text in kept.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}; remove it to see token ids instead") from error


def text_of(token: int, texts: Mapping[int, bytes]) -> str:
    r"""A single token as text: bytes that are no whole character as ``\xe2``, an unknown token as its id."""
    known = texts.get(token)
    return f"<{token}>" if known is None else known.decode("utf-8", errors="backslashreplace")


def in_context(tokens: Sequence[int], texts: Mapping[int, bytes]) -> list[str]:
    """The text of each token of an output.

    A character that is spelled in several tokens stands at its last one, and ``INCOMPLETE`` at those before.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    found = []
    for token in tokens:
        known = texts.get(token)
        if known is None:
            found.append(decoder.decode(b"", final=True) + f"<{token}>")
        else:
            found.append(decoder.decode(known) or (INCOMPLETE if known else ""))
    return found
