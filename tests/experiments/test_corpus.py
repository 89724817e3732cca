"""The example that makes corpora: which files, what becomes of them, and what is refused."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from drafters.corpus import Corpus
from experiments.config.groups import sections
from specdec.target.loading import load_tokenizer


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return __import__("corpus")


def test_documents_of_all_kinds_of_files(tmp_path: Path, example: ModuleType) -> None:
    rows = [
        {"made_with": {"target": "a trainer's file of responses begins so"}},
        {"text": "one"},
        {"tokens": [1, 2]},
        {"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"}]},
        {"prompt": "why?", "answer": "so"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "c.txt").write_text("text\n")
    np.save(tmp_path / "d.npy", np.array([7, 8], dtype=np.uint16))
    found = example.documents([f"{tmp_path}/*.py", f"{tmp_path}/[acd].*"])
    assert found == ["x = 1\n", "one", [1, 2], "who?\nme", "why?\nso", "text\n", [7, 8]]


def test_a_corpus_is_made_and_read_again(tmp_path: Path, example: ModuleType) -> None:
    (tmp_path / "a.txt").write_text("import os\n")
    out = tmp_path / "a.corpus"
    tokens = example.make(out, [f"{tmp_path}/*.txt"], "bundled/target").tokens.tolist()
    tokenizer = load_tokenizer("bundled/target")
    assert tokenizer is not None
    assert tokens[:-1] == tokenizer("import os\n", add_special_tokens=False)["input_ids"]
    assert tokens[-1] == tokenizer.eos_token_id
    assert Corpus.open(out).tokens.tolist() == tokens


def test_tokens_need_no_tokenizer(tmp_path: Path, example: ModuleType) -> None:
    np.save(tmp_path / "a.npy", np.array([7, 8]))
    read = example.make(tmp_path / "a.corpus", [f"{tmp_path}/a.npy"], None)
    assert read.tokens.tolist() == [7, 8, -1] and not read.notes
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="files have text, and there is no tokenizer"):
        example.make(tmp_path / "a.corpus", [f"{tmp_path}/a.txt"], None)


def test_an_entry_of_a_list_of_drafters_may_name_a_corpus() -> None:
    """The option's file leaves it open (``corpus: ???``)."""
    (section,) = sections("drafter", [{"name": "rest", "corpus": "a.corpus"}]).values()
    assert section.corpus == "a.corpus" and section.max_nodes == 64


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b'{"texts": 3}', "line 1 has no document: give rows with text, tokens"),
        ("a.jsonl", b"{", "line 1 is not JSON"),
        ("a.txt", b"\xff", "is not a UTF-8 text file"),
    ],
)
def test_what_is_no_document_is_refused(
    tmp_path: Path, example: ModuleType, name: str, content: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        example.make(tmp_path / "out.corpus", [f"{tmp_path}/a.*"], "bundled/target")
    assert not (tmp_path / "out.corpus").exists()
