"""Real prompts joined and cut to one length."""

from dataclasses import dataclass
from typing import Any

import pytest

from experiments.datasets.joined import Joined
from experiments.datasets.prompt import Prompt, choose
from experiments.measuring.jobs import render
from tests.experiments.conftest import byte_tokenizer


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
