"""Prompts: where they come from, which are chosen, what is wrong with a file; the benchmarks' files as they ship."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pandas
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from experiments.config.sections import build
from experiments.datasets import files
from experiments.datasets import prompt as choice
from experiments.datasets.context import Context
from experiments.datasets.joined import Joined
from experiments.datasets.jsonl import Jsonl
from experiments.datasets.prompt import Prompt, Selection, choose, fingerprint
from experiments.datasets.stdlib import HELD_OUT, Stdlib, stdlib_root
from experiments.datasets.text import Text
from experiments.measuring.jobs import render
from tests.experiments.conftest import byte_tokenizer
from tests.experiments.runs import Configure


def test_windows_end_with_a_docstring_of_a_held_out_module() -> None:
    windows = Stdlib(prompt_tokens=100).load()
    assert len(windows) > 300
    for prompt in windows:
        name, _, line = prompt.id.rpartition(":")
        assert name.split("/")[0].removesuffix(".py") == prompt.category and prompt.category in HELD_OUT
        text = prompt.turns[0]
        assert 0 < len(text) <= 100 * choice.CHARACTERS_PER_TOKEN and text == text.rstrip("\n") and not prompt.chat
        source = (stdlib_root() / name).read_text(encoding="utf-8", errors="replace").split("\n")
        lines = text.split("\n")
        assert lines == source[int(line) - len(lines) : int(line)], "a window is whole lines of its file"


def dataset_of(prompts: tuple[Prompt, ...]) -> Any:
    return SimpleNamespace(count=None, seed=0, load=lambda: list(prompts))


def given(*texts: str, category: str = "", chat: bool = False) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"{category}{i}", (text,), category, chat) for i, text in enumerate(texts))


def joined(prompts: tuple[Prompt, ...], *, tokens: int = 4, longest: int = 4, **more: Any) -> Joined:
    return Joined(prompts=dataset_of(prompts), tokens=tokens, longest=longest, **{"count": None, **more})


SAID = given(*(f"prompt {i} says something of its own" for i in range(8)))


@dataclass(frozen=True, kw_only=True)
class Letters(Selection):
    """Twelve prompts of category a, six of b, two of c."""

    def load(self) -> list[Prompt]:
        names = "ab" * 6 + "a" * 6 + "cc"
        return [Prompt(id=str(n), turns=(f"{n} one\ntwo",), category=name) for n, name in enumerate(names)]


def categories(**settings: object) -> str:
    return "".join(sorted(prompt.category for prompt in choose(Letters(**settings))[0]))  # type: ignore[arg-type]


def test_choice_is_seeded_and_independent_of_the_spare_ones_which_warm_up_and_of_other_categories() -> None:
    measured, spare = choose(Letters(count=10), spare=3)
    assert measured == choose(Letters(count=10), spare=0)[0]
    assert measured != choose(Letters(count=10, seed=1))[0]
    assert [int(prompt.id) for prompt in measured] == sorted(int(prompt.id) for prompt in measured)
    assert (len(measured), len(spare)) == (10, 3)
    assert not {prompt.id for prompt in measured} & {prompt.id for prompt in spare}
    texts = choice.warmup_texts(measured, spare[:2], 3)
    assert len(texts) == 3 and not set(texts) & {prompt.turns[0] for prompt in measured}
    assert texts[2].startswith("two\n")

    assert categories(per_category=4) == "aaaabbbbcc", "a category that has fewer gives all"
    assert categories(per_category=3, count=2) == "aaabbbcc", "in place of the count"
    assert categories(per_category=2, only=["a", "c"]) == "aacc"
    everything = choose(Letters(per_category=3, seed=4))[0]
    alone = choose(Letters(per_category=3, seed=4, only=["a"]))[0]
    assert [prompt for prompt in everything if prompt.category == "a"] == alone
    assert alone != choose(Letters(per_category=3, seed=5, only=["a"]))[0]


def test_files_are_prompts_whole_or_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\n\n")
    (tmp_path / "a.txt").write_text("".join(f"line number {number}\n" for number in range(20)))
    (tmp_path / "c.md").write_text("no\n")
    text = "\n".join(f"line number {number}" for number in range(20))
    prompts = Text(files=str(tmp_path / "*.txt")).load()
    assert [prompt.turns for prompt in prompts] == [(text,), ("second",)] and prompts[0].id.endswith("a.txt")
    # Several patterns that find the same file take it once.
    assert len(Text(files=[str(tmp_path / "*"), str(tmp_path / "a.txt")]).load()) == 3
    prompts = Text(files=str(tmp_path / "a.txt"), prompt_tokens=10).load()
    assert [prompt.id.rpartition("#")[2] for prompt in prompts] == [str(n + 1) for n in range(len(prompts))]
    assert all(len(prompt.turns[0]) <= 36 for prompt in prompts)
    assert "\n".join(prompt.turns[0] for prompt in prompts) == text


def written(folder: Path, *rows: object, between: str = "\n") -> str:
    path = folder / "rows.jsonl"
    path.write_text(between.join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    return str(path)


def test_turns_and_prompts(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "once upon", "id": "x"}, {"turns": ["ä ö"]}, between="\n\n")
    assert Jsonl(file=path).load() == [Prompt("x", ("once upon",)), Prompt("3", ("ä ö",), chat=True)]
    path = written(tmp_path, {"question": "How many {}?"}, {"turns": ["As it is"]})
    prompts = Jsonl(file=path, fields=["question"], chat=True, template="Q: {}\nA:").load()
    assert [prompt.turns[0] for prompt in prompts] == ["Q: How many {}?\nA:", "As it is"]


def test_of_messages_the_last_is_answered(tmp_path: Path) -> None:
    """As in files of others: with the answer, tools as JSON, contents in parts; and from the hub, with None for all."""
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 2}'}}]}
    told, tools = {"role": "tool", "content": "4"}, [{"name": "f"}]
    rows = [{"messages": [*said, {"role": "assistant", "content": "4"}], "tools": None}]
    rows.append({"messages": [*said, call, told], "tools": json.dumps(tools)})
    first, second = Jsonl(file=written(tmp_path, *rows)).load()
    assert (first.turns, second.turns, second.chat, second.tools) == (("2+2?",), ("4",), True, tuple(tools))
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="prompt 2: the target's tokenizer has no chat template"):
        render(second, tokenizer)
    tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
    )
    assert tokenizer.decode(render(first, tokenizer)) == "None<s>Be brief.<u>2+2?"
    assert tokenizer.decode(render(second, tokenizer)) == "[{'name': 'f'}]<s>Be brief.<u>2+2?<a>2<t>4"
    # Pinned: a change would keep earlier runs from being compared with new ones.
    assert fingerprint([Prompt(id="a", turns=("x", "y"), category="c", chat=True)]) == "bb2e9956140efbf9"
    assert fingerprint([first]) != fingerprint([replace(first, messages=first.messages[1:])])
    hub = {"messages": [{"role": "user", "content": "2+2?"}, call, told], "tools": json.dumps(tools)}
    pandas.DataFrame([hub]).to_parquet(tmp_path / "rows.parquet")
    assert Jsonl(file=str(tmp_path / "rows.parquet")).load()[0].messages == second.messages[1:]


@pytest.mark.parametrize(
    ("make", "content", "message"),
    [
        (lambda path: Text(files=path), b" \n", "is empty"),
        (lambda path: Text(files=path), b"\xff\xfe\x00", "not a UTF-8 text file"),
        (lambda path: Jsonl(file=path), b'{"turns": ["fine"]}\n{"turns": ["a"\n', "line 2 is not JSON"),
        (lambda path: Jsonl(file=path), b'{"text": "a"}', "line 1 has none of turns, prompt, messages"),
        (lambda path: Jsonl(file=path), b'{"messages": [{"role": "assistant", "content": "a"}]}', 'give "messages"'),
        (lambda path: Jsonl(file=path, template="Q:"), b"{}", r"dataset\.template='Q:': write {} where"),
        (lambda _: Letters(only=["d"]), b"", "no category 'd': choose among a, b, c"),
        (lambda _: Context(tokens=9, longest=8), b"", r"dataset\.longest=8: give at least dataset\.tokens=9"),
        (lambda path: Context(longest=3000, files=path), b"short", "dataset.longest=3000: no text of 18000 characters"),
        (lambda _: dataset_of(SAID * 2), b"", "ids must be unique"),
        (lambda _: joined(SAID[:4], count=5), b"", "make 4 joined prompts of 24 characters.*and 5 are wanted"),
    ],
)
def test_bad_files_and_choices(make, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        choose(make(str(tmp_path / "a")))


HLE = "https://huggingface.co/datasets/cais/hle"
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
    "humaneval": [({"task_id": "H/0", "prompt": "def f(x):\n"}, ("H/0", ("def f(x):\n",), "humaneval", False))],
    "mbpp": [
        ({"task_id": 11, "text": "Write.", "code": "…", "test_list": ["…"]}, ("11", ("Write.",), "mbpp", True)),
        ({"task_id": 2, "prompt": "Write.", "code": "…"}, ("2", ("Write.",), "mbpp", True)),  # the sanitized form
    ],
    "gsm8k": [({"question": "How many?", "answer": "#### 3"}, ("1", ("How many?",), "gsm8k", True))],
    "math500": [({"problem": "Solve x.", "subject": "Algebra"}, ("1", ("Solve x.",), "math500", True))],
    "speed_bench": [
        ({"question_id": "c1", "category": "coding", "turns": ["A"], "source": HLE}, ("c1", ("A",), "coding", True)),
        ({"question_id": "t1", "category": "qa", "turns": ["C"], "source": "someone/s"}, ("t1", ("C",), "qa", True)),
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
    unfetched = given[0] | {"question_id": "c2", "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]}
    path = tmp_path / "throughput_1k" / "test.parquet"
    path.parent.mkdir()
    words = ["dataset=speed_bench", f"dataset.file='{tmp_path}/{{split}}/test.parquet'", "dataset.split=throughput_1k"]
    pandas.DataFrame([*given, unfetched]).to_parquet(path)
    with pytest.raises(ValueError, match=r"1 of the 3 prompts of .*throughput_1k/test\.parquet are placeholders"):
        choose(build(configure("run", *words), "dataset"))
    (prompt,), _ = choose(build(configure("run", *words, "dataset.only=[qa]"), "dataset"))
    assert prompt.license.endswith("someone/s: its own licence")
    pandas.DataFrame(given).to_parquet(path)
    loaded = build(configure("run", *words), "dataset").load()
    assert loaded[0].license == f"NVIDIA Evaluation Dataset License; {HLE}: MIT"
    assert choice.licenses(loaded) == {prompt.license: 1 for prompt in loaded}
    own = Jsonl(file=written(tmp_path, {"prompt": "a", "license": "CC0"}, {"prompt": "b"}), license="MIT").load()
    assert [prompt.license for prompt in own] == ["CC0", "MIT"]


def test_files_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "test-00000-of-00001.parquet"
    pandas.DataFrame({"question": ["How many?", "Why?"], "turns": [["a", "b"], ["c"]]}).to_parquet(path)
    download = Mock(return_value=str(path))
    monkeypatch.setattr(files, "hf_hub_download", download)
    monkeypatch.setattr(files, "list_repo_files", lambda *_, **__: ["README.md", "x/train.parquet", "x/test.parquet"])
    for name in ("hf://datasets/openai/gsm8k/main/t.parquet", "hf://datasets/o/n@v1/t.parquet", "owner/name"):
        assert [prompt.turns for prompt in Jsonl(file=name).load()] == [("a", "b"), ("c",)]
    assert download.call_args_list == [
        call("openai/gsm8k", "main/t.parquet", repo_type="dataset", revision=None),
        call("o/n", "t.parquet", repo_type="dataset", revision="v1"),
        call("owner/name", "x/test.parquet", repo_type="dataset", revision=None),
    ]
    (tmp_path / "bad.parquet").write_text("no")
    refuse = Mock(side_effect=LocalEntryNotFoundError("no connection.\n\nMuch more text"))
    monkeypatch.setattr(files, "hf_hub_download", refuse)
    for name, listing, words in (
        (str(tmp_path / "bad.parquet"), refuse, "bad.parquet cannot be read"),
        ("owner/name", lambda *_, **__: ["a/test.parquet", "b/test.parquet"], r"several files: .* a/test\.parquet, b"),
        ("owner/name", refuse, r"cannot get .* from the Hugging Face hub .*: no connection$"),
    ):
        monkeypatch.setattr(files, "list_repo_files", listing)
        with pytest.raises(ValueError, match=words):
            Jsonl(file=name).load()


def test_lengths_are_exact_and_runs_of_one_study_end_with_the_same_words() -> None:
    tokenizer = byte_tokenizer()
    for make, sizes in (
        (lambda tokens: Context(tokens=tokens, longest=64, count=5), (8, 64)),
        (lambda tokens: joined(SAID, tokens=tokens, longest=8), (3, 8)),
    ):
        chosen = [choose(make(size))[0] for size in sizes]
        assert fingerprint(chosen[0]) != fingerprint(chosen[1])
        for short, long in zip(*chosen, strict=True):
            ids, more = render(short, tokenizer), render(long, tokenizer)
            assert (len(ids), len(more)) == sizes and more[-len(ids) :] == ids and short.id == long.id


def test_prompts_of_a_category_are_joined_in_their_order_each_once_and_repeated_text_is_passed_over() -> None:
    # 6 characters per token: 24 are wanted. Ten characters and the blank line are 12.
    prompts = (*given(*("abcdefghi" + str(i) for i in range(5)), category="x"), *given("y" * 30, category="y"))
    made = joined(prompts).load()
    assert [prompt.turns for prompt in made] == [
        ("abcdefghi0\n\nabcdefghi1",), ("abcdefghi2\n\nabcdefghi3",), ("y" * 30,)
    ]  # fmt: skip
    assert [prompt.id for prompt in made] == ["x1 behind 1 others", "x3 behind 1 others", "y0"]
    assert [prompt.category for prompt in made] == ["x", "x", "y"], "what is left over at the end makes none"
    line = "a line that is long enough to tell"
    repeated = given("first\n" + line, "  " + line + "\nsecond", "third, without the line, but long")
    (made,) = joined(repeated, longest=10).load()
    assert "second" not in made.turns[0] and made.turns[0].count(line) == 1
    assert made.turns[0].endswith("third, without the line, but long")
    # What a user says is cut, and the template comes on top.
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    (made,) = joined(given("abcdefghijklmnopqrstuvwxyz", chat=True)).load()
    assert tokenizer.decode(list(render(made, tokenizer))) == "<wxyz>"
