"""What the tokens of a run say: as the run has kept it, or as the target's tokenizer says if it is on this machine."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from experiments.results.texts import read_token_texts
from specdec.target.spelling import token_bytes


def texts_of_run(folder: Path, manifest: Mapping[str, Any], tokens: Collection[int]) -> dict[int, bytes]:
    """The texts of a run's tokens; those that nobody can tell are left out, and are shown as their ids."""
    texts = read_token_texts(folder)
    missing = set(tokens) - texts.keys()  # all of an older run, and some of one that was killed and went on
    if missing:
        texts |= _from_tokenizer(str(manifest.get("target", {}).get("name", "")), missing)
    return texts


def _from_tokenizer(name: str, tokens: Collection[int]) -> dict[int, bytes]:
    from transformers import AutoTokenizer  # takes seconds to import, and runs keep their texts

    from specdec import bundled

    try:
        tokenizer = AutoTokenizer.from_pretrained(bundled.resolve(name), local_files_only=True)
    except (OSError, ValueError):
        return {}  # a model of another machine, or one that was given as an object
    return token_bytes(tokens, tokenizer)
