"""Prompts: where they come from, which are chosen, what is wrong with a file; the benchmarks' files as they ship."""

import json
from pathlib import Path
from typing import Any

import pandas
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from experiments.config.sections import build
from experiments.datasets import files
from experiments.datasets.jsonl import Jsonl
from experiments.datasets.prompt import CHARACTERS_PER_TOKEN, Prompt, choose, licenses, warmup_texts
from experiments.datasets.stdlib import HELD_OUT, Stdlib, stdlib_root
from experiments.datasets.text import Text
from tests.experiments.runs import Configure


@pytest.fixture(scope="module")
def windows() -> list[Prompt]:
    return Stdlib(prompt_tokens=100).load()


def test_windows_end_with_a_docstring_of_a_held_out_module(windows: list[Prompt]) -> None:
    assert len(windows) > 300
    for prompt in windows:
        name, _, line = prompt.id.rpartition(":")
        assert prompt.category in HELD_OUT
        assert name.split("/")[0].removesuffix(".py") == prompt.category
        text = prompt.turns[0]
        assert 0 < len(text) <= 100 * CHARACTERS_PER_TOKEN
        assert text == text.rstrip("\n")
        assert not prompt.chat
        source = (stdlib_root() / name).read_text(encoding="utf-8", errors="replace").split("\n")
        lines = text.split("\n")
        assert lines == source[int(line) - len(lines) : int(line)], "a window is whole lines of its file"


class Numbers:
    def __init__(self, size: int, count: int | None, seed: int = 0):
        self.size, self.count, self.seed = size, count, seed

    def load(self) -> list[Prompt]:
        return [Prompt(id=str(number), turns=(f"{number} one\ntwo",)) for number in range(self.size)]


def test_choice_is_seeded_ordered_and_independent_of_the_spare_ones() -> None:
    measured, spare = choose(Numbers(100, 10), spare=3)
    assert measured == choose(Numbers(100, 10), spare=0)[0]
    assert measured != choose(Numbers(100, 10, seed=1))[0]
    assert [int(prompt.id) for prompt in measured] == sorted(int(prompt.id) for prompt in measured)
    assert (len(measured), len(spare)) == (10, 3)
    assert not {prompt.id for prompt in measured} & {prompt.id for prompt in spare}


def test_warm_up_never_repeats_what_is_measured() -> None:
    measured, spare = choose(Numbers(6, 4), spare=3)
    texts = warmup_texts(measured, spare, 3)
    assert len(texts) == 3
    assert not set(texts) & {prompt.turns[0] for prompt in measured}
    assert texts[2] == "two\n0 one " or texts[2].startswith("two\n")
    assert warmup_texts(measured, spare, 0) == []


def test_each_file_is_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\n\n")
    (tmp_path / "a.txt").write_text("first\n")
    (tmp_path / "c.md").write_text("no\n")
    prompts = Text(files=str(tmp_path / "*.txt")).load()
    assert [prompt.turns for prompt in prompts] == [("first",), ("second",)]
    assert prompts[0].id.endswith("a.txt")
    # Several patterns that find the same file take it once.
    assert len(Text(files=[str(tmp_path / "*"), str(tmp_path / "a.txt")]).load()) == 3


def test_files_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line number {number}\n" for number in range(20)))
    prompts = Text(files=str(tmp_path / "a.txt"), prompt_tokens=10).load()
    assert [prompt.id.rpartition("#")[2] for prompt in prompts] == [str(n + 1) for n in range(len(prompts))]
    assert all(len(prompt.turns[0]) <= 36 for prompt in prompts)
    joined = "\n".join(prompt.turns[0] for prompt in prompts)
    assert joined == "\n".join(f"line number {number}" for number in range(20))


def test_turns_and_prompts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        {"turns": ["hello", "and then?"], "question_id": 81, "category": "writing", "reference": [1]},
        {"prompt": "once upon", "id": "x"},
        {"turns": ["ä ö"]},
    ]
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    assert Jsonl(file=str(path)).load() == [
        Prompt(id="81", turns=("hello", "and then?"), category="writing", chat=True),
        Prompt(id="x", turns=("once upon",)),
        Prompt(id="5", turns=("ä ö",), chat=True),
    ]


BAD: list[tuple[type[Text | Jsonl], bytes, str]] = [
    (Text, b" \n", "is empty"),
    (Text, b"\xff\xfe\x00", "not a UTF-8 text file"),
    (Jsonl, b"\n", "no prompts"),
    (Jsonl, b'{"prompt": "\xff"}\n', "not UTF-8"),
    (Jsonl, b'{"turns": ["fine"]}\n{"turns": ["a"\n', "line 2 is not JSON"),
    (Jsonl, b'{"turns": ["fine"]}\n{"turns": []}\n', 'line 2: "turns" must be'),
    (Jsonl, b'{"turns": ["fine"]}\n{"text": "a"}\n', 'line 2 has neither "turns" nor "prompt"'),
]


@pytest.mark.parametrize(("kind", "content", "message"), BAD)
def test_bad_files(kind: type[Text | Jsonl], content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        (Text(files=str(path)) if kind is Text else Jsonl(file=str(path))).load()


def test_bad_choices() -> None:
    with pytest.raises(ValueError, match="prompt_tokens=2"):
        Text(files="x", prompt_tokens=2)
    twice = Numbers(3, None)
    twice.load = lambda: Numbers(3, None).load() * 2  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="ids must be unique"):
        choose(twice)


def written(folder: Path, *rows: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# Of every dataset: rows in the hub's form and others, and what the prompts are: id, turns, category, chat.
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
    "math500": [
        ({"problem": "Solve x.", "subject": "Algebra", "level": 2}, ("1", ("Solve x.",), "math500", True)),
        ({"turns": ["Solve y."]}, ("2", ("Solve y.",), "math500", True)),
    ],
    "speed_bench": [
        (
            {"question_id": "c1", "category": "coding", "sub_category": "python", "turns": ["A", "B"], "src_id": "7",
             "source": "https://huggingface.co/datasets/cais/hle", "difficulty": "", "multiturn": True},
            ("c1", ("A", "B"), "coding", True),
        ),
        (
            {"question_id": "t1", "category": "low_entropy", "sub_category": "coding", "turns": ["C"], "src_id": "8",
             "source": "https://github.com/someone/something", "difficulty": "", "multiturn": False},
            ("t1", ("C",), "low_entropy", True),
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, configure: Configure, tmp_path: Path) -> None:
    path = written(tmp_path, *(row for row, _ in FORMS[name]))
    loaded = build(configure("run", f"dataset={name}", f"dataset.file={path}"), "dataset").load()
    assert [(each.id, each.turns, each.category, each.chat) for each in loaded] == [prompt for _, prompt in FORMS[name]]
    assert all(each.license for each in loaded), "every benchmark says its licence"
    table = tmp_path / "rows.parquet"  # as on the hub
    pandas.DataFrame([row for row, _ in FORMS[name]][:1]).to_parquet(table)
    assert build(configure("run", f"dataset={name}", f"dataset.file={table}"), "dataset").load() == loaded[:1]


def test_licences_of_sources_and_texts_that_are_not_there(configure: Configure, tmp_path: Path) -> None:
    given = [row for row, _ in FORMS["speed_bench"]]
    unfetched = given[0] | {
        "question_id": "c2",
        "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING"],
    }
    path = tmp_path / "throughput_1k" / "test.parquet"
    path.parent.mkdir()
    words = ["dataset=speed_bench", f"dataset.file='{tmp_path}/{{split}}/test.parquet'", "dataset.split=throughput_1k"]
    pandas.DataFrame([*given, unfetched]).to_parquet(path)
    with pytest.raises(ValueError, match=r"1 of the 3 prompts of .*throughput_1k/test\.parquet are placeholders"):
        choose(build(configure("run", *words), "dataset"))
    (prompt,), _ = choose(build(configure("run", *words, "dataset.only=[low_entropy]"), "dataset"))
    assert prompt.license.endswith("someone/something: its own licence")
    pandas.DataFrame(given).to_parquet(path)
    loaded = build(configure("run", *words), "dataset").load()
    assert loaded[0].license == "NVIDIA Evaluation Dataset License; https://huggingface.co/datasets/cais/hle: MIT"
    assert licenses(loaded) == {prompt.license: 1 for prompt in loaded}
    own = Jsonl(file=written(tmp_path, {"prompt": "a", "license": "CC0"}, {"prompt": "b"}), license="MIT").load()
    assert [prompt.license for prompt in own] == ["CC0", "MIT"]
    path = written(tmp_path, {"prompt": "a", "source": "some/where"}, {"prompt": "b"})
    assert [each.license for each in Jsonl(file=path, licenses={"some/": "MIT"}).load()] == ["some/where: MIT", ""]


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
