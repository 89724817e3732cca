"""A corpus of tokens, made as a configuration says, and what is printed about it."""

from pathlib import Path

from omegaconf import DictConfig

from drafters.corpus import Corpus
from experiments.config.sections import listed
from experiments.datasets.documents import documents
from experiments.reporting import terminal
from experiments.session.engines import quiet_hub
from specdec.target.loading import load_tokenizer


def corpus(config: DictConfig) -> Corpus:
    """Make the corpus of a checked configuration, write it, say what it holds, and return it."""
    quiet_hub()
    out = Path(config.out).expanduser()
    if out.exists() and not config.overwrite:
        raise ValueError(f"out={config.out}: it exists; give another file, or overwrite=true")
    tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
    found = documents([str(each) for each in listed(config, "files")])  # refuses what is no file
    if tokenizer is None and any(isinstance(each, str) for each in found):
        raise ValueError(f"tokenizer={config.tokenizer}: files have text, and there is no such tokenizer; give another")

    def tokens(document: str | list[int]) -> list[int]:
        if not isinstance(document, str):
            return document
        assert tokenizer is not None, "text without a tokenizer has been refused"
        return tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]

    made = Corpus.of(map(tokens, found), tokenizer=tokenizer, name=str(out))
    made.save(out)
    size, whose = out.stat().st_size / 1e6, config.tokenizer or "an unknown tokenizer"
    said = f"{len(found):,} documents, {len(made.tokens):,} tokens of {whose}: {out} ({size:.1f} MB)"
    terminal.say(terminal.console(), said)
    return made
