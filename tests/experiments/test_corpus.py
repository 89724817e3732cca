"""The example that makes corpora: which files, what becomes of them, and what is refused."""

from pathlib import Path
from types import ModuleType

import pytest

from drafters.corpus import Corpus
from experiments.config.sections import sections
from specdec.target.loading import load_tokenizer


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return __import__("corpus")


def test_a_corpus_is_made_and_read_again(tmp_path: Path, example: ModuleType) -> None:
    (tmp_path / "a.txt").write_text("import os\n")
    out = tmp_path / "a.corpus"
    tokens = example.make(out, [f"{tmp_path}/*.txt"], "bundled/target").tokens.tolist()
    tokenizer = load_tokenizer("bundled/target")
    assert tokenizer is not None
    assert tokens[:-1] == tokenizer("import os\n", add_special_tokens=False)["input_ids"]
    assert tokens[-1] == tokenizer.eos_token_id
    assert Corpus.open(out).tokens.tolist() == tokens


def test_an_entry_of_a_list_of_drafters_may_name_a_corpus() -> None:
    """The option's file leaves it open (``corpus: ???``)."""
    (section,) = sections("drafter", [{"name": "rest", "corpus": "a.corpus"}]).values()
    assert section.corpus == "a.corpus" and section.max_nodes == 64
