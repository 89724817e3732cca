"""Documents, as text or as tokens, from the files that patterns match."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.datasets.answered import spoken
from experiments.datasets.files import rows
from experiments.datasets.text import matching, texts

_ROWS = (".jsonl", ".parquet")
_TOKENS = ("tokens", "input_ids", "token_ids")


def documents(files: Sequence[str]) -> list[str | list[int]]:
    """Returns all documents: text, or the ids of tokens.

    A file of JSON Lines or Parquet, also one on the hub (``hf://datasets/…``), has one in each row: its ``text``, its
    ``tokens`` or ``input_ids``, or all that is said in a conversation or asked and answered (``answered``). An array of
    integers (``.npy``) is one document of tokens, and any other file is one of text. A trainer's file of responses
    begins with a line that says what made them, which is left out.

    Args:
        files: Paths or patterns (``**`` goes into folders).

    Raises:
        ValueError: A pattern matches no file, or a file is not what its name says.
    """
    found: list[str | list[int]] = []
    for pattern in files:
        for path in matching(pattern) or [pattern]:
            if path.endswith(_ROWS) or path.startswith("hf://"):
                found += [
                    _document(row, f"{path}, line {number}")
                    for number, row in rows(path, "files")
                    if not (isinstance(row, Mapping) and "made_with" in row)
                ]
            elif path.endswith(".npy"):
                found.append(_array(path))
            else:
                found += [text for _, text in texts(path, "files")]
    return found


def _document(row: Any, where: str) -> str | list[int]:
    """The document of a row."""
    if isinstance(row, Mapping):
        for name in _TOKENS:
            tokens = row.get(name)
            if isinstance(tokens, list) and all(type(token) is int for token in tokens):
                return tokens
        text = row.get("text") or "\n".join(said for said, _ in spoken(row) if said)
        if isinstance(text, str) and text:
            return text
    raise ValueError(f"{where} has no document: give rows with text, tokens, messages, or a prompt with its answer")


def _array(path: str) -> list[int]:
    """The tokens of an array's file."""
    try:
        tokens = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as an array: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"{path} has {tokens.dtype} of shape {list(tokens.shape)}: give one row of whole numbers")
    return tokens.tolist()
