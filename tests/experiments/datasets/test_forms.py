"""The benchmarks' files as they ship, and where they come from."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from omegaconf import DictConfig

from experiments.config.sections import build
from experiments.datasets import files
from experiments.datasets.jsonl import Jsonl
from experiments.datasets.prompt import Prompt

SHARED = Path(os.environ.get("SPECDEC_DATA", Path(__file__).parents[3] / "shared" / "data"))

Configure = Callable[..., DictConfig]


def written(folder: Path, *rows: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


FORMS = [
    (
        "spec_bench",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": ["x"]},
        Prompt(id="81", turns=("Write.", "Again."), category="mt_bench", chat=True),
    ),
    (
        "spec_bench",
        {"question_id": 300, "category": "rag", "turns": ["Read."]},
        Prompt(id="300", turns=("Read.",), category="rag", chat=True),
    ),
    (
        "mt_bench",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        Prompt(id="81", turns=("Write.", "Again."), category="writing", chat=True),
    ),
    (
        "mt_bench",  # the hub's form
        {"prompt_id": 7, "category": "math", "prompt": ["Add.", "More."], "reference": []},
        Prompt(id="7", turns=("Add.", "More."), category="math", chat=True),
    ),
    (
        "humaneval",
        {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "test": "…", "canonical_solution": "…"},
        Prompt(id="HumanEval/0", turns=("def f(x):\n",), category="humaneval"),
    ),
    ("humaneval", {"turns": ["Solve it."]}, Prompt(id="1", turns=("Solve it.",), category="humaneval", chat=True)),
    (
        "mbpp",
        {"task_id": 11, "text": "Write a function.", "code": "…", "test_list": ["…"]},
        Prompt(id="11", turns=("Write a function.",), category="mbpp", chat=True),
    ),
    (
        "mbpp",  # the sanitized form
        {"task_id": 2, "prompt": "Write a function.", "code": "…", "test_list": ["…"]},
        Prompt(id="2", turns=("Write a function.",), category="mbpp", chat=True),
    ),
    (
        "gsm8k",
        {"question": "How many?", "answer": "#### 3"},
        Prompt(id="1", turns=("How many?",), category="gsm8k", chat=True),
    ),
]


@pytest.mark.parametrize(("name", "row", "prompt"), FORMS, ids=lambda value: value if isinstance(value, str) else "")
def test_forms(name: str, row: dict[str, object], prompt: Prompt, configure: Configure, tmp_path: Path) -> None:
    config = configure("run", f"dataset={name}", f"dataset.file={written(tmp_path, row)}")
    assert build(config, "dataset").load() == [prompt]


def test_a_template_around_the_text(tmp_path: Path) -> None:
    path = written(tmp_path, {"question": "How many {}?"}, {"turns": ["As it is"]})
    prompts = Jsonl(file=path, fields=["question"], chat=True, template="Q: {}\nA:").load()
    assert [prompt.turns[0] for prompt in prompts] == ["Q: How many {}?\nA:", "As it is"]
    with pytest.raises(ValueError, match=r"dataset\.template='Q:': write {} where"):
        Jsonl(file=path, template="Q:")


def test_what_a_row_lacks_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, {"text": "a"})
    with pytest.raises(ValueError, match='line 1 has neither "turns", "question" nor "prompt"'):
        Jsonl(file=path, fields=["question", "prompt"]).load()
    with pytest.raises(ValueError, match='line 1: "prompt" must be a list of non-empty strings'):
        Jsonl(file=written(tmp_path, {"prompt": [1]})).load()


# ---------------------------------------------------------------- Parquet and the hub


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


def test_a_dataset_of_several_or_no_files_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "list_repo_files", lambda name, repo_type: ["a/test.parquet", "b/test.parquet"])
    with pytest.raises(ValueError, match=r"several files: give .*/PATH with one of a/test\.parquet, b/test\.parquet"):
        Jsonl(file="owner/name").load()
    monkeypatch.setattr(files, "list_repo_files", lambda name, repo_type: ["README.md"])
    with pytest.raises(ValueError, match="no JSONL or Parquet file"):
        Jsonl(file="owner/name").load()


@pytest.mark.parametrize("name", ["owner/name", "hf://datasets/owner/name/a.jsonl"])
def test_a_hub_out_of_reach_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise LocalEntryNotFoundError("no connection.\n\nMuch more text")

    monkeypatch.setattr(files, "hf_hub_download", refuse)
    monkeypatch.setattr(files, "list_repo_files", refuse)
    with pytest.raises(ValueError, match=r"cannot get .* from the Hugging Face hub .*: no connection$"):
        Jsonl(file=name).load()


# ---------------------------------------------------------------- the real files


@pytest.mark.skipif(not SHARED.is_dir(), reason="the benchmark files are not on this machine")
@pytest.mark.parametrize(
    ("name", "file", "size", "categories"),
    [
        ("spec_bench", "spec_bench", 480, 6),
        ("mt_bench", "mt-bench", 80, 1),
        ("humaneval", "humaneval", 164, 1),
        ("mbpp", "mbpp", 257, 1),
        ("gsm8k", "gsm8k_200", 200, 1),
    ],
)
def test_real_files(name: str, file: str, size: int, categories: int, configure: Configure) -> None:
    dataset = build(configure("run", f"dataset={name}", f"dataset.file={SHARED / file}.jsonl"), "dataset")
    prompts = dataset.load()
    assert len({prompt.id for prompt in prompts}) == size
    assert len({prompt.category for prompt in prompts}) == categories
    assert all(prompt.chat for prompt in prompts)
