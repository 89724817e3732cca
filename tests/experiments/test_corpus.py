"""The command that makes corpora: which files, what becomes of them, and what is refused before any work."""

import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from drafters.corpus import Corpus
from experiments.config.groups import sections
from experiments.config.sections import CONF
from experiments.corpus import corpus
from experiments.datasets.documents import documents
from specdec.target.loading import load_tokenizer


def made(**given: object) -> Corpus:
    """What the command makes of its own defaults and these settings."""
    config = OmegaConf.load(CONF / "corpus.yaml")
    for name in ("defaults", "hydra"):
        config.pop(name)
    return corpus(OmegaConf.merge(config, given))


def test_documents_of_all_kinds_of_files(tmp_path: Path) -> None:
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
    found = documents([f"{tmp_path}/*.py", f"{tmp_path}/[acd].*"])
    assert found == ["x = 1\n", "one", [1, 2], "who?\nme", "why?\nso", "text\n", [7, 8]]


def test_a_corpus_is_made_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("import os\n")
    out = tmp_path / "folder" / "a.corpus"
    tokens = made(files=f"{tmp_path}/*.txt", out=str(out)).tokens.tolist()
    tokenizer = load_tokenizer("bundled/target")
    assert tokenizer is not None
    assert tokens[:-1] == tokenizer("import os\n", add_special_tokens=False)["input_ids"]
    assert tokens[-1] == tokenizer.eos_token_id
    assert Corpus.open(out).tokens.tolist() == tokens
    assert "1 documents" in capsys.readouterr().out
    with pytest.raises(ValueError, match="it exists; give another file, or overwrite=true"):
        made(files="/nowhere", out=str(out))  # before any file is read
    made(files=f"{tmp_path}/*.txt", out=str(out), overwrite=True)


def test_tokens_need_no_tokenizer(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([7, 8]))
    read = made(files=f"{tmp_path}/a.npy", out=str(tmp_path / "a.corpus"), tokenizer=None)
    assert read.tokens.tolist() == [7, 8, -1] and not read.notes


def test_an_entry_of_a_list_of_drafters_may_name_a_corpus() -> None:
    """The option's file leaves it open (``corpus: ???``)."""
    (section,) = sections("drafter", [{"name": "rest", "corpus": "a.corpus"}]).values()
    assert section.corpus == "a.corpus" and section.max_nodes == 64


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b'{"texts": 3}', "line 1 has no document: give rows with text, tokens"),
        ("a.jsonl", b"{", "line 1 is not JSON"),
        ("a.npy", b"text", "cannot be read as an array"),
        ("a.txt", b"\xff", "is not a UTF-8 text file"),
    ],
)
def test_what_is_no_document_is_refused(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        made(files=[f"{tmp_path}/a.*"], out=str(tmp_path / "out.corpus"))
    assert not (tmp_path / "out.corpus").exists()
