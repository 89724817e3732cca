"""Which prompts a run takes: by category, by number per category, of which length; and prompts joined to one length."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiments.datasets.context import Context
from experiments.datasets.joined import Joined
from experiments.datasets.prompt import Prompt, Selection, choose, fingerprint
from experiments.measuring.jobs import render
from tests.experiments.conftest import byte_tokenizer


@dataclass(frozen=True, kw_only=True)
class Letters(Selection):
    """Twelve prompts of category a, six of b, two of c."""

    def load(self) -> list[Prompt]:
        names = "ab" * 6 + "a" * 6 + "cc"
        return [Prompt(id=str(number), turns=("x",), category=name) for number, name in enumerate(names)]


def categories(**settings: object) -> str:
    return "".join(sorted(prompt.category for prompt in choose(Letters(**settings))[0]))  # type: ignore[arg-type]


def test_as_many_of_every_category() -> None:
    assert categories(per_category=2) == "aabbcc"
    assert categories(per_category=4) == "aaaabbbbcc", "a category that has fewer gives all"
    assert categories(per_category=3, count=2) == "aaabbbcc", "in place of the count"
    assert categories(per_category=2, only=["a", "c"]) == "aacc"


def test_a_categorys_prompts_do_not_depend_on_the_others() -> None:
    everything = choose(Letters(per_category=3, seed=4))[0]
    alone = choose(Letters(per_category=3, seed=4, only=["a"]))[0]
    assert [prompt for prompt in everything if prompt.category == "a"] == alone
    assert alone != choose(Letters(per_category=3, seed=5, only=["a"]))[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"only": ["d"]}, "no category 'd': choose among a, b, c"),
        ({"only": [3]}, r"dataset\.only=\[3\]"),
        ({"per_category": 0}, r"dataset\.per_category=0"),
        ({"too_long": "drop"}, r"dataset\.too_long='drop'"),
        ({"tokens": 0, "longest": 8}, r"dataset\.tokens=0"),
        ({"tokens": 9, "longest": 8}, r"dataset\.longest=8: give at least dataset\.tokens=9"),
    ],
)
def test_bad_choices(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose((Context if "tokens" in settings else Letters)(**settings))


def test_the_length_of_the_context_is_exact_and_the_places_stay() -> None:
    tokenizer = byte_tokenizer()
    chosen = {size: choose(Context(tokens=size, longest=64, count=5))[0] for size in (8, 64)}
    assert [prompt.id for prompt in chosen[8]] == [prompt.id for prompt in chosen[64]]
    for short, long in zip(chosen[8], chosen[64], strict=True):
        ids, more = render(short, tokenizer), render(long, tokenizer)
        assert (len(ids), len(more)) == (8, 64)
        assert more[-8:] == ids
    assert fingerprint(chosen[8]) != fingerprint(chosen[64])


def test_context_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(100)))
    prompts = Context(tokens=20, longest=30, files=str(tmp_path / "*.txt"), count=None).load()
    assert len(prompts) > 1
    assert all(len(prompt.turns[0]) >= 180 for prompt in prompts)
    assert {len(render(prompt, byte_tokenizer())) for prompt in prompts} == {20}
    with pytest.raises(ValueError, match=r"dataset\.longest=3000: no text of 18000 characters"):
        Context(longest=3000, files=str(tmp_path / "*.txt")).load()


def test_hashes_of_whole_prompts_are_those_of_earlier_runs() -> None:
    # Pinned: a change would keep earlier runs from being compared with new ones.
    assert fingerprint([Prompt(id="a", turns=("x", "y"), category="c", chat=True)]) == "bb2e9956140efbf9"


@dataclass(frozen=True)
class Given:
    """A dataset of prompts that a test gives it."""

    prompts: tuple[Prompt, ...]
    count: int | None = None
    seed: int = 0

    def load(self) -> list[Prompt]:
        return list(self.prompts)


def given(*texts: str, category: str = "", chat: bool = False) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"{category}{i}", (text,), category, chat) for i, text in enumerate(texts))


def joined(prompts: tuple[Prompt, ...], *, tokens: int = 4, longest: int = 4, **more: Any) -> Joined:
    return Joined(prompts=Given(prompts), tokens=tokens, longest=longest, **{"count": None, **more})


def test_prompts_of_a_category_are_joined_in_their_order_each_once() -> None:
    # 6 characters per token: 24 are wanted. Ten characters and the blank line are 12.
    prompts = (*given(*("abcdefghi" + str(i) for i in range(5)), category="x"), *given("y" * 30, category="y"))
    made = joined(prompts).load()
    assert [prompt.turns for prompt in made] == [
        ("abcdefghi0\n\nabcdefghi1",), ("abcdefghi2\n\nabcdefghi3",), ("y" * 30,)
    ]  # fmt: skip
    assert [prompt.id for prompt in made] == ["x1 behind 1 others", "x3 behind 1 others", "y0"]
    assert [prompt.category for prompt in made] == ["x", "x", "y"], "what is left over at the end makes none"


def test_repeated_text_is_passed_over() -> None:
    line = "a line that is long enough to tell"
    prompts = given("first\n" + line, "  " + line + "\nsecond", "third, without the line, but long")
    (made,) = joined(prompts, longest=10).load()
    assert "second" not in made.turns[0] and made.turns[0].count(line) == 1
    assert made.turns[0].endswith("third, without the line, but long")


def test_runs_of_one_study_end_with_the_same_words() -> None:
    prompts = given(*(f"prompt {i} says something of its own" for i in range(8)))
    short, long = (joined(prompts, tokens=tokens, longest=8).load() for tokens in (3, 8))
    tokenizer = byte_tokenizer()
    for one, other in zip(short, long, strict=True):
        assert one.id == other.id
        few, many = render(one, tokenizer), render(other, tokenizer)
        assert (len(few), len(many)) == (3, 8) and many[-3:] == few


def test_what_a_user_says_is_cut_and_the_template_comes_on_top() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    (made,) = joined(given("abcdefghijklmnopqrstuvwxyz", chat=True)).load()
    assert tokenizer.decode(list(render(made, tokenizer))) == "<wxyz>"


def test_too_few_prompts_are_refused_with_what_to_give() -> None:
    prompts = given(*(f"prompt {i} says something of its own" for i in range(4)))
    with pytest.raises(ValueError, match=r"make 4 joined prompts of 24 characters.*and 5 are wanted.*dataset.count=4"):
        choose(joined(prompts, count=5))
    with pytest.raises(ValueError, match="make 0 joined prompts of 6000 characters"):
        joined(prompts, longest=1000).load()
    assert len(choose(joined(prompts, count=4))[0]) == 4
