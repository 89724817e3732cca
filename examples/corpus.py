"""Makes a corpus, the file that ``drafter=rest`` and ``drafter=sam`` look up in.

    python examples/corpus.py text.corpus 'text/*.txt' rows.jsonl --tokenizer bundled/target

Text files are one document each; rows of JSON Lines or Parquet have ``text``, ``tokens``, ``messages``, or a prompt
with its answer; arrays of whole numbers (``.npy``) are tokens. The tokenizer is that of the corpus's target.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafters.corpus import Corpus
from experiments.datasets.files import rows
from experiments.datasets.text import matching, texts
from specdec.target.loading import load_tokenizer

PROMPTS = ("turns", "prompt", "question")
ANSWERS = ("reference", "answer", "response", "completion")
"""Keys of a row that hold what was asked and what was answered; the first that a row has."""
_CONVERSATIONS = ("messages", "conversations")
_ASSISTANTS = ("assistant", "gpt")


def spoken(row: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yields what is said one after another, and whether it is an answer; an empty answer is one that is not known."""
    messages = next((row[key] for key in _CONVERSATIONS if isinstance(row.get(key), list)), None)
    if messages is not None:
        for message in messages:
            role = message.get("role", message.get("from"))
            yield _text(message.get("content", message.get("value"))), role in _ASSISTANTS
        return
    prompts, answers = _several(row, PROMPTS), _several(row, ANSWERS)
    for turn, prompt in enumerate(prompts):
        yield _text(prompt), False
        yield _text(answers[turn] if turn < len(answers) else None), True


def _several(row: Mapping[str, Any], keys: tuple[str, ...]) -> list[Any]:
    value = next((row[key] for key in keys if row.get(key)), [])
    return value if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_text(part) for part in value if part)
    return value if isinstance(value, str) else "" if value is None else str(value)


def documents(patterns: Sequence[str]) -> list[str | list[int]]:
    """The documents in the files that patterns match: text, or the ids of tokens.

    Raises:
        ValueError: A pattern matches no file, or a file is not what its name says.
    """
    found: list[str | list[int]] = []
    for pattern in patterns:
        for path in matching(pattern) or [pattern]:
            if path.endswith((".jsonl", ".parquet")) or path.startswith("hf://"):
                # A trainer's file of responses begins with a line that says what made them.
                kept = [(number, row) for number, row in rows(path, "files") if "made_with" not in (row or ())]
                found += [document(row, f"{path}, line {number}") for number, row in kept]
            elif path.endswith(".npy"):
                found.append(np.load(path, allow_pickle=False).astype(np.int64, casting="safe").tolist())
            else:
                found += [text for _, text in texts(path, "files")]
    return found


def document(row: Any, where: str) -> str | list[int]:
    """The document of a row."""
    if isinstance(row, Mapping):
        for name in ("tokens", "input_ids", "token_ids"):
            if isinstance(row.get(name), list):
                return row[name]
        text = row.get("text") or "\n".join(said for said, _ in spoken(row) if said)
        if isinstance(text, str) and text:
            return text
    raise ValueError(f"{where} has no document: give rows with text, tokens, messages, or a prompt with its answer")


def make(out: Path, patterns: Sequence[str], tokenizer_name: str | None) -> Corpus:
    """Write a corpus of the files that patterns match; without a tokenizer, all of them hold tokens."""
    tokenizer = None if tokenizer_name is None else load_tokenizer(tokenizer_name)

    def tokens(text: str | list[int]) -> list[int]:
        if not isinstance(text, str):
            return text
        if tokenizer is None:
            raise ValueError("files have text, and there is no tokenizer: give --tokenizer, the target's")
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    made = Corpus.of(map(tokens, documents(patterns)), tokenizer=tokenizer, name=str(out))
    made.save(out)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokenizer", default="bundled/target")
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"{given.out} exists: give another file")
    try:
        made = make(given.out, given.files, given.tokenizer)
    except ValueError as error:
        parser.error(str(error))
    print(f"{given.out}: {len(made.tokens):,} tokens")
