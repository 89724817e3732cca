"""The benchmarks' files as they ship, and where they come from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from omegaconf import DictConfig

from experiments.config.sections import build
from experiments.datasets import files
from experiments.datasets.jsonl import Jsonl

Configure = Callable[..., DictConfig]


def written(folder: Path, *rows: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# Of every dataset: rows, and what the prompts are: id, turns, category, chat.
FORMS: dict[str, list[tuple[dict[str, Any], tuple[str, tuple[str, ...], str, bool]]]] = {
    "spec_bench": [
        ({"question_id": 81, "category": "writing", "turns": ["A", "B"]}, ("81", ("A", "B"), "mt_bench", True)),
        ({"question_id": 300, "category": "rag", "turns": ["Read."]}, ("300", ("Read.",), "rag", True)),
    ],
    "mt_bench": [
        ({"question_id": 81, "category": "writing", "turns": ["A", "B"]}, ("81", ("A", "B"), "writing", True)),
        ({"prompt_id": 7, "category": "math", "prompt": ["A", "B"]}, ("7", ("A", "B"), "math", True)),  # the hub's
    ],
    "humaneval": [
        ({"task_id": "H/0", "prompt": "def f(x):\n", "test": "…"}, ("H/0", ("def f(x):\n",), "humaneval", False)),
        ({"turns": ["Solve it."]}, ("2", ("Solve it.",), "humaneval", True)),
    ],
    "mbpp": [
        ({"task_id": 11, "text": "Write.", "code": "…", "test_list": ["…"]}, ("11", ("Write.",), "mbpp", True)),
        ({"task_id": 2, "prompt": "Write.", "code": "…"}, ("2", ("Write.",), "mbpp", True)),  # the sanitized form
    ],
    "gsm8k": [({"question": "How many?", "answer": "#### 3"}, ("1", ("How many?",), "gsm8k", True))],
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, configure: Configure, tmp_path: Path) -> None:
    path = written(tmp_path, *(row for row, _ in FORMS[name]))
    loaded = build(configure("run", f"dataset={name}", f"dataset.file={path}"), "dataset").load()
    assert [(each.id, each.turns, each.category, each.chat) for each in loaded] == [prompt for _, prompt in FORMS[name]]


def test_a_template_around_the_text_and_what_a_row_lacks_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, {"question": "How many {}?"}, {"turns": ["As it is"]})
    prompts = Jsonl(file=path, fields=["question"], chat=True, template="Q: {}\nA:").load()
    assert [prompt.turns[0] for prompt in prompts] == ["Q: How many {}?\nA:", "As it is"]
    with pytest.raises(ValueError, match=r"dataset\.template='Q:': write {} where"):
        Jsonl(file=path, template="Q:")
    path = written(tmp_path, {"text": "a"})
    with pytest.raises(ValueError, match='line 1 has neither "turns", "question" nor "prompt"'):
        Jsonl(file=path, fields=["question", "prompt"]).load()
    with pytest.raises(ValueError, match='line 1: "prompt" must be a list of non-empty strings'):
        Jsonl(file=written(tmp_path, {"prompt": [1]})).load()


def parquet(folder: Path) -> Path:
    path = folder / "test-00000-of-00001.parquet"
    pandas.DataFrame({"question": ["How many?", "Why?"], "turns": [["a", "b"], ["c"]]}).to_parquet(path)
    return path


def test_parquet(tmp_path: Path) -> None:
    prompts = Jsonl(file=str(parquet(tmp_path))).load()
    assert [prompt.turns for prompt in prompts] == [("a", "b"), ("c",)]
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        Jsonl(file=str(tmp_path / "bad.parquet")).load()


def test_files_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, name: str, *, repo_type: str, revision: str | None) -> str:
        asked.append((repository, name, repo_type, revision))
        return str(parquet(tmp_path))

    monkeypatch.setattr(files, "hf_hub_download", download)
    monkeypatch.setattr(
        files, "list_repo_files", lambda name, repo_type: ["README.md", "x/train.parquet", "x/test.parquet"]
    )
    for name in ("hf://datasets/openai/gsm8k/main/t.parquet", "hf://datasets/o/n@v1/t.parquet", "owner/name"):
        assert len(Jsonl(file=name).load()) == 2
    assert asked == [
        ("openai/gsm8k", "main/t.parquet", "dataset", None),
        ("o/n", "t.parquet", "dataset", "v1"),
        ("owner/name", "x/test.parquet", "dataset", None),
    ]
    with pytest.raises(ValueError, match="write a file on the hub as hf://datasets/OWNER/NAME/PATH"):
        Jsonl(file="hf://owner/name").load()
    for listed, words in (
        (["a/test.parquet", "b/test.parquet"], r"several files: .* a/test\.parquet, b"),
        (["x"], "no JSONL"),
    ):
        monkeypatch.setattr(files, "list_repo_files", lambda name, repo_type, listed=listed: listed)
        with pytest.raises(ValueError, match=words):
            Jsonl(file="owner/name").load()


@pytest.mark.parametrize("name", ["owner/name", "hf://datasets/owner/name/a.jsonl"])
def test_a_hub_out_of_reach_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise LocalEntryNotFoundError("no connection.\n\nMuch more text")

    monkeypatch.setattr(files, "hf_hub_download", refuse)
    monkeypatch.setattr(files, "list_repo_files", refuse)
    with pytest.raises(ValueError, match=r"cannot get .* from the Hugging Face hub .*: no connection$"):
        Jsonl(file=name).load()
