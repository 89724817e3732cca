"""What the prompts and single tokens of a run say, kept with it: whoever shows its outputs needs no tokenizer.

Records need only name a prompt: its text is one JSON line of the run's. A token's text is not always whole characters:
byte-level tokenizers spell a rare character in several tokens. So a token is kept as bytes, and ``in_context`` makes
texts of a row of tokens.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.results.origin import replace_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS, TOKENS = "prompts.jsonl", "tokens.json"

INCOMPLETE = "\u25af"
"""Stands for a token that ends inside a character (WHITE VERTICAL RECTANGLE)."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece vocabularies name the token of a single byte."""


def write_prompts(folder: Path, prompts: Iterable[Any]) -> None:
    """Write the prompts of a run (anything with ``id``, ``category`` and ``turns``), in the order in which they run."""
    lines = (
        json.dumps({"prompt": each.id, "category": each.category, "turns": each.turns}, ensure_ascii=False)
        for each in prompts
    )
    replace_text(folder / PROMPTS, "".join(f"{line}\n" for line in lines))


def read_prompts(folder: Path) -> Mapping[str, tuple[str, ...]]:
    """The turns of every prompt, by its id; empty for a run that has kept none.

    Raises:
        ValueError: The file is damaged.
    """
    path = folder / PROMPTS
    if not path.is_file():
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            found[row["prompt"]] = tuple(row["turns"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number} is not a prompt: {error}") from error
    return found


def write_token_texts(folder: Path, tokens: Iterable[int], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Write the texts of some tokens into a run's folder; those that are there already stay."""
    texts = {**read_token_texts(folder), **token_bytes(tokens, tokenizer)}
    kept = {str(token): _as_json(text) for token, text in sorted(texts.items())}
    replace_text(folder / TOKENS, json.dumps(kept, ensure_ascii=False, indent=0) + "\n")


def read_token_texts(folder: Path) -> dict[int, bytes]:
    """The texts of tokens that a run has kept, by token id; empty if it has kept none.

    Raises:
        ValueError: The file is damaged.
    """
    path = folder / TOKENS
    if not path.is_file():
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return {int(token): text.encode() if isinstance(text, str) else bytes(text) for token, text in kept.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}; remove it to see token ids instead") from error


def token_bytes(tokens: Iterable[int], tokenizer: "PreTrainedTokenizerBase") -> dict[int, bytes]:
    """The text of each token inside a longer text, as UTF-8 bytes; special tokens by their names.

    Ids that the tokenizer does not know are left out: a model's vocabulary may be padded.
    """
    special = {token: str(added) for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else None
    found: dict[int, bytes] = {}
    for token in sorted({int(token) for token in tokens}):
        name = None if not 0 <= token < len(tokenizer) else tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            continue
        byte = _BYTE.fullmatch(name)
        if token in special:
            found[token] = special[token].encode()
        elif byte is not None:
            found[token] = bytes([int(byte[1], 16)])
        elif alphabet is not None and all(letter in alphabet for letter in name):
            found[token] = bytes(alphabet[letter] for letter in name)
        else:
            found[token] = _inside(token, tokenizer).encode()
    return found


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


def _as_json(text: bytes) -> str | list[int]:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hasattr(tokenizer, "byte_decoder")
    return backend.decoder is not None and b'"ByteLevel"' in backend.decoder.__getstate__()


def _byte_alphabet() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for.

    Printable characters of Latin-1 stand for themselves; all other bytes, in ascending order, for the letters from
    U+0100 on.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(own)]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _inside(token: int, tokenizer: "PreTrainedTokenizerBase") -> str:
    """What a token adds to a text that it does not begin: many tokenizers drop the space that begins a text."""
    once, twice = (
        str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for ids in ([token], [token, token])
    )
    return twice.removeprefix(once)
